"""Contraction of unbounded space to a box, separately for each axis, so that cells stay convex.

Mip-NeRF 360 contracts by the norm of a position, which bends flat faces between cells in the world. A straight ray
could then leave a cell and enter it again, in more than one segment. Contracted by axis, a plane across an axis stays a
plane: boxes are boxes in the world and in the grid.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

_RADIUS = 2.0
"""Contracted coordinate of infinity."""


def contract(x: Tensor) -> Tensor:
    """Contract positions as Mip-NeRF 360 (section 2) does, but by axis: identity within [-1, 1], 2 - 1/x beyond.

    Args:
        x: any shape; infinity is contracted to 2.

    Returns:
        of the same shape, within [-2, 2]. Differentiable everywhere.
    """
    beyond = x.abs().clamp_min(1.0)
    return torch.where(x.abs() <= 1, x, x.sign() * (_RADIUS - 1 / beyond))


def expand(y: Tensor) -> Tensor:
    """Invert `contract` for `y`, any shape within [-2, 2]; -2 and 2 give infinity."""
    return torch.where(y.abs() <= 1, y, y.sign() / (_RADIUS - y.abs()).clamp(0, 1))


@dataclass(frozen=True)
class Domain:
    """Space that cells are cut from.

    Attributes:
        lower, upper: its corners in the coordinates that cells are cut in.
        contracted: True if those are contracted coordinates, False for the world's.
    """

    lower: tuple[float, float, float]
    upper: tuple[float, float, float]
    contracted: bool

    @staticmethod
    def unbounded() -> "Domain":
        """Return all of space, contracted."""
        return Domain((-_RADIUS, -_RADIUS, -_RADIUS), (_RADIUS, _RADIUS, _RADIUS), True)

    @staticmethod
    def box(corners: Tensor) -> "Domain":
        """Return a box [2, 3] of the world, lower corner first, without anything outside.

        Raises:
            ValueError: it has no volume.
        """
        (a, b, c), (d, e, f) = corners.tolist()
        if not (a < d and b < e and c < f):
            raise ValueError(f"the scene's box from {(a, b, c)} to {(d, e, f)} has no volume")
        return Domain((a, b, c), (d, e, f), False)

    def holds(self, x: Tensor) -> Tensor:
        """Return [N] bool, True if a world position [N, 3] is inside and finite."""
        where = self.inward(x.double())
        low, high = (torch.tensor(c, dtype=torch.float64, device=x.device) for c in (self.lower, self.upper))
        return ((where >= low) & (where <= high)).all(1) & x.isfinite().all(1)

    def inward(self, x: Tensor) -> Tensor:
        """Return the partition coordinates of world positions of any shape."""
        return contract(x) if self.contracted else x

    def outward(self, y: Tensor) -> Tensor:
        """Return the world positions of partition coordinates of any shape."""
        return expand(y) if self.contracted else y
