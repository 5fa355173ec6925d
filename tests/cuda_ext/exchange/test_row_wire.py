"""Rows and gradients on the wire, on the CPU, with ranks that share this process."""

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from cuda_ext.ops.exchange.row_layout import GAUSSIAN_ROWS, ReceivedRows
from cuda_ext.ops.exchange.row_wire import (
    MOST_SEGMENTS,
    MOST_VIEWS,
    collect_wire,
    gaussian_gradients,
    gradient_words,
    pack_gradients,
    pack_wire,
    row_words,
    unpack_wire,
)
from tests.cuda_ext.exchange.test_row_exchange import OPS, Rows, bands, make_rows, numbers
from tests.lib.ranks import DEVICES

UNIT = 2.0**-11
"""Half a unit in the last place of float16, relative."""
EXACT = ("view_ids", "means2d", "depths", "radii")
ROUNDED = ("conics", "opacities", "features")


@dataclass(frozen=True)
class Layout:
    """Layout of one rank's segments in a buffer, with gaps between them."""

    starts: list[int]
    capacities: list[int]
    words: int

    @staticmethod
    def of(capacities: list[int], width: int) -> "Layout":
        starts, at = [], 3
        for capacity in reversed(capacities):  # in any order
            starts.insert(0, at)
            at += capacity * width + 5
        return Layout(starts, capacities, at)

    def segment(self, wire: Tensor, rank: int, width: int) -> Tensor:
        return wire[self.starts[rank] : self.starts[rank] + width * self.capacities[rank]]


def splats(rows: Rows, seed: int = 0) -> Rows:
    """Return the rows with conics of ellipses, some of them needles, and radii as a projection makes them."""
    g = torch.Generator().manual_seed(seed)
    long, thin = 10 ** (3 * torch.rand(2, len(rows), generator=g))
    angle = 3.2 * torch.rand(len(rows), generator=g)
    c, s, a, b = angle.cos(), angle.sin(), 1 / (0.3 + long**2), 1 / (0.3 + (0.01 * thin) ** 2)
    conics = torch.stack([a * c * c + b * s * s, (a - b) * c * s, a * s * s + b * c * c], dim=1)
    opacities, features = torch.rand(len(rows), generator=g), torch.rand(len(rows), 3, generator=g) * 1.5
    return replace(rows, conics=conics, opacities=opacities, features=features * (features > 0.2))


@dataclass(frozen=True)
class Sent:
    """All ranks' rows, as each packed them and as each has what came."""

    rows: list[Rows]
    places: list[Tensor]
    counts: Tensor  # [from, to]
    wires: list[Tensor]  # of each rank, what came
    incoming: list[Layout]
    received: list[ReceivedRows]


def send(rows: list[Rows], patches: list[int], pairs: list[list[int]], half: bool, slots: bool) -> Sent:
    """On the device of the rows. Each rank packs into a buffer of its own; the segments are then carried over."""
    ranks, device, width = len(rows), rows[0].means2d.device, row_words(half=False, slots=slots)
    routed = [one.route(patches, ranks) for one in rows]
    outgoing = [Layout.of(pairs[rank], width) for rank in range(ranks)]
    incoming = [Layout.of([pairs[source][rank] for source in range(ranks)], width) for rank in range(ranks)]
    out = [torch.full((layout.words,), 7, dtype=torch.int32, device=device) for layout in outgoing]
    wires = [torch.full((layout.words,), 7, dtype=torch.int32, device=device) for layout in incoming]
    for rank, (one, (place, _)) in enumerate(zip(rows, routed, strict=True)):
        where = (place, out[rank], outgoing[rank].starts, outgoing[rank].capacities, rank)
        pack_wire(one, *where, half=half, slots=slots)
    for source in range(ranks):
        for rank in range(ranks):
            words = row_words(half=half and source != rank, slots=slots)
            incoming[rank].segment(wires[rank], source, words).copy_(outgoing[source].segment(out[source], rank, words))
    counts = torch.stack([count for _, count in routed])
    received = [
        unpack_wire(wires[r], incoming[r].starts, incoming[r].capacities, counts[:, r], r, 2, half=half, slots=slots)
        for r in range(ranks)
    ]
    return Sent(rows, [place for place, _ in routed], counts, wires, incoming, received)


