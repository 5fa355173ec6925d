"""Groups of points that are neighbours along the Z-order, each with a box: the units of placement (Gaian, section
4.2.1)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ns_multigpu.core.assign.curve import MOST_BITS, interleaved

SMALLEST, LARGEST = 1024, 4096
"""Points of a group, by the paper."""
LEAST, MOST = 32, 16384
"""Allowed range of group sizes, for small models and trials."""

_GROUPS = 65536


def group_size(points: int) -> int:
    """Return the default number of points in a group: about 65,536 groups, of 1024 to 4096 points."""
    wanted = max(1, points // _GROUPS)
    return min(LARGEST, max(SMALLEST, 1 << (wanted - 1).bit_length()))


def z_codes(means: Tensor, low: Tensor, side: float) -> Tensor:
    """Return places [N] int64 along the Z-order of positions [N, 3]: 20 bits an axis over a cube, x lowest.

    Args:
        means: the positions; what is not finite counts as the origin, what lies outside as on the cube's border.
        low: [3], the cube's lower corner. side: of the cube, > 0. Ranks that hold parts of a model share both.
    """
    cells = ((_finite(means) - low.double()) / side * (1 << MOST_BITS)).clamp_(0, (1 << MOST_BITS) - 1).long()
    return interleaved(cells)


def cube_around(means: Tensor) -> tuple[Tensor, float]:
    """Return the lower corner [3] float64 and the side of a cube around positions [N, 3], N > 0, without outliers.

    On either side of an axis 0.5 % of the positions may lie outside.
    """
    places = _finite(means)
    far = int(0.005 * len(places))
    low = places.kthvalue(far + 1, dim=0).values
    high = places.kthvalue(len(places) - far, dim=0).values
    return low, max(float((high - low).amax()), 1e-30)


def _finite(means: Tensor) -> Tensor:
    return means.detach().double().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)


@dataclass(frozen=True)
class Groups:
    """C groups of N points, along an order.

    Attributes:
        size: points of a group; the last may have fewer.
        order: [N] int64, the points, group after group.
        lower, upper: [C, 3] corners of the boxes around the positions; world units.
    """

    size: int
    order: Tensor
    lower: Tensor
    upper: Tensor

    @staticmethod
    def along(means: Tensor, order: Tensor, size: int) -> "Groups":
        """Return groups of `size` >= 1 of positions [N, 3], N > 0, along an order [N] int64.

        Boxes leave out positions that are not finite. A group of no others has its box at the origin.
        """
        count = -(-len(order) // size)
        rows = torch.cat([order, order[-1:].expand(count * size - len(order))]).view(count, size)
        at = means.detach()[rows]
        there, most = at.isfinite().all(2, keepdim=True), torch.finfo(at.dtype).max
        lower, upper = torch.where(there, at, most).amin(1), torch.where(there, at, -most).amax(1)
        nowhere = ~there.any(1)
        return Groups(size, order, lower.masked_fill(nowhere, 0.0), upper.masked_fill(nowhere, 0.0))

    def __len__(self) -> int:
        return -(-len(self.order) // self.size)

    @property
    def points(self) -> Tensor:
        """[C] int64, points of each group."""
        counts = torch.full((len(self),), self.size, dtype=torch.int64, device=self.order.device)
        counts[-1] = len(self.order) - (len(self) - 1) * self.size
        return counts
