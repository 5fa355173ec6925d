"""How many rows begin and end at each row of tiles of a layer: enough to say how many reach any band of it.

A row of a splat that reaches tile rows b to e is in a band [first, end) unless e < first or b >= end. So the band has
as many as begin before its end, less those that end before it: two histograms answer for all bands.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from cuda_ext.dispatch.library import fake
from cuda_ext.dispatch.load import compiled_serves
from cuda_ext.ops.checks import check_floats, check_tensors
from cuda_ext.reference import row_spans as composed

__all__ = ["row_spans"]


@torch.no_grad()
def row_spans(
    layers: Tensor, means2d: Tensor, radii: Tensor, sizes: Sequence[tuple[int, int]], count: Tensor | None = None,
    cells: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The rows that begin, and those that end, at each row of tiles of each layer. Nothing is read back.

    A row reaches the pixels whose centres the box of `radii` around its mean holds, as for `reach_counts`. What reaches
    no pixel of its layer is not counted, nor what is in a layer that there is not.

    Args:
        layers: [M] int32 of each row, 0 to len(sizes) - 1. means2d: [M, 2] pixels. radii: [M, 2] int32 half extents in
            pixels.
        sizes: width and height of each layer.
        count: [1] int64, the lines from there on are padding; None where all are rows.
        cells: [cells, M] bool; then each layer has as many parts, and a row counts in each that says so.

    Returns:
        int64, one layer, and of it one part, behind the other: of each row of tiles how many begin there, then of each
        how many end there.

    Raises:
        TypeError, ValueError: types or shapes are wrong.
        NativeBuildError: the operators cannot be compiled.
    """
    rows = means2d.shape[0]
    check_floats(means2d, means2d=(means2d, (-1, 2)))
    check_tensors(torch.int32, means2d.device, layers=(layers, (rows,)), radii=(radii, (rows, 2)))
    if count is not None:
        check_tensors(torch.int64, means2d.device, count=(count, (1,)))
    if cells is not None:
        check_tensors(torch.bool, means2d.device, cells=(cells, (-1, rows)))
    served = compiled_serves(means2d) and (means2d.dtype == torch.float32 or means2d.device.type != "cuda")
    if served and len(set(sizes)) == 1:
        op: Any = torch.ops.ns_multigpu.row_spans
        return op(layers, means2d.detach(), radii, *sizes[0], len(sizes), count, cells)
    return composed.spans_of(layers, means2d.detach(), radii, sizes, count, cells)


@fake("row_spans")
def _row_spans_fake(
    layers: Tensor, means2d: Tensor, radii: Tensor, width: int, height: int, count_of_layers: int,
    count: Tensor | None = None, cells: Tensor | None = None,
) -> Tensor:  # fmt: skip
    each = 1 if cells is None else cells.shape[0]
    return means2d.new_empty(count_of_layers * each * 2 * -(-height // composed.TILE), dtype=torch.int64)