def uneven(ranks: int) -> list[list[int]]:
    """Capacities that suffice for most local rows; some rows exceed every capacity."""
    return [[300 if a == b else (37 * a + 11 * b) % 90 for b in range(ranks)] for a in range(ranks)]


@pytest.mark.parametrize("slots", [False, True])
@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_rows_are_received_unchanged(ranks: int, half: bool, slots: bool) -> None:
    rows = [splats(make_rows(200 + 30 * rank, 20, seed=rank), rank) for rank in range(ranks)]
    pairs = uneven(ranks)
    sent = send(rows, numbers(bands(ranks, 2), 2), pairs, half, slots)
    assert bool((sent.counts > torch.tensor(pairs)).any()) == (ranks > 1), "some exceed the capacity"
    check_received(sent, half, slots)


def check_received(sent: Sent, half: bool, slots: bool) -> None:
    """Bit for bit where nothing is rounded: full, and a rank's own. Padding is zero, of the last view."""
    for rank, received in enumerate(sent.received):
        start = 0
        for source, (rows, place) in enumerate(zip(sent.rows, sent.places, strict=True)):
            capacity = sent.incoming[rank].capacities[source]
            there = (place[rank] >= 0).nonzero().squeeze(-1)[:capacity]
            mine = ReceivedRows(*(column[start : start + capacity] for column in received))
            start += capacity
            assert bool((mine.owners == source).all())
            assert torch.equal(mine.slots[: len(there)], there.int() if slots else torch.zeros_like(there).int())
            for name in (*EXACT, *ROUNDED):
                column, given = getattr(mine, name), getattr(rows, name)
                assert column.dtype == given.dtype
                rest = 1 if name == "view_ids" else 0
                assert bool((column[len(there) :] == rest).all()), name
                same = torch.equal(column[: len(there)], given[there])
                assert same or (half and source != rank and name in ROUNDED), name
        assert start == len(received.view_ids)


def test_wire_format_rounds_to_float16() -> None:
    """By half a unit in the last place of float16; a conic by as much in its factor. Some of it really is."""
    rows = [splats(make_rows(3000, 0, seed=rank), rank) for rank in range(2)]
    full, half = (send(rows, numbers(bands(2, 2), 2), [[3000] * 2] * 2, short, False).received[0] for short in (0, 1))
    came = (full.owners == 1) & (full.radii > 0).all(-1)
    assert int(came.sum()) > 500
    opacity, wanted = half.opacities[came], full.opacities[came]
    assert 0 < float(((opacity - wanted).abs() / wanted).max()) <= UNIT
    color, wanted = half.features[came], full.features[came]
    most = wanted.amax(1, keepdim=True)
    assert bool(((color - wanted).abs() <= UNIT * wanted + 2.0**-39 * most).all()), "of each, not of the brightest"
    assert bool(((color == 0) == (wanted == 0)).all()), "black stays black"
    conic, wanted = (x.conics[came].double() for x in (half, full))
    determinant = conic[:, 0] * conic[:, 2] - conic[:, 1] ** 2
    assert bool((determinant > 0).all()), "all are ellipses"
    assert float((conic[:, 0] / wanted[:, 0] - 1).abs().max()) <= 2.1 * UNIT
    assert float((determinant / (wanted[:, 0] * wanted[:, 2] - wanted[:, 1] ** 2) - 1).abs().median()) <= 4.2 * UNIT


