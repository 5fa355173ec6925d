"""Packing of rows and their gradients for collectives between ranks without access to each other's memory.

A *segment* is what goes from one rank to one other: columns of words of 4 bytes, each with the capacity in rows of this
pair of ranks. The buffer holds all of a rank's segments, wherever `starts` says. What the receiver knows, or has no use
for, is not sent: whose row it is follows from the segment, and gradients come back in the order of the rows.

A row is 12 words: means2d x, y; conic xx, xy, yy; opacity; red, green, blue; depth; and two words of radii and view.
A radius is a whole number from 1 on that float32 holds, as `project` makes them, so that 28 bits hold it to the last
one (rows whose radii are not positive never leave); the 8 bits that are left number up to `MOST_VIEWS` views. A 13th
word is the row's line at its owner, for lists that are sorted over all ranks.
Gradients are 9 words in the order of the record, 1 more of the depth and 2 more with absolute ones.

With `half` a row is 9 words and its gradients 5, with the depth or absolute ones 6, with both 7. Positions and depths
stay float32: half a pixel is float16's precision at 1024 pixels, and depths decide an order. The rest is float16 (11
bits, rounded: 4.9e-4). So that nothing overflows, and nothing is lost that counts, four groups are each multiplied by a
power of two that is sent along: a row's conic, its colours, its gradients by the conic, and its other gradients. The
largest number of a group comes to lie between 2^14 and 2^15, and what is 2^-28 of it still has 11 bits. An inf or NaN
stays one.
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
from cuda_ext.ops.exchange.row_exchange import ReceivedRows, columns_of
from cuda_ext.reference import row_wire as composed
from cuda_ext.reference.row_exchange import RECORD_FLOATS
from cuda_ext.reference.row_wire import gradient_words, row_words

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
    "gradient_words",
    "keep_rows",
    "pack_gradients",
    "pack_wire",
    "row_words",
    "unpack_wire",
]  # fmt: skip


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
) -> None:
    """Write each row to line `place[r, row]` of the segment to rank r, for each rank.

    Rows whose place is -1, or not below the capacity, are omitted; the counts of `route_lines` include them.

    Args:
        rows: `SplatColumns`, or what else has them, of views 0 to `MOST_VIEWS` - 1.
        place: [ranks, M] int32, from `route_lines`.
        wire: [W] int32, written.
        starts: [ranks] the first word of each segment, or `LOCAL`. capacities: [ranks] rows of each.
        rank: this one, whose segment is not rounded.
        half: see above. slots: send each row's line.

    Raises:
        TypeError, ValueError: types, shapes or segments are wrong.
        NativeBuildError: the operators cannot be compiled.
    """
    columns, ranks = columns_of(rows), place.shape[0]
    places = (place, (ranks, len(columns.means2d)))
    check_tensors(torch.int32, columns.means2d.device, place=places, wire=(wire, (-1,)))
    words = [row_words(half=half and other != rank, slots=slots) for other in range(ranks)]
    _check_segments(wire, starts, capacities, rank, ranks, words)
    op: Any = torch.ops.ns_multigpu.pack_wire if kernels_serve(columns.means2d) else composed.pack_wire
    op(*columns, place, wire, list(starts), list(capacities), rank, half, slots)


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
) -> ReceivedRows:
    """Return the rows received from all ranks, source by source and padded: what `intersect` and `rasterize` take.

    Args:
        wire: [W] int32. starts, capacities, rank, half, slots: see `pack_wire`; of what came from each rank.
        counts: [ranks] int64, how many came from each; more than the capacity counts as the capacity.
        views: of the batch, 1 to `MOST_VIEWS`.

    Returns:
        as many lines as all capacities together; those behind a source's count are padding. Slots are 0 if they were
        not sent.

    Raises:
        TypeError, ValueError: types, shapes, views or segments are wrong.
        NativeBuildError: the operators cannot be compiled.
    """
    ranks = len(capacities)
    check_tensors(torch.int32, wire.device, wire=(wire, (-1,)))
    check_tensors(torch.int64, wire.device, counts=(counts, (ranks,)))
    if not 1 <= views <= MOST_VIEWS:
        raise ValueError(f"rows are of 1 to {MOST_VIEWS} views on the wire, not of {views}: take fewer views a step.")
    words = [row_words(half=half and other != rank, slots=slots) for other in range(ranks)]
    _check_segments(wire, starts, capacities, rank, ranks, words)
    op: Any = torch.ops.ns_multigpu.unpack_wire if kernels_serve(wire) else composed.unpack_wire
    return ReceivedRows(*op(wire, list(starts), list(capacities), counts, rank, half, slots, views))


@torch.no_grad()
def keep_rows(rows: Any, place: Tensor, received: ReceivedRows, start: int, capacity: int, *, slots: bool) -> None:
    """Copy local rows to their lines among the received rows: row k to line `start + place[k]`.

    Rows whose place is -1, or not below the capacity, are left out, as `pack_wire` does.

    Args:
        rows, slots: see `pack_wire`.
        place: [M] int32, from `route_lines`: of this rank's own segment.
        received: what `unpack_wire` returned, where this segment's start was `LOCAL`; written. `owners` are right.
        start, capacity: the segment's first line there, and how many it has.

    Raises:
        TypeError, ValueError: types or shapes are wrong, or the segment leaves the lines.
        NativeBuildError: the operators cannot be compiled.
    """
    columns, lines = columns_of(rows), len(received.means2d)
    columns_of(received)
    device = columns.means2d.device
    check_tensors(torch.int32, device, place=(place, (len(columns.means2d),)), slots=(received.slots, (lines,)))
    if not 0 <= start <= start + capacity <= lines:
        raise ValueError(f"lines {start} to {start + capacity} are to be kept, of {lines} received lines.")
    op: Any = torch.ops.ns_multigpu.keep_rows if kernels_serve(columns.means2d) else composed.keep_rows
    written = [column for name, column in received._asdict().items() if name != "owners"]
    op(*columns, place, *written, start, capacity, slots)


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
    absgrad: bool,
    depth: bool = False,
) -> None:
    """Write the gradients of received rows to the segments of their ranks, except this rank's own.

    Args:
        records: [L, 16] float32 as `rasterize_backward_into` writes them, of the lines of `unpack_wire`.
        counts: [ranks] int64, as there; nothing is written for the lines behind them, or for segments that stay.
        wire: [W] int32, written. starts, capacities, rank, half: see `pack_wire`.
        absgrad, depth: whether there are absolute gradients, and one of the depth.

    Raises:
        TypeError, ValueError: types, shapes or segments are wrong.
        NativeBuildError: the operators cannot be compiled.
    """
    ranks = len(capacities)
    check_tensors(torch.float32, wire.device, records=(records, (sum(capacities), RECORD_FLOATS)))
    check_tensors(torch.int32, wire.device, wire=(wire, (-1,)))
    check_tensors(torch.int64, wire.device, counts=(counts, (ranks,)))
    words = [0 if r == rank else gradient_words(half=half, absgrad=absgrad, depth=depth) for r in range(ranks)]
    _check_segments(wire, starts, capacities, rank, ranks, words)
    op: Any = torch.ops.ns_multigpu.pack_gradients if kernels_serve(wire) else composed.pack_gradients
    op(records, counts, wire, list(starts), list(capacities), rank, half, absgrad, depth)


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
    absgrad: bool,
    depth: bool = False,
) -> Tensor:
    """Return the sum of what the ranks have returned for each row, in the ranks' order: the same bits on every run.

    Args:
        place: [ranks, M] int32, from `route_lines`.
        count: [1] int64; the lines from there on are padding.
        wire: [W] int32, what `pack_gradients` wrote on the other ranks.
        starts, capacities, rank, half: see `pack_wire`.
        own: [capacities[rank], 16] float32, the records of this rank's own segment.
        absgrad, depth: see `pack_gradients`.

    Returns:
        records [M, 16] float32; zero for padding, for rows that went nowhere, and in the places that are not sent.

    Raises:
        TypeError, ValueError: types, shapes or segments are wrong.
        NativeBuildError: the operators cannot be compiled.
    """
    ranks = place.shape[0]
    check_tensors(torch.int32, wire.device, wire=(wire, (-1,)), place=(place, (-1, -1)))
    check_tensors(torch.int64, wire.device, count=(count, (1,)))
    words = [0 if r == rank else gradient_words(half=half, absgrad=absgrad, depth=depth) for r in range(ranks)]
    _check_segments(wire, starts, capacities, rank, ranks, words)
    check_tensors(torch.float32, wire.device, own=(own, (capacities[rank], RECORD_FLOATS)))
    op: Any = torch.ops.ns_multigpu.collect_wire if kernels_serve(wire) else composed.collect_wire
    return op(place, count, wire, list(starts), list(capacities), own, rank, half, absgrad, depth)


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
