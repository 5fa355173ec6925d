"""Wire format of rows with any named columns, in plain torch: for rows that autograd differentiates.

Rows of a segment follow one another, each of whole 4-byte words: first the columns that are not rounded, bit for bit,
then the rounded ones. Capacities are exact: all lines of a segment are rows. Nothing is read back to the host.

With `half`, columns and gradients are rounded to float16 as in `cuda_ext.ops.exchange.row_wire`, except that each named
column has an exponent of its own: its numbers are scaled by a power of two, so that the largest of a row lies between
2^14 and 2^15. The exponent is sent as int8. Infinities and NaNs remain.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ns_multigpu.core.row_wire import LOCAL, RowFormat, RowWire, WireSegments
from ns_multigpu.core.types import Splats

WHOLE = ("means2d", "depths", "transforms", "lines")
"""Columns that are never rounded: half a pixel is float16's precision at 1024 pixels, and depths decide an order. A 2D
Gaussian's transform and a convex's lines contain pixels, too."""
CONICS = "conics"
"""Columns xx, xy, yy of positive definite matrices. Their Cholesky factors are rounded: rounded themselves, those
of long ellipses would not stay positive definite."""
_MOST_SCALE = 126


@dataclass(frozen=True)
class ColumnRows:
    """Rows by named columns.

    Attributes:
        columns: each [M, ...]. Rows are routed by `view_ids` [M] int32, `means2d` [M, 2] and `radii` [M, 2] int32.
    """

    columns: Mapping[str, Tensor]

    @staticmethod
    def of(splats: Splats, first_point: int = 0) -> "ColumnRows":
        """Return splats as rows, without gradients. `first_point` is added to their `point_ids`."""
        hits = splats.hits
        columns = {"view_ids": hits.view_ids, "point_ids": hits.point_ids + first_point, **splats.rows}
        return ColumnRows({name: column.detach() for name, column in columns.items()})

    @property
    def count(self) -> Tensor:
        """Number of rows, [1] int64."""
        ids = self.view_ids
        return ids.new_full((1,), len(ids), dtype=torch.int64)

    @property
    def view_ids(self) -> Tensor:
        """Views of the rows, [M] int32."""
        return self.columns["view_ids"]

    @property
    def means2d(self) -> Tensor:
        """Centres in pixels, [M, 2] float32: all ranks route by the same numbers."""
        return self.columns["means2d"].float()

    @property
    def radii(self) -> Tensor:
        """Half extents in pixels, [M, 2] int32."""
        return self.columns["radii"]

    @property
    def depths(self) -> Tensor:
        """Depths, [M] float32."""
        return self.columns["depths"].float()


@dataclass(frozen=True)
class Column:
    """Type of a column.

    Attributes:
        shape: of one row's part. dtype: of 4 or 8 bytes.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def numbers(self) -> int:
        """Numbers of one row."""
        return math.prod(self.shape)

    @property
    def words(self) -> int:
        """Words of one row, not rounded."""
        return self.numbers * self.dtype.itemsize // 4


@dataclass(frozen=True)
class ColumnFormat(RowFormat):
    """Format of rows by named columns. Gradient records hold the differentiable columns' gradients.

    Attributes:
        columns: by name. gradients: the numbers of each differentiable column. dtype: of gradient records.
    """

    columns: Mapping[str, Column]
    gradients: Sequence[int]
    dtype: torch.dtype

    @staticmethod
    def of(columns: Mapping[str, Tensor], differentiable: Sequence[Tensor]) -> "ColumnFormat":
        """Return the format of these columns, with gradients of the differentiable ones, in their order."""
        types = {name: Column(tuple(column.shape[1:]), column.dtype) for name, column in columns.items()}
        return ColumnFormat(types, [math.prod(column.shape[1:]) for column in differentiable], differentiable[0].dtype)

    @property
    def record_floats(self) -> int:
        return sum(self.gradients)

    def wire(self, *, half: bool, slots: bool) -> RowWire:
        assert not slots, "received rows are drawn by lists of their own rank"
        return ColumnWire(self, half)


