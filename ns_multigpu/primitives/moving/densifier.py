"""What the halves of a split 4D Gaussian are. All else about growing and pruning is as with 3D Gaussians."""

from collections.abc import Collection, Mapping
from typing import ClassVar

from torch import Tensor

from ns_multigpu.primitives.gaussians.regroup import Halves
from ns_multigpu.primitives.moving.turning import turn


class MovingHalves(Halves):
    """Halves are drawn from their parent's Gaussian over space and time, and are smaller along all four axes (Yang et
    al. 2024, section 3.3)."""

    draws: ClassVar[int] = 4
    shrunk: ClassVar[Collection[str]] = ("scales", "durations")

    def offsets(self, params: Mapping[str, Tensor], drawn: Tensor) -> Tensor:
        """See `Halves`: [2, C, 4], time last."""
        t, x, y, z = (turn(params) * drawn[..., None, :]).unbind(-1)
        return (t + x + y + z).roll(-1, dims=-1)

    def move(self, name: str, rows: Tensor, offsets: Tensor) -> None:
        """See `Halves`."""
        super().move(name, rows, offsets)
        if name == "times":
            rows += offsets[:, 3:]

    def moved(self) -> Collection[str]:
        """See `Halves`."""
        return ("means", "times")
