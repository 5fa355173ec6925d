"""Parameters of a primitive: the one list that operators, optimizers, checkpoints, exporter and planner read. Imports
no torch, because the planner does not."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import isqrt, prod
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the planner reads this, which is arithmetic
    from torch import Tensor

HARMONICS = -1
"""In a shape: the number of spherical harmonics coefficients beyond the first (`harmonics`)."""
POSITION = "means"
"""Parameter [3] of every primitive: the position in world units. Points are distributed to ranks, ordered and cropped
by it, and its learning rate scales the noise of MCMC."""


@dataclass(frozen=True)
class Parameter:
    """One parameter of a primitive.

    Attributes:
        name: of the parameter in `Points.params` and in checkpoints, and of its group of learning rates.
        shape: of one point's; `HARMONICS` for a size that follows from the model's degree.
        activation: name of the torch function applied before rendering, or "" for none.
        rate: Adam's learning rate for one view a step.
        final_rate: learning rate at the run's end, after exponential decay; None if it is constant.
        ply: the properties of a vertex in PLY files: one name per number, or one to be numbered; () if the primitive is
            not exported.
    """

    name: str
    shape: tuple[int, ...]
    activation: str = ""
    rate: float = 1e-3
    final_rate: float | None = None
    ply: tuple[str, ...] = ()

    def sized(self, degree: int) -> list[int]:
        """Return the shape of one point's, in a model with harmonics of this degree."""
        return [harmonics(degree) if size == HARMONICS else size for size in self.shape]

    def floats(self, degree: int) -> int:
        """Return the numbers per point, in a model with harmonics of this degree."""
        return prod(self.sized(degree))

    def properties(self, degree: int) -> list[str]:
        """Return the names in PLY files of a point's numbers."""
        count = self.floats(degree)
        return list(self.ply) if len(self.ply) == count else [f"{name}{i}" for name in self.ply for i in range(count)]


def floats(schema: Sequence[Parameter], degree: int) -> int:
    """Return the numbers per point, in a model with harmonics of this degree."""
    return sum(parameter.floats(degree) for parameter in schema)


def names(schema: Sequence[Parameter]) -> tuple[str, ...]:
    """Return the parameters' names, in their order."""
    return tuple(parameter.name for parameter in schema)


def harmonics(degree: int) -> int:
    """Return the coefficients of a colour beyond the first, in spherical harmonics up to this degree."""
    return (degree + 1) ** 2 - 1


def degree_of(count: int) -> int:
    """Return the degree with `count` `harmonics`."""
    return isqrt(count + 1) - 1


def flat(name: str, tensor: "Tensor") -> "Tensor":
    """Return opacities as the operators' [N] instead of an optimizer's [N, 1]; other tensors unchanged."""
    return tensor.view(-1) if name == "opacities" else tensor
