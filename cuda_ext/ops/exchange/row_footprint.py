"""Number of rows whose footprint overlaps each patch of a batch: the rows that a patch needs from their owner."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from cuda_ext.dispatch.library import LIBRARY
from cuda_ext.dispatch.load import kernels_serve
from cuda_ext.ops.common.checks import check_floats, check_ints, check_tensors
from cuda_ext.reference import row_footprint as composed


@torch.no_grad()
def footprint_counts(view_ids: Tensor, count: Tensor, means2d: Tensor, radii: Tensor, patches: Sequence[int]) -> Tensor:
    """Return the number of rows that overlap each patch: the matrix A of Gaian (section 4.2.2), this rank's column of
    it.

    A row overlaps a patch of its view if the box of `radii` around its mean holds a pixel centre of it, which is the
    rule of `intersect` and of `route_lines`. Nothing is read back.

    Args:
        view_ids: [M] int32.
        count: [1] int64; the lines from there on are padding. May exceed M.
        means2d: [M, 2] float32 pixels.
        radii: [M, 2] int32 half extents in pixels; a row where they are not positive overlaps no patch.
        patches: 5 integers a patch (view, x0, y0, x1, y1): the rectangles rendered, halo included, in any order.

    Returns:
        [patches] int64.

    Raises:
        TypeError, ValueError: types, shapes or patches are wrong.
        NativeBuildError: the operators cannot be compiled.
    """
    rows = means2d.shape[0]
    check_floats(means2d, means2d=(means2d, (-1, 2)))
    check_tensors(torch.int32, means2d.device, view_ids=(view_ids, (rows,)), radii=(radii, (rows, 2)))
    check_tensors(torch.int64, means2d.device, count=(count, (1,)))
    numbers = check_ints("patches", patches, 5, len(patches) // 5, "patch")
    for k in range(0, len(numbers), 5):
        view, x0, y0, x1, y1 = numbers[k : k + 5]
        if min(view, x0, y0) < 0 or x1 < x0 or y1 < y0:
            raise ValueError(f"patch {k // 5} is (view, x0, y0, x1, y1) = {tuple(numbers[k : k + 5])}")
    op: Any = torch.ops.ns_multigpu.footprint_counts if kernels_serve(means2d) else composed.footprint_counts
    return op(view_ids, count, means2d.detach(), radii, numbers)


LIBRARY.impl("footprint_counts", composed.footprint_counts, "CPU")
