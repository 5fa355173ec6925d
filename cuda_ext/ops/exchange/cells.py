"""Cells of space in views: which depths of a tile each draws, and which rows may lie there.

Cells are the leaves of a tree of planes. Of a view they have one order, front to back, that is right for all rays. The
ray through a tile's middle is cut by the planes into the cells' stretches, and all of the tile goes by these.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from cuda_ext.dispatch.library import LIBRARY
from cuda_ext.dispatch.load import compiled_serves, kernels_serve
from cuda_ext.ops.common.checks import check_floats, check_ints, check_tensors
from cuda_ext.reference import cells as composed

__all__ = ["cell_windows", "cells_reached"]


@torch.no_grad()
def cell_windows(
    viewmats: Tensor,
    Ks: Tensor,
    axes: Sequence[int],
    planes: Sequence[float],
    paths: Sequence[int],
    order: Sequence[int],
    upward: Sequence[int],
    drawn: Sequence[int],
    patches: Sequence[int],
) -> Tensor:
    """Return the depths that cells draw in the tiles of their patches: first <= depth < second.

    A cell that does not draw a tile gives its interval there to the nearest cells before and behind that do, half to
    each. The first cell that draws a tile begins at -infinity, the last one ends at infinity. All cells' windows of one
    tile are consecutive, bit for bit. Computed in float64 and rounded after each operation, so that CPU and GPU agree.
    Nothing is read back.

    Args:
        viewmats: [V, 4, 4] world-to-camera. Ks: [V, 3, 3] intrinsics, pixels.
        axes, planes: of each plane the axis that it is across, 0 to 2, and where.
        paths: [cells, depth] the planes from the tree's root to each cell: 2 * plane, and 1 more where the cell is
            above it; -1 behind the last.
        order: [V, cells] each view's cells, front to back.
        upward: [V, planes] whether what is below a plane comes before what is above it, 0 or 1.
        drawn: 6 integers for each rectangle that anybody draws: view, the cell's place in the view's order, x0, y0, x1,
            y1 in pixels. Tiles of 16 pixels that it overlaps are drawn.
        patches: the same of the patches whose windows are wanted. They begin with tiles.

    Returns:
        [tiles, 2] float64: of each patch its tiles, row by row.

    Raises:
        TypeError, ValueError: types, shapes or numbers are wrong.
        NativeBuildError: the operators cannot be compiled.
    """
    views, splits = len(viewmats), len(axes)
    check_floats(viewmats, viewmats=(viewmats, (-1, 4, 4)), Ks=(Ks, (views, 3, 3)))
    if views == 0 or not order or len(order) % views:
        raise ValueError(f"order holds {len(order)} cells, for {views} views: need as many, and one at least, of each.")
    cells = len(order) // views
    if len(planes) != splits or not all(0 <= axis < 3 for axis in axes):
        raise ValueError(f"{splits} axes {list(axes)} of {len(planes)} planes: need one of 0, 1, 2 for each.")
    if len(paths) % cells or not all(-1 <= code < 2 * splits for code in paths):
        raise ValueError(f"paths must hold as many numbers for each of {cells} cells, from -1 to {2 * splits - 1}.")
    if not all(0 <= cell < cells for cell in order):
        raise ValueError(f"order must name cells 0 to {cells - 1}.")
    rises = check_ints("upward", upward, splits, views, "view")
    tables = {"drawn": drawn, "patches": patches}
    for name, numbers in tables.items():
        checked = check_ints(name, numbers, 6, len(numbers) // 6, "rectangle")
        for k in range(0, len(checked), 6):
            view, place, x0, y0, x1, y1 = checked[k : k + 6]
            starts = name == "drawn" or (x0 % composed.TILE == 0 and y0 % composed.TILE == 0)
            if not (0 <= view < views and 0 <= place < cells and 0 <= x0 <= x1 and 0 <= y0 <= y1 and starts):
                raise ValueError(
                    f"{name} {k // 6} is (view, place, x0, y0, x1, y1) = {tuple(checked[k : k + 6])}, of {views} views "
                    f"and {cells} cells; a patch begins with a whole tile."
                )
    is_native = kernels_serve(viewmats) and viewmats.dtype == torch.float32
    op: Any = torch.ops.ns_multigpu.cell_windows if is_native else composed.cell_windows
    flat = [list(numbers) for numbers in (paths, order, rises, drawn, patches)]
    return op(viewmats.detach(), Ks.detach(), list(axes), list(planes), *flat)


@torch.no_grad()
def cells_reached(
    view_ids: Tensor,
    means2d: Tensor,
    radii: Tensor,
    depths: Tensor,
    viewmats: Tensor,
    Ks: Tensor,
    boxes: Sequence[float],
) -> Tensor:
    """Return the rows that may lie in a cell's window of a tile; perhaps more. Nothing is read back.

    A row counts as flat, at the depth of its mean. The centres of the tiles that its box overlaps get that depth. A box
    around them, enlarged by more than the rounding error, is compared with the cell's box.

    Args:
        view_ids: [M] int32; those of padding may be anything. means2d: [M, 2] pixels. radii: [M, 2] int32 half extents
            in pixels. depths: [M].
        viewmats: [V, 4, 4] world-to-camera. Ks: [V, 3, 3] intrinsics, pixels.
        boxes: 6 numbers a cell, its lower and its upper corner; infinite where it has no end.

    Returns:
        [cells, M] bool.

    Raises:
        TypeError, ValueError: types or shapes are wrong.
        NativeBuildError: the operators cannot be compiled.
    """
    rows, views = means2d.shape[0], viewmats.shape[0]
    check_floats(means2d, means2d=(means2d, (-1, 2)), depths=(depths, (rows,)), viewmats=(viewmats, (-1, 4, 4)),
                 Ks=(Ks, (views, 3, 3)))  # fmt: skip
    check_tensors(torch.int32, means2d.device, view_ids=(view_ids, (rows,)), radii=(radii, (rows, 2)))
    if views == 0 or len(boxes) % 6:
        raise ValueError(f"boxes hold {len(boxes)} numbers, of {views} views: need 6 a cell, and a view.")
    is_native = compiled_serves(means2d) and (means2d.dtype == torch.float32 or means2d.device.type != "cuda")
    op: Any = torch.ops.ns_multigpu.cells_reached if is_native else composed.cells_reached
    return op(view_ids, means2d.detach(), radii, depths.detach(), viewmats.detach(), Ks.detach(), list(boxes))


LIBRARY.impl("cell_windows", composed.cell_windows, "CPU")
