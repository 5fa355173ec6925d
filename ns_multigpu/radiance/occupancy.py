"""Occupancy grids of cells, and ray steps that skip empty voxels (Instant-NGP, Mueller 2022, appendix E).

nerfacc has such grids, but cannot march through them on a CPU or through an axis-wise contraction.
"""

import torch
from torch import Tensor

from ns_multigpu.radiance.partition import distance, spacing

_DECAY = 0.95
"""Decay of stored opacities at each update, as in Instant-NGP."""


class OccupancyGrid:
    """An occupancy grid over one cell.

    Args:
        values: [res ** 3] opacity of each voxel, from 0 to 1; changed in place. Voxel (x, y, z) is at
            (x * res + y) * res + z.
        threshold: minimum opacity of an occupied voxel, or the mean if that is less.
    """

    def __init__(self, values: Tensor, threshold: float) -> None:
        self.values, self.threshold = values, threshold
        self.res = round(len(values) ** (1 / 3))
        if self.res**3 != len(values):
            raise ValueError(f"a grid of {len(values)} voxels is no cube")

    @property
    def bar(self) -> Tensor:
        """Minimum opacity of an occupied voxel, []."""
        return self.values.mean().clamp_max(self.threshold)

    def occupied(self, where: Tensor) -> Tensor:
        """Return [...] bool, True if a position [..., 3] in the cell, from 0 to 1, is occupied."""
        return (self.values >= self.bar)[self._voxel(where)]

    def points(self, voxels: Tensor, inside: Tensor) -> Tensor:
        """Return positions [n, 3] from 0 to 1 in voxels [n], at relative offsets [n, 3] from 0 to 1."""
        return (self._corner(voxels) + inside) / self.res

    def diagonals(self, voxels: Tensor) -> tuple[Tensor, Tensor]:
        """Return the lower and upper corners [n, 3] of voxels, from 0 to 1."""
        corner = self._corner(voxels)
        return corner / self.res, (corner + 1) / self.res

    @torch.no_grad()
    def update(self, voxels: Tensor, opacity: Tensor) -> None:
        """Update voxels [n] with measured opacities [n]; earlier values decay."""
        self.values.mul_(_DECAY)
        self.values.scatter_reduce_(0, voxels, opacity.to(self.values), "amax")

    def _corner(self, voxels: Tensor) -> Tensor:
        parts = (voxels // self.res**2, voxels // self.res % self.res, voxels % self.res)
        return torch.stack(parts, 1).to(self.values)

    def _voxel(self, where: Tensor) -> Tensor:
        x, y, z = (where * self.res).long().clamp(0, self.res - 1).unbind(-1)
        return (x * self.res + y) * self.res + z


def steps_along(ends: tuple[Tensor, Tensor], whole: tuple[Tensor, Tensor], count: int, shift: Tensor) -> Tensor:
    """Return edges of even steps along segments, spaced as nerfacto's first samples: [n, T + 1] distances.

    Args:
        ends: [n, 1] each, begin and end of segments. whole: [n, 1] each, of their rays.
        count: number of steps of the whole ray.
        shift: [n, 1] offset of the steps, from 0 to 1.

    Returns:
        edges from a segment's begin to its end; steps behind the end have length zero.
    """
    near, far = (spacing(t) for t in whole)
    first, last = (((spacing(t) - near) / (far - near)).clamp(0, 1) * count - shift for t in ends)
    start = first.floor()
    most = int((last.ceil() - start).amax()) if len(shift) else 0  # waits for the device
    index = start + torch.arange(most + 1, device=shift.device)
    edges = distance(near + ((index + shift) / count).clamp(0, 1) * (far - near))
    edges = edges.maximum(ends[0]).minimum(ends[1])
    edges[:, :1], edges[:, -1:] = ends
    return edges


def kept_first(kept: Tensor) -> tuple[Tensor, Tensor]:
    """Return the positions of kept entries, in their order.

    Args:
        kept: [n, T] bool.

    Returns:
        [n, K] positions, kept ones first, K the largest number in a row; and [n, K] bool, True for kept ones.
    """
    counts = kept.sum(1)
    most = int(counts.amax()) if len(counts) else 0  # waits for the device
    places = (~kept).to(torch.uint8).argsort(dim=1, stable=True)[:, :most]
    return places, torch.arange(most, device=kept.device) < counts[:, None]


def with_gaps(starts: Tensor, ends: Tensor) -> Tensor:
    """Return the edges [n, 2 K] of disjoint samples [n, K]: every second interval is a gap."""
    return torch.stack([starts, ends], 2).flatten(1)


def between_gaps(values: Tensor) -> Tensor:
    """Interleave sample values [n, K, ...] with zeros for the gaps of `with_gaps`: [n, 2 K - 1, ...]."""
    return torch.stack([values, torch.zeros_like(values)], 2).flatten(1, 2)[:, :-1]
