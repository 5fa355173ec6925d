"""What a kind of point consists of: the one list of its parameters that operators, optimizers, checkpoints, exporter
and planner read. Arithmetic only, as the planner is."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import isqrt, prod
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the planner reads this, which is arithmetic
    from torch import Tensor

HARMONICS = -1
"""In a shape: as many as a model's spherical harmonics have coefficients beyond the first (`harmonics`)."""
POSITION = "means"
"""The parameter [3] that each kind of point has: where a point is, in world units. By it points are dealt out to ranks,
ordered and cropped, and its learning rate scales the noise of MCMC."""


@dataclass(frozen=True)
class Parameter:
    """One parameter of a kind of point.

    Attributes:
        name: of the parameter in `Points.params` and in checkpoints, and of its group of learning rates.
        shape: of one point's; `HARMONICS` for a size that follows from the model's degree.
        activation: what makes of it what is rendered: a function of torch, or "" for none.
        rate: Adam's learning rate for one view a step.
        final_rate: what that falls to, exponentially, until the run's end; None if it stays.
        operator: its name among the operators, where that is another.
        ply: the properties of a vertex in PLY files: a name for each number, or one that is to be numbered; () where
            the kind of point is not exported.
    """

    name: str
    shape: tuple[int, ...]
    activation: str = ""
    rate: float = 1e-3
    final_rate: float | None = None
    operator: str = ""
    ply: tuple[str, ...] = ()

    def floats(self, degree: int) -> int:
        """Numbers of a point's, in a model with harmonics of this degree."""
        return prod(harmonics(degree) if size == HARMONICS else size for size in self.shape)

    def properties(self, degree: int) -> list[str]:
        """The names in PLY files of a point's numbers."""
        count = self.floats(degree)
        return list(self.ply) if len(self.ply) == count else [f"{name}{i}" for name in self.ply for i in range(count)]


def floats(schema: Sequence[Parameter], degree: int) -> int:
    """Numbers of a point, in a model with harmonics of this degree."""
    return sum(parameter.floats(degree) for parameter in schema)


def names(schema: Sequence[Parameter]) -> tuple[str, ...]:
    """Of the parameters, in their order."""
    return tuple(parameter.name for parameter in schema)


def harmonics(degree: int) -> int:
    """Coefficients of a colour beyond the first, in spherical harmonics up to this degree."""
    return (degree + 1) ** 2 - 1


def degree_of(count: int) -> int:
    """The degree with so many `harmonics`."""
    return isqrt(count + 1) - 1


def flat(name: str, tensor: "Tensor") -> "Tensor":
    """Opacities are [N, 1] to an optimizer and [N] to the operators."""
    return tensor.view(-1) if name == "opacities" else tensor
