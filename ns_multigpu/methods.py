"""The methods that nerfstudio finds through the entry points: the composition root."""

from nerfstudio.configs.base_config import ViewerConfig
from nerfstudio.configs.method_configs import method_configs
from nerfstudio.data.dataparsers.nerfstudio_dataparser import NerfstudioDataParserConfig
from nerfstudio.plugins.types import MethodSpecification

from ns_multigpu.plugin.datamanager import DistributedDataManagerConfig
from ns_multigpu.plugin.pipeline import DistributedPipelineConfig
from ns_multigpu.plugin.splat_model import SplatModelConfig
from ns_multigpu.plugin.trainer_config import DistributedTrainerConfig


def splatfacto(strategy: str) -> DistributedTrainerConfig:
    """Splatfacto's own recipe under a strategy of ours; its optimizers and intervals are taken from nerfstudio's."""
    base = method_configs["splatfacto"]
    return DistributedTrainerConfig(
        method_name=f"splatfacto-{strategy}",
        steps_per_eval_image=base.steps_per_eval_image,
        steps_per_eval_batch=base.steps_per_eval_batch,
        steps_per_save=base.steps_per_save,
        steps_per_eval_all_images=base.steps_per_eval_all_images,
        max_num_iterations=base.max_num_iterations,
        mixed_precision=False,
        pipeline=DistributedPipelineConfig(
            strategy=strategy,
            datamanager=DistributedDataManagerConfig(dataparser=NerfstudioDataParserConfig(load_3D_points=True)),
            model=SplatModelConfig(),
        ),
        optimizers=base.optimizers,
        viewer=ViewerConfig(num_rays_per_chunk=1 << 15),
        vis="viewer",
    )


splatfacto_batch = MethodSpecification(
    config=splatfacto("batch"),
    description="Splatfacto on several GPUs, batch strategy: replicated model, each GPU renders its own views",
)
