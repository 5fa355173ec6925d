"""Reference in torch's operators of `cuda_ext.ops.exchange.row_wire`."""

from collections.abc import Sequence

import torch
from torch import Tensor

from cuda_ext.reference.row_exchange import columns_of_words, words_of

_ONE = 127 << 23
"""1.0, bit for bit."""
_NUMBER = 0x7FFFFFFF
"""All bits of a float but its sign."""
_MOST_SCALE = 126
HALF_ROW = 9
"""Words of a rounded row."""


def half_gradient_words(count: int) -> int:
    """Return the words of so many rounded gradients."""
    return 5 + (count - 8) // 2


@torch.no_grad()
def pack_wire(
    columns: Sequence[Tensor], radii: Tensor, view_ids: Tensor, place: Tensor, wire: Tensor, starts: Sequence[int],
    capacities: Sequence[int], rank: int, half: bool, slots: bool,
) -> None:  # fmt: skip
    """See `cuda_ext.ops.exchange.row_wire.pack_wire`."""
    rest = _radii_and_view(radii, view_ids)
    ids = [torch.arange(len(view_ids), dtype=torch.int32, device=wire.device)] if slots else []
    whole = torch.cat([*(part.T for part in words_of(columns)), torch.stack([*rest, *ids])])
    short = torch.stack([*_half_row(*columns, rest=rest), *ids]) if half else whole
    for other, lines in enumerate(place.long()):
        if starts[other] < 0:
            continue
        words = whole if other == rank else short
        chosen = ((lines >= 0) & (lines < capacities[other])).nonzero().squeeze(-1)
        segment = _segment(wire, starts[other], len(words), capacities[other])
        segment[:, lines[chosen]] = words[:, chosen]


