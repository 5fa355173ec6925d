"""Rows wider than those of 3D Gaussians, and their exchange in several parts: records of
`cuda_ext.ops.exchange.row_exchange` or segments of `cuda_ext.ops.exchange.row_wire`.

A part has ten numbers of a row, in the places of mean, conic, opacity, colour and depth, and nine gradients. If these
are too few, the last part's absolute gradients hold two more. Each part has the row's view and radii. Nothing is
rounded.
"""

from collections import namedtuple
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cuda_ext.ops.exchange.row_exchange import RECORD_FLOATS, ReceivedRows, SplatColumns, collect, pack, unpack
from cuda_ext.ops.exchange.row_wire import (
    collect_wire,
    gradient_words,
    pack_gradients,
    pack_wire,
    row_words,
    unpack_wire,
)
from ns_multigpu.core.kernels import Received, Rows
from ns_multigpu.core.row_wire import LOCAL, RowWire, WireSegments

Span = tuple[str, int, int]
"""A column's name, and the first and the end of some of its numbers."""
_SLOTS = {"means2d": 2, "conics": 3, "opacities": 1, "features": 3, "depths": 1}
"""Content of a row's part: columns of `ReceivedRows`, in the order of `pack`, and their widths."""
_GRADIENTS, _ABSOLUTE = (0, 9), (10, 12)
"""First and end of the places of a record whose sums come back: always, and with absolute ones."""


class _Piece(NamedTuple):
    """Numbers of a column, and where they lie: from `offset` on in one of several spaces."""

    span: Span
    space: int
    offset: int


def _spans(order: Sequence[Span], spaces: Sequence[int]) -> list[_Piece]:
    """Place spans one after the other in spaces of these sizes, and cut them where a space ends."""
    found: list[_Piece] = []
    space, offset = 0, 0
    for name, start, end in order:
        while start < end:
            if offset == spaces[space]:
                space, offset = space + 1, 0
            taken = min(spaces[space] - offset, end - start)
            found.append(_Piece((name, start, start + taken), space, offset))
            start, offset = start + taken, offset + taken
    return found


