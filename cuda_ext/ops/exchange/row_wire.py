"""Packing of rows and their gradients for collectives between ranks without access to each other's memory.

A *segment* is what goes from one rank to one other: columns of words of 4 bytes, each with the capacity in rows of this
pair of ranks. The buffer holds all of a rank's segments, wherever `starts` says. What the receiver knows, or has no use
for, is not sent: whose row it is follows from the segment, and gradients come back in the order of the rows.

A row has a word for each number of its columns (`RowLayout`), and two words of radii and view: 12 words for 3D
Gaussians. A radius is a whole number from 1 on that float32 holds, as `project` makes them, so that 28 bits hold it to
the last one (rows whose radii are not positive never leave); the 8 bits that are left number up to `MOST_VIEWS` views.
A last word is the row's line at its owner, for lists that are sorted over all ranks.
Gradients are a word for each number; of 3D Gaussians 9 in the order of the record, 1 more of the depth and 2 more with
absolute ones.

With `half` a row of 3D Gaussians is 9 words and its gradients 5, with the depth or absolute ones 6, with both 7.
Positions and depths stay float32: half a pixel is float16's precision at 1024 pixels, and depths decide an order. The
rest is float16 (11 bits, rounded: 4.9e-4). So that nothing overflows, and nothing is lost that counts, four groups are
each multiplied by a power of two that is sent along: a row's conic, its colours, its gradients by the conic, and its
other gradients. The largest number of a group comes to lie between 2^14 and 2^15, and what is 2^-28 of it still has 11
bits. An inf or NaN stays one.
A conic is sent as its Cholesky factor: however the factor's numbers are rounded, they are of an ellipse. Rounded
itself, the conic of a splat 50 times as long as wide is not: xx * yy and xy^2 then agree in all bits that are left.

A rank's own segment never leaves, and is not rounded. It need not be in the buffer at all: where its start is `LOCAL`
nothing is written to it, the received rows have padding in its place, and `keep_rows` copies the rows there.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from cuda_ext.dispatch.library import serve_cpu
from cuda_ext.dispatch.load import kernels_serve
from cuda_ext.ops.common.checks import check_tensors
from cuda_ext.ops.exchange.row_layout import GAUSSIAN_ROWS, RowLayout
from cuda_ext.reference import row_wire as composed

MOST_VIEWS = 256
"""Views that a row can be of."""
MOST_SEGMENTS = 128
"""Ranks that rows can come from."""

LOCAL = -1
"""The start of a segment that is not in the buffer."""

__all__ = [
    "LOCAL",
    "MOST_SEGMENTS",
    "MOST_VIEWS",
    "collect_wire",
    "gaussian_gradients",
    "gradient_words",
    "keep_rows",
    "pack_gradients",
    "pack_wire",
    "row_words",
    "unpack_wire",
]  # fmt: skip


def row_words(*, half: bool, slots: bool, layout: RowLayout = GAUSSIAN_ROWS) -> int:
    """Return the number of words of a row."""
    return (composed.HALF_ROW if half else layout.numbers + 2) + slots


def gradient_words(returned: Sequence[int], *, half: bool) -> int:
    """Return the number of words of a row's gradients, which lie in places `returned` of their record."""
    return composed.half_gradient_words(len(returned)) if half else len(returned)


def gaussian_gradients(*, absgrad: bool, depth: bool = False) -> list[int]:
    """Return the places of returned gradients in a record of 3D Gaussians."""
    return [*range(9 + depth), *((10, 11) if absgrad else ())]


@torch.no_grad()
def pack_wire(
    rows: Any,
    place: Tensor,
    wire: Tensor,
    starts: Sequence[int],
    capacities: Sequence[int],
    rank: int,
    *,
    half: bool,
    slots: bool,
    layout: RowLayout = GAUSSIAN_ROWS,
) -> None:
    """Write each row to line `place[r, row]` of the segment to rank r, for each rank.

    Rows whose place is -1, or not below the capacity, are omitted; the counts of `route_lines` include them.

    Args:
        rows: what has the columns of `layout`, `radii` and `view_ids`; of views 0 to `MOST_VIEWS` - 1.
        place: [ranks, M] int32, from `route_lines`.
        wire: [W] int32, written.
        starts: [ranks] the first word of each segment, or `LOCAL`. capacities: [ranks] rows of each.
        rank: this one, whose segment is not rounded.
        half: see above. slots: send each row's line. layout: of the rows.

    Raises:
        TypeError, ValueError: types, shapes or segments are wrong, or no kernels serve the layout.
        NativeBuildError: the operators cannot be compiled.
    """
    given, ranks = layout.checked(rows), place.shape[0]
    check_tensors(torch.int32, wire.device, place=(place, (ranks, len(rows.means2d))), wire=(wire, (-1,)))
    _check_segments(wire, starts, capacities, rank, ranks, _row_words(rank, ranks, half, slots, layout))
    op: Any = torch.ops.ns_multigpu.pack_wire if kernels_serve(rows.means2d) else composed.pack_wire
    op(*given, place, wire, list(starts), list(capacities), rank, half, slots)


