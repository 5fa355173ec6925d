"""Tile lists cut to windows of depth: what of a tile is drawn in one of several layers that lie behind one another."""

from typing import Any

import torch
from torch import Tensor

from cuda_ext.dispatch.library import LIBRARY
from cuda_ext.dispatch.load import kernels_serve
from cuda_ext.reference import list_windows as composed

__all__ = ["clip_lists"]


@torch.no_grad()
def clip_lists(tile_offsets: Tensor, row_ids: Tensor, depths: Tensor, windows: Tensor) -> tuple[Tensor, Tensor]:
    """Restrict each tile's list to the rows whose depth lies in the tile's window.

    Lists are in order of depth, so that what is left is a run of each. Nothing is read back to the host.

    Args:
        tile_offsets: [T + 1] int32, row_ids: [I] int32: lists as `intersect` and `intersect_capacity` make them.
        depths: [M] of the rows.
        windows: [T, 2], of `depths`' dtype: rows with first <= depth < second stay.

    Returns:
        tile_offsets [T + 1] and row_ids [I] int32, -1 behind the last list.

    Raises:
        TypeError, ValueError: shapes, or the windows' dtype, are wrong.
        NativeBuildError: the operators cannot be compiled.
    """
    if windows.shape != (len(tile_offsets) - 1, 2):
        raise ValueError(f"windows must be [{len(tile_offsets) - 1}, 2], got {tuple(windows.shape)}.")
    if windows.dtype != depths.dtype:
        raise TypeError(f"windows are {windows.dtype} and depths {depths.dtype}: rounding would part them differently.")
    is_native = kernels_serve(depths) and depths.dtype == torch.float32
    op: Any = torch.ops.ns_multigpu.clip_lists if is_native else composed.clip_lists
    return op(tile_offsets, row_ids, depths.detach(), windows)


LIBRARY.impl("clip_lists", composed.clip_lists, "CPU")