@dataclass(frozen=True)
class ColumnWire(RowWire):
    """See the module.

    Attributes:
        layout: of the rows. half: round to float16 where possible.
    """

    layout: ColumnFormat
    half: bool

    @property
    def row_words(self) -> int:
        whole = sum(column.words for name, column in self.layout.columns.items() if not self._is_rounded(name))
        return whole + -(-sum(self._rounded.values()) // 4)

    @property
    def gradient_words(self) -> int:
        if self.half:
            return -(-sum(2 * numbers + 1 for numbers in self.layout.gradients) // 4)
        return self.layout.record_floats * self.layout.dtype.itemsize // 4

    def pack(self, rows: ColumnRows, place: Tensor, wire: Tensor, to: WireSegments) -> None:
        words = self._write(rows.columns)
        for other, lines in enumerate(place):
            if to.starts[other] != LOCAL:
                self._segment(wire, to, other, words.shape[1]).copy_(words[_rows_at(lines, to.capacities[other])])

    def unpack(self, wire: Tensor, come: WireSegments, counts: Tensor, views: int) -> ColumnRows:
        segments = [self._segment(wire, come, source, self.row_words) for source in range(len(come.capacities))]
        return ColumnRows(self._read(torch.cat(segments)))

    def keep(self, rows: ColumnRows, place: Tensor, received: ColumnRows, come: WireSegments, source: int) -> None:
        first, chosen = come.line(source), _rows_at(place, come.capacities[source])
        for name, column in received.columns.items():
            column[first : first + len(chosen)] = rows.columns[name][chosen]

    def lines(self, received: ColumnRows, first: int, end: int) -> ColumnRows:
        return ColumnRows({name: column[first:end] for name, column in received.columns.items()})

    def pack_gradients(self, records: Tensor, counts: Tensor, wire: Tensor, to: WireSegments) -> None:
        for source, some in enumerate(records.split(list(to.capacities))):
            if to.starts[source] != LOCAL:
                self._segment(wire, to, source, self.gradient_words).copy_(self._write_gradients(some))

    def collect(self, place: Tensor, count: Tensor, wire: Tensor, come: WireSegments, own: Tensor) -> Tensor:
        sums = own.new_zeros(place.shape[1], self.layout.record_floats)
        # One rank after the other, each row at most once in it: the same bits on every run, also on a GPU.
        for source, lines in enumerate(place):
            there = own
            if source != come.rank:
                there = self._read_gradients(self._segment(wire, come, source, self.gradient_words))
            sums.index_add_(0, _rows_at(lines, come.capacities[source]), there)
        return sums

    def _segment(self, wire: Tensor, segments: WireSegments, rank: int, words: int) -> Tensor:
        """Return the rows of a segment, [capacity, words]; zeros for a local one."""
        start, capacity = segments.starts[rank], segments.capacities[rank]
        if start == LOCAL:
            return wire.new_zeros(capacity, words)
        return wire[start : start + capacity * words].view(capacity, words)

    def _is_rounded(self, name: str) -> bool:
        return self.half and self.layout.columns[name].dtype.is_floating_point and name not in WHOLE

    @property
    def _rounded(self) -> dict[str, int]:
        """Bytes of each rounded column, by name."""
        return {name: 2 * one.numbers + 1 for name, one in self.layout.columns.items() if self._is_rounded(name)}

    def _write(self, columns: Mapping[str, Tensor]) -> Tensor:
        """Return the words of rows, [M, row_words] int32."""
        types = self.layout.columns
        flat = {name: column.reshape(len(column), types[name].numbers) for name, column in columns.items()}
        words = [column.contiguous().view(torch.int32) for name, column in flat.items() if not self._is_rounded(name)]
        parts = [_rounded_bytes(_factor(flat[name]) if name == CONICS else flat[name]) for name in self._rounded]
        return torch.cat([*words, *_packed(parts)], dim=1)

    def _read(self, words: Tensor) -> dict[str, Tensor]:
        """Return the columns of rows [K, row_words], each with memory of its own, from an aligned address on."""
        columns: dict[str, Tensor] = {}
        start = 0
        for name, column in self.layout.columns.items():
            if not self._is_rounded(name):
                columns[name] = _of_type(words[:, start : start + column.words], column.dtype)
                start += column.words
        rounded = self._rounded
        coded = (
            words[:, start:].contiguous().view(torch.uint8).split([*rounded.values(), -sum(rounded.values()) % 4], 1)
        )
        for name, some in zip(rounded, coded, strict=False):
            column = _unrounded(some)
            columns[name] = (_conic(column) if name == CONICS else column).to(self.layout.columns[name].dtype)
        return {name: columns[name].view(len(words), *one.shape) for name, one in self.layout.columns.items()}

    def _write_gradients(self, records: Tensor) -> Tensor:
        """Return the words of gradient records, [K, gradient_words] int32."""
        if not self.half:
            return records.contiguous().view(torch.int32)
        return _packed([_rounded_bytes(column) for column in records.split(list(self.layout.gradients), dim=1)])[0]

    def _read_gradients(self, words: Tensor) -> Tensor:
        """Return gradient records [K, record_floats]."""
        if not self.half:
            return _of_type(words, self.layout.dtype)
        sizes = [2 * numbers + 1 for numbers in self.layout.gradients]
        coded = words.contiguous().view(torch.uint8)[:, : sum(sizes)].split(sizes, dim=1)
        return torch.cat([_unrounded(some) for some in coded], dim=1).to(self.layout.dtype)


def _rows_at(lines: Tensor, capacity: int) -> Tensor:
    """Return the rows at lines 0 to `capacity` - 1 of a segment, [capacity] int64.

    Args:
        lines: [M] the line of each row, ascending; -1 for none.
    """
    # The k-th row that is sent is the first whose running count is k. Sizes are known: no readback.
    return torch.searchsorted((lines >= 0).cumsum(0), torch.arange(1, capacity + 1, device=lines.device))


def _packed(parts: Sequence[Tensor]) -> list[Tensor]:
    """Return uint8 [M, bytes] parts as one int32 [M, words], filled up with zeros; nothing if there are none."""
    if not parts:
        return []
    joined = torch.cat(list(parts), dim=1)
    return [torch.nn.functional.pad(joined, (0, -joined.shape[1] % 4)).view(torch.int32)]


def _of_type(coded: Tensor, dtype: torch.dtype) -> Tensor:
    """Return bits [M, n] as numbers [M, m] of a type."""
    # A copy always: one row, or none, counts as contiguous at any address.
    return coded.flatten().clone().view(dtype).view(len(coded), coded.shape[1] * coded.itemsize // dtype.itemsize)


def _rounded_bytes(column: Tensor) -> Tensor:
    """Return numbers [M, n] as float16 and the exponent of their scale, [M, 2 n + 1] uint8."""
    column = column.float()
    most = column.abs().amax(dim=1, keepdim=True)
    exponent = 15 - torch.frexp(torch.where(most.isfinite(), most, 1.0)).exponent
    scale = torch.where(most == 0, 0, exponent.clamp(max=_MOST_SCALE))
    scaled = torch.ldexp(column, scale).half()
    return torch.cat([scaled.view(torch.uint8), scale.to(torch.int8).view(torch.uint8)], dim=1)


def _unrounded(coded: Tensor) -> Tensor:
    """Return the numbers [M, n] float32 that `_rounded_bytes` encoded."""
    exponents = _of_type(coded[:, -1:], torch.int8).int()
    return torch.ldexp(_of_type(coded[:, :-1], torch.float16).float(), -exponents)


def _factor(conics: Tensor) -> Tensor:
    """Return a, b, c of the lower Cholesky factors of [[xx, xy], [xy, yy]], [M, 3]."""
    xx, xy, yy = conics.float().unbind(1)
    a = xx.clamp(min=0).sqrt()
    b = torch.where(a > 0, xy / a, 0.0)
    return torch.stack([a, b, (yy - b * b).clamp(min=0).sqrt()], dim=1)


def _conic(factor: Tensor) -> Tensor:
    """Return xx, xy, yy [M, 3] of factors [M, 3]."""
    a, b, c = factor.unbind(1)
    return torch.stack([a * a, a * b, b * b + c * c], dim=1)
