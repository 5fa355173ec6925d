"""Rays clipped at cells: the segments, and their order along each ray."""

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor


@dataclass(frozen=True)
class Segments:
    """The segments of a batch of rays, ordered by cell, then by ray. Every rank has all of them.

    Attributes:
        rays: number of rays.
        ray: [M] int64, ray index of each segment.
        near, far: [M] distances along the ray, near < far.
        begins: [cells + 1], the first segment of each cell, and M.
        order: [R, K] int64, the segments of each ray, front to back, padded with M.
        counts: [R] int64, number of segments of each ray; 0 if it misses all cells.
    """

    rays: int
    ray: Tensor
    near: Tensor
    far: Tensor
    begins: tuple[int, ...]
    order: Tensor
    counts: Tensor

    def __len__(self) -> int:
        return self.begins[-1]


def cell_of(segments: Segments) -> Tensor:
    """Return the cell of each segment, [M] int64. Nothing is read back: the cells' bounds are host numbers."""
    parts = [b - a for a, b in pairwise(segments.begins)]
    return torch.cat([segments.ray.new_full((part,), cell) for cell, part in enumerate(parts)])


@torch.no_grad()
def passage(
    origins: Tensor, directions: Tensor, nears: Tensor, fars: Tensor, boxes: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the distances at which rays enter and leave cells, [R, cells] each, and [R, cells] bool, True if they do.
    See `clip`.

    Nothing is read back, and no shape depends on values.
    """
    planes = boxes.to(origins)
    runs = directions[:, None, None] != 0
    steps = torch.where(runs, directions[:, None, None], 1.0)
    meets = (planes - origins[:, None, None]) / steps  # [R, cells, 2, 3]
    # A ray parallel to a face never meets it: all of it is inside or outside. A position on a face counts as above.
    inside = (origins[:, None] >= planes[:, 0]) & (origins[:, None] < planes[:, 1])
    whole = torch.where(inside, torch.inf, -torch.inf)
    enter = torch.where(runs[:, :, 0], meets.amin(2), -whole).amax(-1).maximum(nears[:, None])
    exits = torch.where(runs[:, :, 0], meets.amax(2), whole).amin(-1).minimum(fars[:, None])
    return enter, exits, enter < exits


@torch.no_grad()
def clip(origins: Tensor, directions: Tensor, nears: Tensor, fars: Tensor, boxes: Tensor) -> Segments:
    """Clip rays at cells.

    Cells are convex, so that each ray has at most one segment in a cell. Cells that share a face compute bit-identical
    distances to it. Consecutive segments of a ray therefore have no gap, and no sample crosses a face.

    Args:
        origins, directions: [R, 3].
        nears, fars: [R] begin and end of each ray.
        boxes: [cells, 2, 3] as of `Partition.boxes`; they share no volume.
    """
    enter, exits, hits = passage(origins, directions, nears, fars, boxes)
    cell, ray = hits.t().nonzero(as_tuple=True)
    counts = hits.sum(1)
    ends = torch.cat([hits.sum(0).cumsum(0), counts.amax(0, keepdim=True)]) if len(counts) else counts.new_zeros(2)
    *sums, longest = ends.tolist()  # the one wait for the device
    begins = (0, *sums) if len(counts) else (0,) * (len(boxes) + 1)
    number = torch.full(hits.shape, begins[-1], device=ray.device)
    number[ray, cell] = torch.arange(begins[-1], device=ray.device)
    along = enter.masked_fill(~hits, torch.inf).argsort(dim=1, stable=True)[:, :longest]
    return Segments(len(origins), ray, enter[ray, cell], exits[ray, cell], begins, number.gather(1, along), counts)


def round_robin(segments: Segments, shares: int) -> Segments:
    """Split the segments of one cell into consecutive parts that differ by one segment at most."""
    bounds = [share * len(segments) // shares for share in range(shares + 1)]
    return Segments(
        segments.rays, segments.ray, segments.near, segments.far, tuple(bounds), segments.order, segments.counts
    )