@torch.no_grad()
def unpack_wire(
    wire: Tensor,
    starts: Sequence[int],
    capacities: Sequence[int],
    counts: Tensor,
    rank: int,
    views: int,
    *,
    half: bool,
    slots: bool,
    layout: RowLayout = GAUSSIAN_ROWS,
) -> Any:
    """Return the rows received from all ranks, source by source and padded: what `intersect` and `rasterize` take.

    Args:
        wire: [W] int32. starts, capacities, rank, half, slots, layout: see `pack_wire`; of what came from each rank.
        counts: [ranks] int64, how many came from each; more than the capacity counts as the capacity.
        views: of the batch, 1 to `MOST_VIEWS`.

    Returns:
        `ReceivedRows`, or what the layout has in its place: as many lines as all capacities together. Those behind a
        source's count are padding. Slots are 0 if they were not sent.

    Raises:
        TypeError, ValueError: types, shapes, views or segments are wrong.
        NativeBuildError: the operators cannot be compiled.
    """
    ranks = len(capacities)
    check_tensors(torch.int32, wire.device, wire=(wire, (-1,)))
    check_tensors(torch.int64, wire.device, counts=(counts, (ranks,)))
    if not 1 <= views <= MOST_VIEWS:
        raise ValueError(f"rows are of 1 to {MOST_VIEWS} views on the wire, not of {views}: take fewer views a step.")
    _check_segments(wire, starts, capacities, rank, ranks, _row_words(rank, ranks, half, slots, layout))
    op: Any = torch.ops.ns_multigpu.unpack_wire if kernels_serve(wire) else composed.unpack_wire
    found = op(wire, list(starts), list(capacities), counts, rank, half, slots, views, layout.columns)
    return layout.receive(*found)


@torch.no_grad()
def keep_rows(
    rows: Any, place: Tensor, received: Any, start: int, capacity: int, *, slots: bool,
    layout: RowLayout = GAUSSIAN_ROWS,
) -> None:  # fmt: skip
    """Copy local rows to their lines among the received rows: row k to line `start + place[k]`.

    Rows whose place is -1, or not below the capacity, are left out, as `pack_wire` does.

    Args:
        rows, slots, layout: see `pack_wire`.
        place: [M] int32, from `route_lines`: of this rank's own segment.
        received: what `unpack_wire` returned, where this segment's start was `LOCAL`; written. `owners` are right.
        start, capacity: the segment's first line there, and how many it has.

    Raises:
        TypeError, ValueError: types or shapes are wrong, or the segment leaves the lines.
        NativeBuildError: the operators cannot be compiled.
    """
    given, written, lines = layout.checked(rows), layout.checked(received), len(received.means2d)
    device = rows.means2d.device
    check_tensors(torch.int32, device, place=(place, (len(rows.means2d),)), slots=(received.slots, (lines,)))
    if not 0 <= start <= start + capacity <= lines:
        raise ValueError(f"lines {start} to {start + capacity} are to be kept, of {lines} received lines.")
    op: Any = torch.ops.ns_multigpu.keep_rows if kernels_serve(rows.means2d) else composed.keep_rows
    op(*given, place, *written, received.slots, start, capacity, slots)


