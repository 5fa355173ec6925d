"""The toy as a nerfstudio method, for `NERFSTUDIO_METHOD_CONFIGS=toy=tests.plugin.toy_method:toy`."""

from nerfstudio.plugins.types import MethodSpecification

from ns_multigpu.plugin.train.config import DistributedTrainerConfig
from tests.plugin.toy import ToyTrainer

toy = MethodSpecification(DistributedTrainerConfig(method_name="toy", _target=ToyTrainer), description="A toy.")
