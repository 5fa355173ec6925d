"""Exchange of rows between ranks: route, pack into records in peer memory, unpack, and return gradients to records.

A record has the numbers of a row's columns (`RowLayout`), of 3D Gaussians means2d x, y; conic xx, xy, yy; opacity; red,
green, blue; depth. Int32s follow, bit for bit: radii x, y; view id; slot (the row's line at its owner). Zeros fill it
up to a power of two: 16 numbers of 4 bytes for 3D Gaussians. A record of gradients has those by the columns in the same
places; of 3D Gaussians see `rasterize_backward_into`. A *segment* has a capacity of `capacity` records from one rank.

Addresses are numbers in a tensor: on CUDA of memory of any GPU that this one can access
(`ns_multigpu.core.dist.peer_memory`), on CPU of memory of this process. They are trusted: a wrong one is a wrong write.
On CUDA nothing is read back, so that a CUDA graph can hold all of these; who orders writers and readers of a segment is
the caller's business.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from cuda_ext.dispatch.library import serve_cpu
from cuda_ext.dispatch.load import kernels_serve
from cuda_ext.ops.common.checks import check_tensors
from cuda_ext.ops.exchange.row_layout import GAUSSIAN_ROWS, RowLayout, check_records
from cuda_ext.reference import row_exchange as composed

RECORD_FLOATS = GAUSSIAN_ROWS.record_floats
"""Numbers of 4 bytes in a record of 3D Gaussians."""
GRADIENT_FLOATS = 12
"""Numbers of their gradient's record that are gradients: its first."""
MOST_RANKS = 32
"""Ranks that rows can go to: a bit each in the kernels."""


@torch.no_grad()
def route_lines(
    view_ids: Tensor,
    count: Tensor,
    means2d: Tensor,
    radii: Tensor,
    patches: Sequence[int],
    place: Tensor,
    counts: Tensor,
    in_cells: Tensor | None = None,
    cells: Sequence[int] = (),
) -> None:
    """Find the ranks whose patches each row overlaps, and its position among the rows sent to each rank.

    A row overlaps a patch of its view if the box of `radii` around its mean contains a pixel centre of the patch, as in
    `intersect`. Rows keep their order, so that the result is the same on every run.

    Args:
        view_ids: [M] int32.
        count: [1] int64; the lines from there on are padding and go nowhere. May exceed M.
        means2d: [M, 2] pixels.
        radii: [M, 2] int32 half extents in pixels; a row where they are not positive goes nowhere.
        patches: 6 integers a patch (rank, view, x0, y0, x1, y1): the rectangles rendered, halo included, in any order.
        place: [ranks, M] int32, 1 to `MOST_RANKS` ranks, written: the number of rows before this one that go to the
            rank, or -1 if this one does not.
        counts: [ranks] int64, written: how many rows go to each rank.
        in_cells, cells: [cells, M] bool which rows are in each cell, and of each patch the cell whose rows go there;
            None to send all rows that overlap a patch.

    Raises:
        TypeError, ValueError: types, shapes, patches or ranks are wrong.
        NativeBuildError: the operators cannot be compiled.
    """
    rows, ranks = means2d.shape[0], counts.shape[0]
    check_records(means2d, means2d=(means2d, (-1, 2)))
    integers = {"view_ids": (view_ids, (rows,)), "radii": (radii, (rows, 2)), "place": (place, (ranks, rows))}
    check_tensors(torch.int32, means2d.device, **integers)
    check_tensors(torch.int64, means2d.device, count=(count, (1,)), counts=(counts, (ranks,)))
    _check_ranks(ranks)
    numbers = _checked_patches(patches, ranks)
    if in_cells is not None:
        check_tensors(torch.bool, means2d.device, in_cells=(in_cells, (-1, rows)))
        if len(cells) != len(numbers) // 6 or not all(0 <= cell < len(in_cells) for cell in cells):
            raise ValueError(f"cells must be one of 0 to {len(in_cells) - 1} for each of {len(numbers) // 6} patches.")
    op: Any = torch.ops.ns_multigpu.route_lines if kernels_serve(means2d) else composed.route_lines
    op(view_ids, count, means2d.detach(), radii, numbers, ranks, place, counts, in_cells, list(cells))


