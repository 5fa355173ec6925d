"""Exchange of rows between ranks: route, pack into records in peer memory, unpack, and sum the returned gradients.

A record is 16 numbers of 4 bytes: means2d x, y; conic xx, xy, yy; opacity; red, green, blue; depth; and as int32, bit
for bit, radii x, y; view id; slot (the row's line at its owner); and two zeros. Gradients come in the records of
`rasterize_backward_into`, which have the same in their first nine places. A *segment* has a capacity of `capacity`
records from one rank.

Addresses are numbers in a tensor: on CUDA of memory of any GPU that this one can access
(`ns_multigpu.core.dist.peer_memory`), on CPU of memory of this process. They are trusted: a wrong one is a wrong write.
On CUDA nothing is read back, so that a CUDA graph can hold all of these; who orders writers and readers of a segment is
the caller's business.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cuda_ext.dispatch.library import serve_cpu
from cuda_ext.dispatch.load import kernels_serve
from cuda_ext.ops.common.checks import check_floats, check_tensors
from cuda_ext.reference import row_exchange as composed
from cuda_ext.reference.row_exchange import GRADIENT_FLOATS as GRADIENT_FLOATS
from cuda_ext.reference.row_exchange import RECORD_FLOATS as RECORD_FLOATS

MOST_RANKS = 32
"""Ranks that rows can go to: a bit each in the kernels."""


class SplatColumns(NamedTuple):
    """Columns of rows that are exchanged: see `SplatRows`."""

    view_ids: Tensor
    means2d: Tensor
    conics: Tensor
    opacities: Tensor
    features: Tensor
    depths: Tensor
    radii: Tensor


class ReceivedRows(NamedTuple):
    """Rows from S sources, a segment of `capacity` lines after the other: M = S * capacity lines.

    Attributes:
        view_ids: [M] int32; of padding the last view.
        means2d: [M, 2] pixels; zero, as all that follows, in padding.
        conics: [M, 3] inverse covariance (xx, xy, yy) in 1/pixels^2.
        opacities: [M].
        features: [M, 3] RGB.
        depths: [M] world units.
        radii: [M, 2] int32 half extents in pixels; not positive where a row is not drawn: see `Projection`.
        owners: [M] int32, the source that the line's segment belongs to, also of padding.
        slots: [M] int32, the row's line at its owner; of padding 0.
    """

    view_ids: Tensor
    means2d: Tensor
    conics: Tensor
    opacities: Tensor
    features: Tensor
    depths: Tensor
    radii: Tensor
    owners: Tensor
    slots: Tensor


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
    _check_floats(means2d, means2d=(means2d, (-1, 2)))
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
def pack(rows: Any, place: Tensor, destinations: Tensor, capacity: int) -> None:
    """Write each row's record to line `place[r, row]` of the segment at `destinations[r]`, for each rank r.

    Rows whose place is -1, or not below the capacity, are omitted; the counts of `route_lines` include them.
    Nothing else in a segment is written. On CUDA in whole records of 64 bytes, those of a rank one after the other.

    Args:
        rows: `SplatColumns`, or what else has them.
        place: [ranks, M] int32, from `route_lines`; no two rows of a rank with one place.
        destinations: [ranks] int64, addresses of segments of `capacity` records, multiples of 16.
        capacity: records that a segment holds.

    Raises:
        TypeError, ValueError: types, shapes or capacity are wrong.
        RuntimeError: on CUDA without our kernels: nothing else writes to an address there.
        NativeBuildError: the operators cannot be compiled.
    """
    columns, ranks = columns_of(rows), place.shape[0]
    count, device = len(columns.means2d), columns.means2d.device
    check_tensors(torch.int32, device, place=(place, (ranks, count)))
    check_tensors(torch.int64, device, destinations=(destinations, (ranks,)))
    _check_ranks(ranks)
    _check_capacity(capacity)
    op: Any = torch.ops.ns_multigpu.pack if _kernels_serve_addresses(columns.means2d) else composed.pack
    op(*columns, place, destinations, capacity)


@torch.no_grad()
def unpack(records: Tensor, counts: Tensor, views: int) -> ReceivedRows:
    """Return the padded rows received in the segments of all ranks: what `intersect` and `rasterize` take.

    Args:
        records: [ranks, capacity, 16] float32, written by `pack`. What lies behind a segment's count is not looked at.
        counts: [ranks] int64, how many came from each; more than the capacity counts as the capacity.
        views: of the batch, at least 1.

    Raises:
        TypeError, ValueError: types, shapes or views are wrong.
        NativeBuildError: the operators cannot be compiled.
    """
    _check_floats(records, records=(records, (-1, -1, RECORD_FLOATS)))
    ranks = records.shape[0]
    _check_ranks(ranks)
    check_tensors(torch.int64, records.device, counts=(counts, (ranks,)))
    if views < 1:
        raise ValueError(f"unpack needs at least one view, not {views}.")
    op: Any = torch.ops.ns_multigpu.unpack if kernels_serve(records) else composed.unpack
    return ReceivedRows(*op(records.detach(), counts, views))


@torch.no_grad()
def collect(place: Tensor, count: Tensor, sources: Tensor, capacity: int) -> Tensor:
    """Return the sum of what the ranks have for each row: of lines `place[r, row]` of the segments at `sources[r]`.

    Summed in the order of the ranks, so that the result is the same on every run. On CUDA this rank reads the other
    ranks' memory.

    Args:
        place: [ranks, M] int32, from `route_lines`.
        count: [1] int64; the lines from there on are padding.
        sources: [ranks] int64, addresses of segments of `capacity` records [capacity, 16] float32, multiples of 16:
            this rank's rows in rank r's accumulation buffer.
        capacity: records that a segment holds; places from there on are left out, as `pack` did.

    Returns:
        records [M, 16] float32; zero for padding and for rows that went nowhere.

    Raises:
        TypeError, ValueError: types, shapes or capacity are wrong.
        RuntimeError: on CUDA without our kernels: nothing else reads from an address there.
        NativeBuildError: the operators cannot be compiled.
    """
    check_tensors(torch.int32, place.device, place=(place, (-1, -1)))
    ranks = place.shape[0]
    _check_ranks(ranks)
    check_tensors(torch.int64, place.device, count=(count, (1,)), sources=(sources, (ranks,)))
    _check_capacity(capacity)
    op: Any = torch.ops.ns_multigpu.collect if _kernels_serve_addresses(place) else composed.collect
    return op(place, count, sources, capacity)


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
    _check_floats(records, records=(records, (-1, -1)))
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


def columns_of(rows: Any) -> SplatColumns:
    """Return the columns of rows, detached.

    Raises:
        TypeError, ValueError: they are not float32, or not one for each of `means2d`.
    """
    columns = SplatColumns(*(getattr(rows, name).detach() for name in SplatColumns._fields))
    count = len(columns.means2d)
    _check_floats(
        columns.means2d, means2d=(columns.means2d, (-1, 2)), conics=(columns.conics, (count, 3)),
        opacities=(columns.opacities, (count,)), features=(columns.features, (count, 3)),
        depths=(columns.depths, (count,)),
    )  # fmt: skip
    integers = {"view_ids": (columns.view_ids, (count,)), "radii": (columns.radii, (count, 2))}
    check_tensors(torch.int32, columns.means2d.device, **integers)
    return columns


def _check_floats(like: Tensor, **tensors: tuple[Tensor, Sequence[int]]) -> None:
    if like.dtype != torch.float32:
        raise TypeError(f"Records are float32, and the rows are {like.dtype}: convert with `.float()`.")
    check_floats(like, **tensors)


def _check_ranks(ranks: int) -> None:
    if not 1 <= ranks <= MOST_RANKS:
        raise ValueError(f"rows go to 1 to {MOST_RANKS} ranks, not to {ranks}.")


def _check_capacity(capacity: int) -> None:
    if not 0 <= capacity < 2**31:
        raise ValueError(f"capacity must lie in 0..2^31 - 1, got {capacity}.")


serve_cpu(composed, "route_lines", "pack", "unpack", "collect", "add_records")