@torch.no_grad()
def pack_gradients(
    records: Tensor,
    counts: Tensor,
    wire: Tensor,
    starts: Sequence[int],
    capacities: Sequence[int],
    rank: int,
    *,
    half: bool,
    returned: Sequence[int],
) -> None:
    """Write the gradients of received rows to the segments of their ranks, except this rank's own.

    Args:
        records: [L, record_floats] float32 of the lines of `unpack_wire`.
        counts: [ranks] int64, as there; nothing is written for the lines behind them, or for segments that stay.
        wire: [W] int32, written. starts, capacities, rank, half: see `pack_wire`.
        returned: places in a record of the gradients that are sent: all of the layout's numbers, or
            `gaussian_gradients`.

    Raises:
        TypeError, ValueError: types, shapes or segments are wrong.
        NativeBuildError: the operators cannot be compiled.
    """
    ranks = len(capacities)
    check_tensors(torch.float32, wire.device, records=(records, (sum(capacities), -1)))
    check_tensors(torch.int32, wire.device, wire=(wire, (-1,)))
    check_tensors(torch.int64, wire.device, counts=(counts, (ranks,)))
    words = [0 if r == rank else gradient_words(returned, half=half) for r in range(ranks)]
    _check_segments(wire, starts, capacities, rank, ranks, words)
    op: Any = torch.ops.ns_multigpu.pack_gradients if kernels_serve(wire) else composed.pack_gradients
    op(records, counts, wire, list(starts), list(capacities), rank, half, list(returned))


@torch.no_grad()
def collect_wire(
    place: Tensor,
    count: Tensor,
    wire: Tensor,
    starts: Sequence[int],
    capacities: Sequence[int],
    own: Tensor,
    rank: int,
    *,
    half: bool,
    returned: Sequence[int],
) -> Tensor:
    """Return the sum of what the ranks have returned for each row, in the ranks' order: the same bits on every run.

    Args:
        place: [ranks, M] int32, from `route_lines`.
        count: [1] int64; the lines from there on are padding.
        wire: [W] int32, what `pack_gradients` wrote on the other ranks.
        starts, capacities, rank, half: see `pack_wire`.
        own: [capacities[rank], record_floats] float32, the records of this rank's own segment.
        returned: see `pack_gradients`.

    Returns:
        records [M, record_floats] float32; zero for padding, for rows that went nowhere, and in the places that are not
        sent.

    Raises:
        TypeError, ValueError: types, shapes or segments are wrong.
        NativeBuildError: the operators cannot be compiled.
    """
    ranks = place.shape[0]
    check_tensors(torch.int32, wire.device, wire=(wire, (-1,)), place=(place, (-1, -1)))
    check_tensors(torch.int64, wire.device, count=(count, (1,)))
    words = [0 if r == rank else gradient_words(returned, half=half) for r in range(ranks)]
    _check_segments(wire, starts, capacities, rank, ranks, words)
    check_tensors(torch.float32, wire.device, own=(own, (capacities[rank], -1)))
    op: Any = torch.ops.ns_multigpu.collect_wire if kernels_serve(wire) else composed.collect_wire
    return op(place, count, wire, list(starts), list(capacities), own, rank, half, list(returned))


def _row_words(rank: int, ranks: int, half: bool, slots: bool, layout: RowLayout) -> list[int]:
    """Return the words of a row in each rank's segment.

    Raises:
        ValueError: rows of this layout cannot be rounded.
    """
    if half and layout is not GAUSSIAN_ROWS:
        raise ValueError("Only rows of 3D and 4D Gaussians are rounded: leave half out.")
    return [row_words(half=half and other != rank, slots=slots, layout=layout) for other in range(ranks)]


def _check_segments(
    wire: Tensor, starts: Sequence[int], capacities: Sequence[int], rank: int, ranks: int, words: Sequence[int]
) -> None:
    if not 1 <= ranks <= MOST_SEGMENTS:
        raise ValueError(f"the wire takes rows of 1 to {MOST_SEGMENTS} ranks, not of {ranks}.")
    if not len(starts) == len(capacities) == ranks or not 0 <= rank < ranks:
        raise ValueError(
            f"{len(starts)} starts and {len(capacities)} capacities of segments, rank {rank}: there are {ranks} ranks."
        )
    for other, (start, capacity, width) in enumerate(zip(starts, capacities, words, strict=True)):
        inside = start >= 0 and start + width * capacity <= wire.shape[0]
        if capacity < 0 or not (start == LOCAL or inside):
            raise ValueError(
                f"the segment of rank {other}, {capacity} rows of {width} words from word {start} on, leaves the "
                f"{wire.shape[0]} words of the wire."
            )


serve_cpu(composed, "pack_wire", "unpack_wire", "keep_rows", "pack_gradients", "collect_wire")