def test_a_needle_that_rounding_would_break() -> None:
    """Its three numbers in float16 are of no ellipse; its factor's are."""
    rows = splats(make_rows(1, 0, views=1))
    conic = torch.tensor([[1.0, -0.9999, 0.9999]])
    rounded = conic.half().double()
    assert float(rounded[0, 0] * rounded[0, 2] - rounded[0, 1] ** 2) <= 0
    found = through(replace(rows, conics=conic)).conics.double()
    assert 0 < float(found[0, 0] * found[0, 2] - found[0, 1] ** 2) < 1e-3


def through(rows: Rows) -> ReceivedRows:
    """Each row as another rank has it, rounded."""
    place = torch.stack([torch.full((len(rows),), -1), torch.arange(len(rows))]).int()
    wire = torch.zeros(9 * len(rows), dtype=torch.int32)
    pack_wire(rows, place, wire, [0, 0], [0, len(rows)], 0, half=True, slots=False)
    counts = torch.tensor([len(rows), 0])
    return unpack_wire(wire, [0, 0], [len(rows), 0], counts, 1, MOST_VIEWS, half=True, slots=False)


@pytest.mark.parametrize("size", [1e-30, 1e-12, 1.0, 1e12, 1e30])
def test_numbers_of_any_size_keep_their_bits(size: float) -> None:
    """Far beyond what float16 holds, 6e-8 to 65504."""
    rows = splats(make_rows(100, 0, views=1))
    given = replace(rows, conics=rows.conics * size, features=rows.features * size)
    found = through(given)
    assert bool(((found.features - given.features).abs() <= UNIT * given.features).all())
    assert bool(((found.conics[:, 0] / given.conics[:, 0] - 1).abs() <= 2.1 * UNIT).all())


