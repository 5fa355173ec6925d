"""Method specifications for nerfstudio's entry points: the composition root.

Splatfacto's recipe is written out, not taken from nerfstudio's `method_configs`. Importing that would search for
methods, including those of this module, while this module is being imported.
"""

import sys
from collections.abc import Sequence
from typing import Any

from ns_multigpu.plugin.launch.run_parts import run_parts  # first: it times the following imports

# isort: split

from nerfstudio.cameras.camera_optimizers import CameraOptimizerConfig
from nerfstudio.configs.base_config import LocalWriterConfig, LoggingConfig, ViewerConfig
from nerfstudio.data.dataparsers.nerfstudio_dataparser import NerfstudioDataParserConfig
from nerfstudio.engine.optimizers import AdamOptimizerConfig
from nerfstudio.engine.schedulers import ExponentialDecaySchedulerConfig
from nerfstudio.plugins.types import MethodSpecification

from ns_multigpu.core.schema import Parameter
from ns_multigpu.plugin.capture.datamanager import DistributedDataManagerConfig
from ns_multigpu.plugin.faults.errors import show_uncaught
from ns_multigpu.plugin.launch import quick_imports
from ns_multigpu.plugin.launch.option_help import show_what_applies
from ns_multigpu.plugin.launch.removed_options import refuse_removed
from ns_multigpu.plugin.model.options import SplatModelConfig
from ns_multigpu.plugin.radiance.data.datamanager import RadianceDataManagerConfig
from ns_multigpu.plugin.radiance.field.model import NerfactoXLModelConfig
from ns_multigpu.plugin.radiance.run.config import RadianceTrainerConfig
from ns_multigpu.plugin.radiance.run.pipeline import RadiancePipelineConfig
from ns_multigpu.plugin.run.terminal import TerminalLog
from ns_multigpu.plugin.splats.aggregate import AggregatePipelineConfig, AggregateTrainerConfig
from ns_multigpu.plugin.splats.config import DistributedTrainerConfig
from ns_multigpu.plugin.splats.pipeline import DistributedPipelineConfig, LocalityPipelineConfig, PixelPipelineConfig
from ns_multigpu.primitives.registry import all_parameters

if quick_imports.trains(sys.argv):
    quick_imports.collect_again()
    show_uncaught()  # from here on, Ctrl-C prints no traceback
    refuse_removed(sys.argv[2:])

run_parts().done("imports of ns_multigpu")

IMAGES = 30000
"""Number of images of a run, and length of its schedules."""


def _group(rate: float, final: float | None = None, warmup: int = 0, steps: int = IMAGES) -> dict[str, Any]:
    """Return an Adam optimizer, with a learning rate that decays exponentially to `final` in `steps` if it is given."""
    schedule = None
    if final is not None:
        schedule = ExponentialDecaySchedulerConfig(lr_final=final, max_steps=steps, warmup_steps=warmup)
        if warmup:
            schedule.lr_pre_warmup = 0
    return {"optimizer": AdamOptimizerConfig(lr=rate, eps=1e-15), "scheduler": schedule}