class RecordParts:
    """Record layout of a primitive's rows.

    Args:
        widths: of a row's float columns, by name; 0 for a column [M].
        order: in which their numbers lie in records.

    Attributes:
        rows, received: classes of rows, see `Rows` and `Received`.
    """

    def __init__(self, widths: Mapping[str, int], order: Sequence[Span]) -> None:
        self.widths = dict(widths)
        columns: Any = (*widths, "radii")
        self.rows: Any = namedtuple("Rows", ("view_ids", "point_ids", "count", *columns))
        self.rows.conics = property(lambda rows: boundless(rows.depths))
        self.received: Any = namedtuple("Received", ("view_ids", *columns, "owners", "slots"))
        numbers = sum(end - start for _, start, end in order)
        assert numbers == sum(max(width, 1) for width in widths.values()), "each number once"
        slots = list(_SLOTS.values())
        self.parts = -(-numbers // sum(slots))
        self.record_floats = self.parts * RECORD_FLOATS
        self._slots = slots * self.parts
        self._rows = _spans(order, self._slots)
        self._runs = [(k * RECORD_FLOATS + _GRADIENTS[0], k * RECORD_FLOATS + _GRADIENTS[1]) for k in range(self.parts)]
        last = (self.parts - 1) * RECORD_FLOATS
        self._runs.append((last + _ABSOLUTE[0], last + _ABSOLUTE[1]))
        self._returned = _spans(order, [end - start for start, end in self._runs])
        self.absolute = any(piece.space == self.parts for piece in self._returned)

    def split(self, rows: Rows) -> list[SplatColumns]:
        """Return the parts of rows."""
        slots: list[Tensor] = []
        for space, width in enumerate(self._slots):
            parts = [_numbers(getattr(rows, p.span[0]), p.span) for p in self._rows if p.space == space]
            short = width - sum(part.shape[1] for part in parts)
            if short:
                parts.append(rows.depths.new_zeros(len(rows.depths), short))
            # Of one row some of a column counts as contiguous wherever it begins, and kernels read two numbers at once.
            whole = len(parts) == 1 and parts[0].shape[1] == parts[0].stride(0)
            slot = parts[0] if whole else torch.cat(parts, dim=1)
            slots.append(slot[:, 0] if width == 1 else slot)
        found: list[SplatColumns] = []
        for k in range(0, len(slots), len(_SLOTS)):
            found.append(SplatColumns._make((rows.view_ids, *slots[k : k + len(_SLOTS)], rows.radii)))
        return found

    def join(self, parts: Sequence[ReceivedRows]) -> Received:
        """Return received rows from their parts: the inverse of `split`."""
        slots = [getattr(part, name) for part in parts for name in _SLOTS]
        columns = self._columns(self._rows, [slot if slot.dim() == 2 else slot[:, None] for slot in slots])
        first = parts[0]
        return self.received(
            first.view_ids, *(columns[name].contiguous() for name in self.widths), first.radii, first.owners,
            first.slots,
        )  # fmt: skip

    def receive_local(self, rows: Rows, owners: Tensor, slots: Tensor) -> Received:
        """See `Kernels.receive_local`."""
        return self.received(rows.view_ids, *(getattr(rows, name) for name in self.widths), rows.radii, owners, slots)

    def records_of(self, gradients: Sequence[Tensor]) -> Tensor:
        """Return the records [M, record_floats] of gradients by all columns, in the order of `widths`."""
        named, like = dict(zip(self.widths, gradients, strict=True)), gradients[0]
        found: list[Tensor] = []
        at = 0
        for p in self._returned:
            place = self._runs[p.space][0] + p.offset
            found += [like.new_zeros(len(like), place - at), _numbers(named[p.span[0]], p.span)]
            at = place + p.span[2] - p.span[1]
        found.append(like.new_zeros(len(like), self.record_floats - at))
        return torch.cat(found, dim=1)

    def gradients_of(self, records: Tensor) -> dict[str, Tensor]:
        """Return gradients by column name: the inverse of `records_of`."""
        runs = [records[:, start:end] for start, end in self._runs]
        return self._columns(self._returned, runs)

    def pack(self, rows: Rows, place: Tensor, segments: Tensor, capacity: int) -> None:
        """See `Kernels.pack`."""
        for k, part in enumerate(self.split(rows)):
            lines = self._lines(place, capacity, k)
            pack(part, lines, segments, self.parts * capacity)

    def unpack(self, records: Tensor, counts: Tensor, views: int) -> Received:
        """See `Kernels.unpack`."""
        ranks, capacity = records.shape[:2]
        parts = records.view(ranks, capacity, self.parts, RECORD_FLOATS).unbind(2)
        return self.join([unpack(part.contiguous(), counts, views) for part in parts])

    def collect(self, place: Tensor, count: Tensor, sources: Tensor, capacity: int) -> Tensor:
        """Return the sums of gradient records [M, record_floats] at `sources`, over the ranks that drew the rows."""
        lines = (self._lines(place, capacity, k) for k in range(self.parts))
        return torch.cat([collect(line, count, sources, self.parts * capacity) for line in lines], dim=1)

    def _columns(self, spans: Sequence[_Piece], spaces: Sequence[Tensor]) -> dict[str, Tensor]:
        """Return the columns [M, width] or [M] whose spans lie in spaces [M, size]."""
        by_name: dict[str, list[tuple[int, Tensor]]] = {}
        for (name, start, end), space, offset in spans:
            there = spaces[space][:, offset : offset + end - start]
            by_name.setdefault(name, []).append((start, there))
        columns: dict[str, Tensor] = {}
        for name, found in by_name.items():
            parts = [part for _, part in sorted(found, key=lambda one: one[0])]
            column = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
            columns[name] = column if self.widths[name] else column[:, 0]
        return columns

    def _lines(self, place: Tensor, capacity: int, part: int) -> Tensor:
        """Return the lines of one part of the rows at these places; -1 beyond the capacity."""
        return torch.where((place >= 0) & (place < capacity), self.parts * place + part, -1)


@dataclass(frozen=True)
class PartsWire(RowWire):
    """See `cuda_ext.ops.exchange.row_wire`.

    Attributes:
        layout: of the rows. slots: see `Kernels.wire`.
    """

    layout: RecordParts
    slots: bool

    @property
    def row_words(self) -> int:
        return self.layout.parts * self._words

    @property
    def gradient_words(self) -> int:
        return sum(gradient_words(half=False, absgrad=absolute) for absolute in self._absolute)

    @property
    def _words(self) -> int:
        return row_words(half=False, slots=self.slots)

    @property
    def _absolute(self) -> list[bool]:
        """Of each part, whether its absolute gradients are sent."""
        last = self.layout.parts - 1
        return [k == last and self.layout.absolute for k in range(self.layout.parts)]

    def pack(self, rows: Rows, place: Tensor, wire: Tensor, to: WireSegments) -> None:
        for k, part in enumerate(self.layout.split(rows)):
            there = _behind(to, k * self._words)
            where = (place, wire, there.starts, there.capacities, there.rank)
            pack_wire(part, *where, half=False, slots=self.slots)

    def unpack(self, wire: Tensor, come: WireSegments, counts: Tensor, views: int) -> Received:
        segments = [_behind(come, k * self._words) for k in range(self.layout.parts)]
        return self.layout.join(
            [
                unpack_wire(wire, one.starts, one.capacities, counts, one.rank, views, half=False, slots=self.slots)
                for one in segments
            ]
        )

    def keep(self, rows: Rows, place: Tensor, received: Received, come: WireSegments, source: int) -> None:
        num_lines, first = come.capacities[source], come.line(source)
        lines = torch.arange(len(place), device=place.device)
        # One extra line receives rows that are not local, or overflow.
        found = torch.full((num_lines + 1,), -1, dtype=torch.int64, device=place.device)
        found.scatter_(0, torch.where((place >= 0) & (place < num_lines), place.long(), num_lines), lines)
        found = found[:num_lines]
        there, found = found >= 0, found.clamp(min=0)
        if len(place) == 0:
            return

        def put(to: Tensor, values: Any) -> None:
            part = to[first : first + num_lines]
            part.copy_(torch.where(there.view(-1, *[1] * (to.dim() - 1)), values, part))

        for name in ("view_ids", *self.layout.widths, "radii"):
            put(getattr(received, name), getattr(rows, name)[found])
        if self.slots:
            put(received.slots, found.int())

    def pack_gradients(self, records: Tensor, counts: Tensor, wire: Tensor, to: WireSegments) -> None:
        for part, there, absolute in self._returning(records, to):
            where = (part, counts, wire, there.starts, there.capacities, there.rank)
            pack_gradients(*where, half=False, absgrad=absolute)

    def collect(self, place: Tensor, count: Tensor, wire: Tensor, come: WireSegments, own: Tensor) -> Tensor:
        found: list[Tensor] = []
        for part, there, absolute in self._returning(own, come):
            where = (place, count, wire, there.starts, there.capacities, part, there.rank)
            found.append(collect_wire(*where, half=False, absgrad=absolute))
        return torch.cat(found, dim=1)

    def _returning(self, records: Tensor, segments: WireSegments) -> list[tuple[Tensor, WireSegments, bool]]:
        """Return each part's gradient records, segments of the wire, and True if absolute gradients are sent."""
        found: list[tuple[Tensor, WireSegments, bool]] = []
        words = 0
        for part, absolute in zip(records.split(RECORD_FLOATS, dim=1), self._absolute, strict=True):
            found.append((part.contiguous(), _behind(segments, words), absolute))
            words += gradient_words(half=False, absgrad=absolute)
        return found


def boundless(like: Tensor) -> Tensor:
    """Return zero conics [M, 3] without a bound: only a row's box limits it."""
    return like.new_zeros(len(like), 3)


def _numbers(column: Tensor, span: Span) -> Tensor:
    """Return the numbers of a column that the span covers, [M, numbers]."""
    column = column if column.dim() == 2 else column[:, None]
    return column[:, span[1] : span[2]]


def _behind(segments: WireSegments, words: int) -> WireSegments:
    """Return the segments shifted by `words` of their columns."""
    pairs = zip(segments.starts, segments.capacities, strict=True)
    return replace(segments, starts=tuple(s if s == LOCAL else s + words * rows for s, rows in pairs))
