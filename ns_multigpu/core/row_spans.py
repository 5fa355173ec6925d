# torch annotates only part of itself:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
"""How many rows begin and end at each row of tiles of a layer: enough to say how many reach any band of it.

A row of a splat that reaches tile rows b to e is in a band [first, end) unless e < first or b >= end. So the band has
as many as begin before its end, less those that end before it: two histograms answer for all bands.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ns_multigpu.core.types import TILE


def tile_rows(height: int) -> int:
    """Rows of tiles of so many pixels."""
    return -(-height // TILE)


def spans_length(sizes: Sequence[tuple[int, int]]) -> int:
    """How many numbers `row_spans` returns of layers of these sizes."""
    return sum(2 * tile_rows(height) for _, height in sizes)


@torch.no_grad()
def row_spans(
    layers: Tensor, means2d: Tensor, radii: Tensor, sizes: Sequence[tuple[int, int]], count: Tensor | None = None
) -> Tensor:
    """The rows that begin, and those that end, at each row of tiles of each layer. Nothing is read back.

    A row reaches the pixels whose centres the box of `radii` around its mean holds, as for `cuda_ext.reach_counts`.
    What reaches no pixel of its layer is not counted.

    Args:
        layers: [M] of each row, 0 to len(sizes) - 1. means2d: [M, 2] pixels. radii: [M, 2] half extents in pixels.
        sizes: width and height of each layer.
        count: [1] int64, the lines from there on are padding; None where all are rows.

    Returns:
        int64, one layer behind the other: of each row of tiles how many begin there, then of each how many end there.
    """
    device, total = means2d.device, spans_length(sizes)
    if len(set(sizes)) == 1:  # no numbers have to be brought to the device
        width, height = sizes[0]
        limits = torch.cat([means2d.new_full((1,), width), means2d.new_full((1,), height)])
        rows: Tensor | int = tile_rows(height)
        base = layers.long() * (2 * rows)
    else:
        starts, at = list[int](), 0
        for _, height in sizes:
            starts.append(at)
            at += 2 * tile_rows(height)
        where = layers.long()
        limits = torch.tensor(sizes, dtype=means2d.dtype, device=device).reshape(-1, 2)[where]
        rows = torch.tensor([tile_rows(height) for _, height in sizes], dtype=torch.int64, device=device)[where]
        base = torch.tensor(starts, dtype=torch.int64, device=device)[where]
    zero = torch.zeros_like(limits)
    first = torch.ceil(means2d - radii - 0.5).clamp(zero, limits)
    end = torch.floor(means2d + radii + 0.5).clamp(zero, limits)
    alive = (first < end).all(-1) & (radii > 0).all(-1)
    if count is not None:
        alive &= torch.arange(len(alive), device=device) < count
    begins = base + first[:, 1].long() // TILE
    ends = base + rows + (end[:, 1].long() - 1) // TILE
    sums = torch.zeros(total + 1, dtype=torch.int64, device=device)
    ones = torch.ones_like(base)
    for places in (begins, ends):
        sums.index_add_(0, torch.where(alive, places, total), ones)
    return sums[:total]
