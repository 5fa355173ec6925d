"""The toy as a nerfstudio method, for `NERFSTUDIO_METHOD_CONFIGS=toy=tests.lib.toy_method:toy`."""

from nerfstudio.plugins.types import MethodSpecification

from ns_multigpu.plugin.capture.city_dataparser import CityDataParserConfig
from ns_multigpu.plugin.capture.datamanager import DistributedDataManagerConfig
from ns_multigpu.plugin.splats.config import DistributedTrainerConfig
from ns_multigpu.plugin.splats.pipeline import DistributedPipelineConfig
from tests.lib.toy import ToyTrainer

_pipeline = DistributedPipelineConfig(datamanager=DistributedDataManagerConfig(dataparser=CityDataParserConfig()))
toy = MethodSpecification(
    DistributedTrainerConfig(method_name="toy", _target=ToyTrainer, pipeline=_pipeline, recipe="splatfacto"),
    description="A toy.",
)
