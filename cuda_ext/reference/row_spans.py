"""`row_spans` in torch's operators. See `cuda_ext.ops.row_spans`."""

from collections.abc import Sequence

import torch
from torch import Tensor

TILE = 16


@torch.no_grad()
def row_spans(
    layers: Tensor, means2d: Tensor, radii: Tensor, width: int, height: int, count_of_layers: int,
    count: Tensor | None = None, cells: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Of layers that have one size."""
    return spans_of(layers, means2d, radii, [(width, height)] * count_of_layers, count, cells)


@torch.no_grad()
def spans_of(
    layers: Tensor, means2d: Tensor, radii: Tensor, sizes: Sequence[tuple[int, int]], count: Tensor | None,
    cells: Tensor | None,
) -> Tensor:  # fmt: skip
    """See `cuda_ext.ops.row_spans.row_spans`."""
    device = means2d.device
    each = 1 if cells is None else len(cells)
    total = sum(2 * each * -(-height // TILE) for _, height in sizes)
    where = layers.long().clamp(0, max(len(sizes) - 1, 0))
    if len(set(sizes)) == 1:  # no numbers have to be brought to the device
        width, height = sizes[0]
        limits = torch.cat([means2d.new_full((1,), width), means2d.new_full((1,), height)])
        lines: Tensor | int = -(-height // TILE)
        base = where * (2 * each * lines)
    else:
        starts, at = list[int](), 0
        for _, height in sizes:
            starts.append(at)
            at += 2 * each * -(-height // TILE)
        limits = torch.tensor(sizes, dtype=means2d.dtype, device=device).reshape(-1, 2)[where]
        lines = torch.tensor([-(-height // TILE) for _, height in sizes], dtype=torch.int64, device=device)[where]
        base = torch.tensor(starts, dtype=torch.int64, device=device)[where]
    zero = torch.zeros_like(limits)
    first = torch.ceil(means2d - radii - 0.5).clamp(zero, limits)
    end = torch.floor(means2d + radii + 0.5).clamp(zero, limits)
    alive = (first < end).all(-1) & (radii > 0).all(-1) & (layers == where)
    if count is not None:
        alive &= torch.arange(len(alive), device=device) < count
    begins = base + first[:, 1].long() // TILE
    ends = base + lines + (end[:, 1].long() - 1) // TILE
    sums = torch.zeros(total + 1, dtype=torch.int64, device=device)
    ones = torch.ones_like(base)
    for cell in range(each):
        counted = alive if cells is None else alive & cells[cell]
        for places in (begins, ends):
            sums.index_add_(0, torch.where(counted, places + 2 * cell * lines, total), ones)
    return sums[:total]
