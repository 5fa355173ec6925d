"""What a 3D Gaussian consists of: the one list of its parameters that everything else reads."""

from torch import Tensor

from ns_multigpu.core.primitive import Parameter

SCHEMA = (
    Parameter("means", (3,)),
    Parameter("quats", (4,)),
    Parameter("scales", (3,), "exp"),
    Parameter("opacities", (1,), "sigmoid"),
    Parameter("features_dc", (3,)),
    Parameter("features_rest", (-1, 3)),
)
"""See `Gaussians` for what each means."""
ORDER = tuple(parameter.name for parameter in SCHEMA)
"""The parameters' names, in the order in which operators take them (`cuda_ext.reference.lazy_adam.PARAMETERS`)."""


def flat(name: str, tensor: Tensor) -> Tensor:
    """Opacities are [N, 1] to an optimizer and [N] to the operators."""
    return tensor.view(-1) if name == "opacities" else tensor