def test_radii_of_any_size_and_the_last_view() -> None:
    whole = torch.cat([2 ** torch.arange(31), 2 ** torch.arange(1, 25) - 1, torch.tensor([(2**24 - 1) * 64])])
    rows = splats(make_rows(len(whole), 0, views=1))
    rows = replace(rows, radii=torch.stack([whole, whole.flip(0)], dim=1).int())
    rows = replace(rows, view_ids=torch.arange(len(whole)).int() * 255 // (len(whole) - 1))
    found = through(rows)
    assert torch.equal(found.radii, rows.radii) and torch.equal(found.view_ids, rows.view_ids)
    assert int(rows.radii.max()) == 2**30 and int(rows.view_ids.max()) == MOST_VIEWS - 1


def gradients(rows: int, seed: int) -> Tensor:
    """Record whose kinds differ in size by many powers of ten, as those of small and large splats do."""
    g = torch.Generator().manual_seed(seed)
    sizes = 10.0 ** torch.tensor([-6, -6, 3, 3, 3, -3, -2, -2, -2, -3, -6, -6, 0, 0, 0, 0])
    return torch.randn(rows, 16, generator=g) * sizes * 10.0 ** torch.randint(-12, 12, (rows, 1), generator=g)


def return_gradients(sent: Sent, grads: list[Tensor], half: bool, absgrad: bool, depth: bool = False) -> list[Tensor]:
    """Return the gradients that each owner receives for the lines that it sent to each rank."""
    ranks, returned = len(grads), gaussian_gradients(absgrad=absgrad, depth=depth)
    words = gradient_words(returned, half=half)
    found = []
    for rank, grad in enumerate(grads):
        layout = sent.incoming[rank]
        before = sent.wires[rank].clone()
        where = (sent.counts[:, rank].contiguous(), sent.wires[rank], layout.starts, layout.capacities, rank)
        pack_gradients(grad, *where, half=half, returned=returned)
        after, width = sent.wires[rank], words * layout.capacities[rank]
        own = slice(layout.starts[rank], layout.starts[rank] + width)
        assert torch.equal(before[own], after[own]), "a rank's own gradients stay"
        for source, capacity in enumerate(layout.capacities):
            came = int(sent.counts[source, rank])
            behind = [layout.segment(wire, source, words).view(words, capacity)[:, came:] for wire in (before, after)]
            assert torch.equal(*behind), "nothing is written where nothing came"
    for owner in range(ranks):
        back = Layout.of([sent.incoming[rank].capacities[owner] for rank in range(ranks)], words)
        wire = torch.full((back.words,), 7, dtype=torch.int32, device=grads[0].device)
        for rank in range(ranks):
            back.segment(wire, rank, words).copy_(sent.incoming[rank].segment(sent.wires[rank], owner, words))
        own = grads[owner].split(sent.incoming[owner].capacities)[owner]
        found.append(
            collect_wire(sent.places[owner], sent.rows[owner].count, wire, back.starts, back.capacities, own, owner,
                         half=half, returned=returned)
        )  # fmt: skip
    return found


def sums(sent: Sent, grads: list[Tensor], absgrad: bool, depth: bool = False) -> list[Tensor]:
    """Return the same by hand."""
    columns = gaussian_gradients(absgrad=absgrad, depth=depth)
    found = []
    for owner, (rows, place) in enumerate(zip(sent.rows, sent.places, strict=True)):
        total = torch.zeros(len(rows), 16)
        for rank, grad in enumerate(grads):
            mine = grad.split(sent.incoming[rank].capacities)[owner]
            for row in ((place[rank] >= 0) & (place[rank] < len(mine))).nonzero().squeeze(-1).tolist():
                total[row, columns] += mine[int(place[rank, row]), columns]
        found.append(total)
    return found


@pytest.mark.parametrize("depth", [False, True])
@pytest.mark.parametrize("absgrad", [False, True])
@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("ranks", [1, 4])
def test_returned_gradients_are_summed(ranks: int, half: bool, absgrad: bool, depth: bool) -> None:
    rows = [splats(make_rows(150, 9, seed=rank), rank) for rank in range(ranks)]
    sent = send(rows, numbers(bands(ranks, 2), 2), uneven(ranks), half, False)
    grads = [gradients(sum(sent.incoming[rank].capacities), rank) for rank in range(ranks)]
    expected, returned = sums(sent, grads, absgrad, depth), return_gradients(sent, grads, half, absgrad, depth)
    for rank, (found, wanted) in enumerate(zip(returned, expected, strict=True)):
        assert found.shape == (159, 16) and int(found.any(1).sum()) > 30
        if not half:
            assert torch.equal(found, wanted)
            continue
        size = sums(sent, [grad.abs() for grad in grads], absgrad, depth)[rank]
        # Of conics and of the rest, those of 2^-28 of the largest and less lose bits; a hundredth of that is lost here.
        assert bool(((found - wanted).abs() <= 1.01 * UNIT * size).all())
        assert ranks == 1 or not torch.equal(found, wanted)


def test_nonfinite_gradients_remain_nonfinite() -> None:
    """A step whose gradients are not finite is found out by its owner."""
    rows = [splats(make_rows(60, 0, seed=rank), rank) for rank in range(2)]
    whole = [0, 0, 0, 0, 50, 70, 1, 0, 0, 0, 50, 70]
    for value in (float("nan"), float("inf"), float("-inf")):
        for column in range(9):
            sent = send(rows, whole, [[60, 60], [60, 60]], True, False)
            grads = [gradients(120, rank) for rank in range(2)]
            grads[0][60, column] = value
            row = int((sent.places[1][0] == 0).nonzero())
            found = return_gradients(sent, grads, True, False)[1]
            assert not bool(found[row].isfinite().all()) and bool(found[:row].isfinite().all())


def test_nothing_to_send() -> None:
    none = [make_rows(0, 0), make_rows(0, 8), make_rows(0, 0)]
    sent = send(none, numbers(bands(3, 2), 2), [[0, 4, 0], [3, 0, 0], [0, 0, 5]], False, False)
    assert [len(received.view_ids) for received in sent.received] == [3, 4, 5]
    assert not any(bool(received.radii.any()) for received in sent.received)
    grads = [torch.ones(len(received.view_ids), 16) for received in sent.received]
    assert [found.shape[0] for found in return_gradients(sent, grads, False, True)] == [0, 8, 0]
    nowhere = send([make_rows(30, 0)] * 2, numbers(bands(2, 2), 2), [[0, 0], [0, 0]], True, True)
    assert [len(received.view_ids) for received in nowhere.received] == [0, 0]


@pytest.mark.parametrize("device", DEVICES)
def test_rows_are_received_from_the_largest_number_of_ranks(device: str) -> None:
    """And the gradients of each are returned to its owner."""
    rows, ranks, each = make_rows(3 * MOST_SEGMENTS, 0), MOST_SEGMENTS, 3
    rows = replace(rows, radii=rows.radii.clamp(min=1)).to(device)  # others never leave
    wire = torch.zeros(12 * each * ranks, dtype=torch.int32, device=device)
    starts, capacities = [12 * each * rank for rank in range(ranks)], [each] * ranks
    for rank in range(ranks):  # of each the rank's own three lines
        place = torch.full((1, len(rows)), -1, dtype=torch.int32, device=device)
        place[0, each * rank : each * (rank + 1)] = torch.arange(each, dtype=torch.int32, device=device)
        pack_wire(rows, place, wire, starts[rank : rank + 1], [each], 0, half=False, slots=False)
    counts = torch.full((ranks,), each, device=device)
    counts[7] = 2
    got = unpack_wire(wire, starts, capacities, counts, 5, 2, half=False, slots=False)
    there = torch.arange(3 * ranks, device=device) != 3 * 7 + 2
    assert torch.equal(got.means2d[there], rows.means2d[there]) and not got.radii[~there].any()
    assert got.owners.tolist() == [rank for rank in range(ranks) for _ in range(each)]
    records = torch.rand(3 * ranks, 16, device=device)
    wire.zero_()
    pack_gradients(records, counts, wire, starts, capacities, 5, half=False, returned=range(9))
    back = wire.view(ranks, 12, each)[:, :9].transpose(1, 2).reshape(-1, 9).view(torch.float32)
    there[15:18] = False  # its own do not leave
    assert torch.equal(back[there], records[there, :9]) and not back[~there].any()


def test_more_ranks_than_that_are_refused() -> None:
    many = [0] * (MOST_SEGMENTS + 1)
    with pytest.raises(ValueError, match=f"rows of 1 to {MOST_SEGMENTS} ranks, not of {MOST_SEGMENTS + 1}"):
        counts = torch.zeros(len(many), dtype=torch.int64)
        unpack_wire(torch.zeros(1, dtype=torch.int32), many, many, counts, 0, 2, half=False, slots=False)


def test_opcheck() -> None:
    rows = splats(make_rows(20, 4))
    place, counts = rows.route(numbers(bands(2, 2), 2), 2)
    starts, capacities, wire = [0, 400], [20, 24], torch.zeros(800, dtype=torch.int32)
    given = (*rows.packed(), place, wire, starts, capacities, 0, True, True)
    torch.library.opcheck(OPS.pack_wire.default, given, test_utils="test_schema")
    OPS.pack_wire(*given)
    came = (wire, starts, capacities, counts, 0, True, True, 2, GAUSSIAN_ROWS.columns)
    torch.library.opcheck(OPS.unpack_wire.default, came, test_utils="test_schema")
    returned = gaussian_gradients(absgrad=True)
    back = (gradients(44, 0), counts, wire, starts, capacities, 0, True, returned)
    torch.library.opcheck(OPS.pack_gradients.default, back, test_utils="test_schema")
    own = (place, rows.count, wire, starts, capacities, torch.zeros(20, 16), 0, True, returned)
    torch.library.opcheck(OPS.collect_wire.default, own, test_utils="test_schema")