@torch.no_grad()
def unpack_wire(
    wire: Tensor, starts: Sequence[int], capacities: Sequence[int], counts: Tensor, rank: int, half: bool,
    slots: bool, views: int, widths: Sequence[int],
) -> tuple[list[Tensor], Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """See `cuda_ext.ops.exchange.row_wire.unpack_wire`."""
    end = sum(widths)
    parts: list[tuple[Tensor, ...]] = []
    for source, (start, capacity) in enumerate(zip(starts, capacities, strict=True)):
        short = half and source != rank
        width = (HALF_ROW if short else end + 2) + slots
        words = _segment(wire, start, width, capacity) if start >= 0 else wire.new_zeros(width, capacity)
        real = (torch.arange(capacity, device=wire.device) < counts[source]) & (start >= 0)
        ids = words[-1] if slots else torch.zeros_like(words[0])
        numbers, codes = _read_half_row(words) if short else (words[:end], words[end : end + 2])
        across, view = _radius_of(codes), _view_of(codes)
        parts.append(
            (
                torch.where(real, numbers, 0).T, torch.where(real, across, 0).T, torch.where(real, view, views - 1),
                torch.full_like(words[0], source), torch.where(real, ids, 0),
            )
        )  # fmt: skip
    numbers, *rest = (torch.cat(part) for part in zip(*parts, strict=True))
    return (columns_of_words(numbers, widths), *rest)  # type: ignore[return-value]


@torch.no_grad()
def keep_rows(
    columns: Sequence[Tensor], radii: Tensor, view_ids: Tensor, place: Tensor, to_columns: Sequence[Tensor],
    to_radii: Tensor, to_view_ids: Tensor, to_slots: Tensor, start: int, capacity: int, slots: bool,
) -> None:  # fmt: skip
    """See `cuda_ext.ops.exchange.row_wire.keep_rows`."""
    chosen = ((place >= 0) & (place < capacity)).nonzero().squeeze(-1)
    lines = start + place[chosen].long()
    there = (*to_columns, to_radii, to_view_ids)
    for column, own in zip(there, (*columns, radii, view_ids), strict=True):
        column[lines] = own[chosen]
    if slots:
        to_slots[lines] = chosen.int()


@torch.no_grad()
def pack_gradients(
    records: Tensor, counts: Tensor, wire: Tensor, starts: Sequence[int], capacities: Sequence[int], rank: int,
    half: bool, returned: Sequence[int],
) -> None:  # fmt: skip
    """See `cuda_ext.ops.exchange.row_wire.pack_gradients`."""
    for source, lines in enumerate(records.split(list(capacities))):
        if source == rank or starts[source] < 0:
            continue
        values = [lines[:, place] for place in returned]
        columns = torch.stack(
            _half_gradient(values) if half else [value.contiguous().view(torch.int32) for value in values]
        )
        there = _segment(wire, starts[source], len(columns), capacities[source])
        real = torch.arange(capacities[source], device=wire.device) < counts[source]
        there.copy_(torch.where(real, columns, there))


@torch.no_grad()
def collect_wire(
    place: Tensor, count: Tensor, wire: Tensor, starts: Sequence[int], capacities: Sequence[int], own: Tensor,
    rank: int, half: bool, returned: Sequence[int],
) -> Tensor:  # fmt: skip
    """See `cuda_ext.ops.exchange.row_wire.collect_wire`."""
    sums = torch.zeros((place.shape[1], len(returned)), device=place.device)
    real = torch.arange(place.shape[1], device=place.device) < count
    words = half_gradient_words(len(returned)) if half else len(returned)
    for source, lines in enumerate(place.long()):
        rows = (real & (lines >= 0) & (lines < capacities[source])).nonzero().squeeze(-1)
        if source == rank:
            values = own[:, returned]
        else:
            columns = _segment(wire, starts[source], words, capacities[source])
            values = (_read_half_gradient(columns)[: len(returned)] if half else columns.view(torch.float32)).T
        sums[rows] += values[lines[rows]]
    records = sums.new_zeros((len(sums), own.shape[1]))
    records[:, returned] = sums
    return records


def _segment(wire: Tensor, start: int, words: int, capacity: int) -> Tensor:
    return wire[start : start + words * capacity].view(words, capacity)


def _radii_and_view(radii: Tensor, view_ids: Tensor) -> list[Tensor]:
    """Return two words with a row's radii and view. A radius is a whole number from 1 on that a float holds: 5 bits of
    exponent, 28 bits in all. The other 8 bits of the two words are the view."""
    codes = radii.float().view(torch.int32) - _ONE
    low, high = view_ids & 15, (view_ids >> 4) & 15
    return [(code & 0xFFFFFFF) | (bits << 28) for code, bits in zip(codes.unbind(1), (low, high), strict=True)]


def _radius_of(codes: Tensor) -> Tensor:
    return ((codes & 0xFFFFFFF) + _ONE).view(torch.float32).int()


def _view_of(codes: Tensor) -> Tensor:
    low, high = ((code >> 28) & 15 for code in codes)
    return low | (high << 4)


def _scale_of(values: Sequence[Tensor]) -> Tensor:
    """Return the power of two by which the largest of some numbers comes to lie in 2^14 to 2^15."""
    bits = torch.stack([value.contiguous().view(torch.int32) & _NUMBER for value in values]).amax(0)
    return (14 + 127 - (bits >> 23)).clamp(max=_MOST_SCALE)


def _power(exponent: Tensor) -> Tensor:
    return ((exponent + 127) << 23).view(torch.float32)


def _packed_halfs(low: Tensor, high: Tensor) -> Tensor:
    """Pack two float16 into a word."""
    first, second = (x.half().view(torch.int16).int() for x in (low, high))
    return (first & 0xFFFF) | (second << 16)


def _low(word: Tensor) -> Tensor:
    return (word << 16 >> 16).short().view(torch.float16).float()


def _high(word: Tensor) -> Tensor:
    return (word >> 16).short().view(torch.float16).float()


def _scales(value: Tensor, one: Tensor, other: Tensor) -> Tensor:
    """Pack a float16 and two exponents into a word."""
    return (_packed_halfs(value, torch.zeros_like(value))) | ((one & 0xFF) << 16) | ((other & 0xFF) << 24)


def _scales_of(word: Tensor) -> tuple[Tensor, Tensor]:
    return word << 8 >> 24, word >> 24


def _root(x: Tensor) -> Tensor:
    # By way of float64: on Intel's processors torch's root of float32 is not always the nearest, as the kernels' is.
    # The difference of two almost equal numbers shows it.
    return torch.where(x > 0, x, 0.0).double().sqrt().float()


def _half_row(
    means2d: Tensor, conics: Tensor, opacities: Tensor, features: Tensor, depths: Tensor, rest: list[Tensor]
) -> list[Tensor]:
    xx, xy, yy = conics.unbind(1)
    a = _root(xx)
    b = torch.where(a > 0, xy / a, 0.0)
    c = _root(yy - b * b)
    of_conic, of_color = _scale_of([a, b, c]), _scale_of(features.unbind(1))
    a, b, c = (x * _power(of_conic) for x in (a, b, c))
    red, green, blue = (x * _power(of_color) for x in features.unbind(1))
    whole = [x.contiguous().view(torch.int32) for x in (*means2d.unbind(1), depths)]
    return [
        *whole, *rest, _packed_halfs(a, b), _packed_halfs(c, opacities), _packed_halfs(red, green),
        _scales(blue, of_conic, of_color),
    ]  # fmt: skip


def _read_half_row(columns: Tensor) -> tuple[Tensor, Tensor]:
    """Return the words of the ten floats of rows [10, M], and their two words of radii and view."""
    x, y, depth = columns[:3].view(torch.float32)
    of_conic, of_color = (_power(-scale) for scale in _scales_of(columns[8]))
    a, b, c = (x * of_conic for x in (_low(columns[5]), _high(columns[5]), _low(columns[6])))
    red, green, blue = (x * of_color for x in (_low(columns[7]), _high(columns[7]), _low(columns[8])))
    conic = (a * a, a * b, b * b + c * c)
    floats = torch.stack([x, y, *conic, _high(columns[6]), red, green, blue, depth])
    return floats.view(torch.int32), columns[3:5]


def _half_gradient(values: list[Tensor]) -> list[Tensor]:
    of_conic, of_rest = _scale_of(values[2:5]), _scale_of([*values[:2], *values[5:]])
    v = [x * _power(of_conic if 2 <= k < 5 else of_rest) for k, x in enumerate(values)]
    pairs = [_packed_halfs(v[k], v[k + 1]) for k in (0, 2, 4, 6)]
    more = [*v[9:], torch.zeros_like(v[0])]
    rest = [_packed_halfs(more[k], more[k + 1]) for k in range(0, len(more) - 1, 2)]
    return [*pairs, _scales(v[8], of_conic, of_rest), *rest]


def _read_half_gradient(columns: Tensor) -> Tensor:
    of_conic, of_rest = (_power(-scale) for scale in _scales_of(columns[4]))
    halfs = [half(column) for column in columns[:4] for half in (_low, _high)]
    halfs += [_low(columns[4]), *(half(column) for column in columns[5:] for half in (_low, _high))]
    return torch.stack([x * (of_conic if 2 <= k < 5 else of_rest) for k, x in enumerate(halfs)])