def splatfacto(
    strategy: str,
    *,
    views_per_step: int | None = None,
    schema: Sequence[Parameter] = all_parameters(),
    pipeline: type[DistributedPipelineConfig] = DistributedPipelineConfig,
    trainer: type[DistributedTrainerConfig] = DistributedTrainerConfig,
    name: str | None = None,
) -> DistributedTrainerConfig:
    """Return Splatfacto's recipe (nerfstudio 1.1.5) for a strategy, with the optimizers of these parameters; by default
    those of all primitives. Without `name` the method has the strategy's.
    """
    return trainer(
        method_name=f"splatfacto-{name or strategy}",
        steps_per_eval_image=100,
        steps_per_eval_batch=0,
        steps_per_save=2000,
        steps_per_eval_all_images=1000,
        max_num_iterations=IMAGES,
        mixed_precision=False,
        pipeline=pipeline(
            strategy=strategy,
            views_per_step=views_per_step,
            datamanager=DistributedDataManagerConfig(dataparser=NerfstudioDataParserConfig(load_3D_points=True)),
            model=SplatModelConfig(),
        ),
        optimizers={
            **{parameter.name: _group(parameter.rate, final=parameter.final_rate) for parameter in schema},
            "camera_opt": _group(1e-4, final=5e-7, warmup=1000),
            "bilateral_grid": _group(2e-3, final=1e-4, warmup=1000),
            "exposures": _group(2e-3, final=2e-4),
        },
        # "none": the profiler's table at the end of a run is redundant, since `metrics.jsonl` has the times.
        # steps_per_log: a log ends a block of fused steps, which costs as much as a step of a small capture.
        logging=LoggingConfig(
            local_writer=LocalWriterConfig(_target=TerminalLog, enable=True), profiler="none", steps_per_log=50
        ),
        viewer=ViewerConfig(num_rays_per_chunk=1 << 15),
        vis="viewer",
    )


splatfacto_batch = MethodSpecification(
    config=splatfacto("batch"),
    description="Splatfacto on several GPUs, batch strategy: replicated model, each GPU renders its own views",
)

splatfacto_tile = MethodSpecification(
    config=splatfacto("tile", views_per_step=1),
    description="Splatfacto on several GPUs, tile strategy: sharded model, every GPU renders a part of each view",
)

splatfacto_locality = MethodSpecification(
    config=splatfacto("locality", pipeline=LocalityPipelineConfig),
    description="Splatfacto on several machines, locality strategy: points and patches live on the GPUs that see them",
)

splatfacto_pixel = MethodSpecification(
    config=splatfacto("pixel", pipeline=PixelPipelineConfig),
    description="Splatfacto on several GPUs, pixel strategy: each draws its part of space, and pixels are exchanged",
)

splatfacto_aggregate = MethodSpecification(
    config=splatfacto("single", name="aggregate", pipeline=AggregatePipelineConfig, trainer=AggregateTrainerConfig),
    description="Splatfacto on several GPUs in one process: the model is on all GPUs as one PyTorch device, multigpu",
)

nerfacto_xl = MethodSpecification(
    # nerfacto's recipe (nerfstudio 1.1.5), in single precision.
    config=RadianceTrainerConfig(
        method_name="nerfacto-xl",
        steps_per_eval_batch=500,
        steps_per_save=2000,
        max_num_iterations=30000,
        mixed_precision=False,
        pipeline=RadiancePipelineConfig(
            datamanager=RadianceDataManagerConfig(
                dataparser=NerfstudioDataParserConfig(load_3D_points=True),
                train_num_rays_per_batch=4096,
                eval_num_rays_per_batch=4096,
            ),
            model=NerfactoXLModelConfig(
                eval_num_rays_per_chunk=1 << 15,
                average_init_density=0.01,
                camera_optimizer=CameraOptimizerConfig(mode="SO3xR3"),
            ),
        ),
        optimizers={
            "proposal_networks": _group(1e-2, final=1e-4, steps=200000),
            "fields": _group(1e-2, final=1e-4, steps=200000),
            "camera_opt": _group(1e-3, final=1e-4, steps=5000),
        },
        logging=LoggingConfig(local_writer=LocalWriterConfig(_target=TerminalLog, enable=True), profiler="none"),
        viewer=ViewerConfig(num_rays_per_chunk=1 << 15),
        vis="tensorboard",
    ),
    description="Nerfacto on several GPUs: each has its own part of space, with a field of its own (NeRF-XL)",
)

for _method in (
    splatfacto_batch, splatfacto_tile, splatfacto_locality, splatfacto_pixel, splatfacto_aggregate, nerfacto_xl,
):  # fmt: skip
    if sys.argv[1:2] == [_method.config.method_name]:
        show_what_applies(_method.config, sys.argv[2:])
