"""Which parts of a cell are empty, and steps along rays that leave these out (Instant-NGP, Mueller 2022, appendix E).

nerfacc has grids like these, but no way to march through them on a CPU or through an axis-wise contraction.
"""

import torch
from torch import Tensor

from ns_multigpu.radiance.partition import distance, spacing

_DECAY = 0.95
"""Of what a voxel was found to hold, at each update: as Instant-NGP's."""


class Grid:
    """An occupancy grid over one cell.

    Args:
        values: [res ** 3] how opaque each voxel was found, from 0 to 1; changed in place. Of voxel (x, y, z) at
            (x * res + y) * res + z.
        threshold: voxels count as occupied from this on, or from the mean on if that is less.
    """

    def __init__(self, values: Tensor, threshold: float) -> None:
        self.values, self.threshold = values, threshold
        self.res = round(len(values) ** (1 / 3))
        if self.res**3 != len(values):
            raise ValueError(f"a grid of {len(values)} voxels is no cube")

    @property
    def bar(self) -> Tensor:
        """[] what a voxel has to hold to be occupied."""
        return self.values.mean().clamp_max(self.threshold)

    def occupied(self, where: Tensor) -> Tensor:
        """[...] bool of positions [..., 3] in the cell, from 0 to 1."""
        return (self.values >= self.bar)[self._voxel(where)]

    def points(self, voxels: Tensor, inside: Tensor) -> Tensor:
        """[n, 3] positions from 0 to 1, of voxels [n] at places [n, 3] inside them, from 0 to 1."""
        return (self._corner(voxels) + inside) / self.res

    def diagonals(self, voxels: Tensor) -> tuple[Tensor, Tensor]:
        """[n, 3] the lower and upper corners of voxels, from 0 to 1."""
        corner = self._corner(voxels)
        return corner / self.res, (corner + 1) / self.res

    @torch.no_grad()
    def update(self, voxels: Tensor, opacity: Tensor) -> None:
        """Takes in how opaque voxels [n] were found, [n]; what was found before fades."""
        self.values.mul_(_DECAY)
        self.values.scatter_reduce_(0, voxels, opacity.to(self.values), "amax")

    def _corner(self, voxels: Tensor) -> Tensor:
        parts = (voxels // self.res**2, voxels // self.res % self.res, voxels % self.res)
        return torch.stack(parts, 1).to(self.values)

    def _voxel(self, where: Tensor) -> Tensor:
        x, y, z = (where * self.res).long().clamp(0, self.res - 1).unbind(-1)
        return (x * self.res + y) * self.res + z


def steps_along(ends: tuple[Tensor, Tensor], whole: tuple[Tensor, Tensor], count: int, shift: Tensor) -> Tensor:
    """Edges of even steps along segments, as nerfacto's first samples are spaced: [n, T + 1] distances.

    Args:
        ends: [n, 1] each, where segments begin and end. whole: [n, 1] each, where their rays do.
        count: steps that the whole ray has.
        shift: [n, 1] from 0 to 1, how far steps are moved.

    Returns:
        the first edge is a segment's beginning, the last its end; steps behind that have no length.
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
    """The places of what is kept, in their order.

    Args:
        kept: [n, T] bool.

    Returns:
        [n, K] places, those that are kept first, with K the most that a row keeps; and [n, K] which of them are kept.
    """
    counts = kept.sum(1)
    most = int(counts.amax()) if len(counts) else 0  # waits for the device
    places = (~kept).to(torch.uint8).argsort(dim=1, stable=True)[:, :most]
    return places, torch.arange(most, device=kept.device) < counts[:, None]


def with_gaps(starts: Tensor, ends: Tensor) -> Tensor:
    """Edges [n, 2 K] of samples [n, K] that do not touch: every second interval is a gap."""
    return torch.stack([starts, ends], 2).flatten(1)


def between_gaps(values: Tensor) -> Tensor:
    """What samples have, [n, K, ...], as of `with_gaps`: [n, 2 K - 1, ...], zero in gaps."""
    return torch.stack([values, torch.zeros_like(values)], 2).flatten(1, 2)[:, :-1]
