"""Unbounded space in a box, such that cells stay convex: each axis is contracted by itself.

Mip-NeRF 360 contracts by the norm of a position. A flat face between two cells of its contracted space is then bent in
the world, where rays are straight: a ray could leave a cell and come back, and its part in the cell would be no single
segment. Contracted by axis, a plane across an axis stays one, so that boxes are boxes in the world and in the grid.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

_REACH = 2.0
"""Of contracted coordinates: infinity is there."""


def contract(x: Tensor) -> Tensor:
    """Positions as in Mip-NeRF 360 (section 2), but each coordinate by itself: within [-1, 1] as it is, 2 - 1/x beyond.

    Args:
        x: any shape; infinity is contracted to 2.

    Returns:
        of the same shape, within [-2, 2]. Differentiable everywhere.
    """
    beyond = x.abs().clamp_min(1.0)
    return torch.where(x.abs() <= 1, x, x.sign() * (_REACH - 1 / beyond))


def expand(y: Tensor) -> Tensor:
    """The positions that `contract` maps to `y`, any shape within [-2, 2]; infinity where y is -2 or 2."""
    return torch.where(y.abs() <= 1, y, y.sign() / (_REACH - y.abs()).clamp(0, 1))


@dataclass(frozen=True)
class Domain:
    """All of space that cells are cut from.

    Attributes:
        lower, upper: its corners in the coordinates that cells are cut in.
        contracted: whether those are contracted ones; the world's otherwise.
    """

    lower: tuple[float, float, float]
    upper: tuple[float, float, float]
    contracted: bool

    @staticmethod
    def unbounded() -> "Domain":
        """All of space, contracted."""
        return Domain((-_REACH, -_REACH, -_REACH), (_REACH, _REACH, _REACH), True)

    @staticmethod
    def box(corners: Tensor) -> "Domain":
        """A box [2, 3] of the world, lower corner first, and nothing outside.

        Raises:
            ValueError: it has no volume.
        """
        (a, b, c), (d, e, f) = corners.tolist()
        if not (a < d and b < e and c < f):
            raise ValueError(f"the scene's box from {(a, b, c)} to {(d, e, f)} has no volume")
        return Domain((a, b, c), (d, e, f), False)

    def holds(self, x: Tensor) -> Tensor:
        """[N] bool, whether positions [N, 3] of the world are in it; those that are not finite are not."""
        where = self.inward(x.double())
        low, high = (torch.tensor(c, dtype=torch.float64, device=x.device) for c in (self.lower, self.upper))
        return ((where >= low) & (where <= high)).all(1) & x.isfinite().all(1)

    def inward(self, x: Tensor) -> Tensor:
        """The coordinates that cells are cut in, of positions in the world: any shape."""
        return contract(x) if self.contracted else x

    def outward(self, y: Tensor) -> Tensor:
        """Positions in the world, of the coordinates that cells are cut in: any shape."""
        return expand(y) if self.contracted else y