@torch.no_grad()
def pack(rows: Any, place: Tensor, destinations: Tensor, capacity: int, layout: RowLayout = GAUSSIAN_ROWS) -> None:
    """Write each row's record to line `place[r, row]` of the segment at `destinations[r]`, for each rank r.

    Rows whose place is -1, or not below the capacity, are omitted; the counts of `route_lines` include them.
    Nothing else in a segment is written. On CUDA in whole records, those of a rank one after the other.

    Args:
        rows: what has the columns of `layout`, `radii` and `view_ids`.
        place: [ranks, M] int32, from `route_lines`; no two rows of a rank with one place.
        destinations: [ranks] int64, addresses of segments of `capacity` records, multiples of 16.
        capacity: records that a segment holds.
        layout: of the rows.

    Raises:
        TypeError, ValueError: types, shapes or capacity are wrong, or no kernels serve the layout.
        RuntimeError: on CUDA without our kernels: nothing else writes to an address there.
        NativeBuildError: the operators cannot be compiled.
    """
    given, ranks = layout.checked(rows), place.shape[0]
    count, device = len(rows.means2d), rows.means2d.device
    check_tensors(torch.int32, device, place=(place, (ranks, count)))
    check_tensors(torch.int64, device, destinations=(destinations, (ranks,)))
    _check_ranks(ranks)
    _check_capacity(capacity)
    op: Any = torch.ops.ns_multigpu.pack if _kernels_serve_addresses(rows.means2d) else composed.pack
    op(*given, place, destinations, capacity)


@torch.no_grad()
def unpack(records: Tensor, counts: Tensor, views: int, layout: RowLayout = GAUSSIAN_ROWS) -> Any:
    """Return the padded rows received in the segments of all ranks: what `intersect` and `rasterize` take.

    Args:
        records: [ranks, capacity, record_floats] float32, written by `pack`. What lies behind a segment's count is not
            looked at.
        counts: [ranks] int64, how many came from each; more than the capacity counts as the capacity.
        views: of the batch, at least 1.
        layout: of the rows.

    Returns:
        `ReceivedRows`, or what the layout has in its place.

    Raises:
        TypeError, ValueError: types, shapes or views are wrong, or no kernels serve the layout.
        NativeBuildError: the operators cannot be compiled.
    """
    check_records(records, records=(records, (-1, -1, layout.record_floats)))
    ranks = records.shape[0]
    _check_ranks(ranks)
    check_tensors(torch.int64, records.device, counts=(counts, (ranks,)))
    if views < 1:
        raise ValueError(f"unpack needs at least one view, not {views}.")
    op: Any = torch.ops.ns_multigpu.unpack if kernels_serve(records) else composed.unpack
    return layout.receive(*op(records.detach(), counts, views, layout.columns))


@torch.no_grad()
def add_records(records: Tensor, sinks: Tensor, owners: Tensor, slots: Tensor, system_scope: bool = False) -> None:
    """Add each row's record to line `slots[row]` at `sinks[owners[row]]`, as `rasterize_backward_into` does.

    Args:
        records: [M, K] float32. Rows that are zero are not looked at any further, and may have no owner.
        sinks: [S] int64, addresses of records of K float32. owners: [M] int32, below S. slots: [M] int32.
        system_scope: whether other GPUs add to the same records.

    Raises:
        TypeError, ValueError: types or shapes are wrong.
        RuntimeError: on CUDA without our kernels: nothing else writes to an address there.
        NativeBuildError: the operators cannot be compiled.
    """
    check_records(records, records=(records, (-1, -1)))
    check_tensors(torch.int32, records.device, owners=(owners, (len(records),)), slots=(slots, (len(records),)))
    check_tensors(torch.int64, records.device, sinks=(sinks, (-1,)))
    op: Any = torch.ops.ns_multigpu.add_records if _kernels_serve_addresses(records) else composed.add_records
    op(records.detach(), sinks, owners, slots, system_scope)


def _checked_patches(patches: Sequence[int], ranks: int) -> list[int]:
    numbers = [int(number) for number in patches]
    if len(numbers) % 6:
        raise ValueError(f"patches holds 6 integers a patch (rank, view, x0, y0, x1, y1); got {len(numbers)} in all.")
    for k in range(0, len(numbers), 6):
        rank, view, x0, y0, x1, y1 = numbers[k : k + 6]
        if not 0 <= rank < ranks or min(view, x0, y0) < 0 or x1 < x0 or y1 < y0:
            raise ValueError(
                f"patch (rank, view, x0, y0, x1, y1) = {tuple(numbers[k : k + 6])}: need 0 <= rank < {ranks}, "
                "view, x0, y0 >= 0, x1 >= x0 and y1 >= y0."
            )
    return numbers


def _kernels_serve_addresses(tensor: Tensor) -> bool:
    if kernels_serve(tensor):
        return True
    if tensor.device.type != "cpu":
        raise RuntimeError(
            f"Only our CUDA kernels follow addresses on {tensor.device}, and they are switched off: unset "
            "NS_MULTIGPU_OPS=reference, or use a strategy that needs no peer memory."
        )
    return False


def _check_ranks(ranks: int) -> None:
    if not 1 <= ranks <= MOST_RANKS:
        raise ValueError(f"rows go to 1 to {MOST_RANKS} ranks, not to {ranks}.")


def _check_capacity(capacity: int) -> None:
    if not 0 <= capacity < 2**31:
        raise ValueError(f"capacity must lie in 0..2^31 - 1, got {capacity}.")


serve_cpu(composed, "route_lines", "pack", "unpack", "add_records")
