"""The exchange of rows on the CPU, with ranks that share this process: who gets what, there and back."""

from dataclasses import dataclass, fields, replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from cuda_ext import ReceivedRows, pack, unpack
from cuda_ext.ops.exchange.row_exchange import add_records
from cuda_ext.ops.exchange.row_layout import GAUSSIAN_ROWS
from ns_multigpu.core.types import Hits, Patch, Splats, View
from tests.cuda_ext.routing import route
from tests.lib.overlaps import overlaps
from tests.lib.ranks import DEVICES

WIDTH, HEIGHT, HALO = 50, 70, 16
OPS = torch.ops.ns_multigpu


@dataclass(frozen=True)
class Rows:
    """Rows that a rank sends, followed by padding."""

    view_ids: Tensor
    count: Tensor
    means2d: Tensor
    conics: Tensor
    opacities: Tensor
    features: Tensor
    depths: Tensor
    radii: Tensor

    def __len__(self) -> int:
        return len(self.view_ids)

    def to(self, device: str) -> "Rows":
        return Rows(**{field.name: getattr(self, field.name).to(device) for field in fields(self)})

    def route(self, patches: list[int], ranks: int) -> tuple[Tensor, Tensor]:
        return route(self.view_ids, self.count, self.means2d, self.radii, patches, ranks)

    def packed(self) -> tuple[list[Tensor], Tensor, Tensor]:
        return GAUSSIAN_ROWS.columns_of(self), self.radii, self.view_ids


def make_rows(real: int, padding: int, views: int = 2, seed: int = 0) -> Rows:
    """Rows on and around images; coordinates in quarters of a pixel, so that boxes end on pixel centres, too."""
    g = torch.Generator().manual_seed(seed)
    lines = real + padding
    view_ids = torch.cat(
        [torch.randint(0, views, (real,), generator=g).sort().values, torch.full((padding,), views - 1)]
    )
    means2d = torch.rand(lines, 2, generator=g) * torch.tensor([WIDTH + 30.0, HEIGHT + 30.0]) - 15
    means2d = (means2d * 4).round() / 4
    radii = torch.randint(0, 9, (lines, 2), generator=g).int()
    floats = [torch.randn(lines, *shape, generator=g) for shape in ((3,), (), (3,), ())]
    return Rows(view_ids.int(), torch.tensor([real]), means2d, *floats, radii)


def bands(ranks: int, views: int) -> list[tuple[int, Patch]]:
    """Rank and patch of bands of each view, another number of lines each; some are empty."""
    result: list[tuple[int, Patch]] = []
    for view in range(views):
        cuts = [HEIGHT * k * k // (ranks * ranks) for k in range(ranks + 1)]
        for k, (top, bottom) in enumerate(pairwise(cuts)):
            result.append(((k + view) % ranks, Patch(view, 0, top, WIDTH, bottom, HALO)))
    return result


def numbers(parts: list[tuple[int, Patch]], views: int) -> list[int]:
    cameras = make_views(views)
    return [n for rank, patch in parts for n in (rank, patch.view, *patch.rendered(cameras[patch.view]))]


def make_views(count: int) -> list[View]:
    return [View(torch.eye(4), torch.eye(3), WIDTH, HEIGHT) for _ in range(count)]


@dataclass(frozen=True)
class Exchange:
    """All ranks' rows after a whole exchange: route, pack and unpack on each."""

    rows: list[Rows]
    places: list[Tensor]
    counts: Tensor  # [from, to]
    received: list[ReceivedRows]
    capacity: int


def exchange(rows: list[Rows], patches: list[int], capacity: int, views: int = 2) -> Exchange:
    """On the device of the rows; each rank's segments lie in one tensor."""
    ranks, device = len(rows), rows[0].means2d.device
    segments = [torch.full((ranks, capacity, 16), 7.0, device=device) for _ in range(ranks)]
    routed = [one.route(patches, ranks) for one in rows]
    for source, (one, (place, _)) in enumerate(zip(rows, routed, strict=True)):
        pack(one, place, addresses(segments, source), capacity)
    counts = torch.stack([counts for _, counts in routed])
    received = [unpack(segments[rank], counts[:, rank], views) for rank in range(ranks)]
    return Exchange(rows, [place for place, _ in routed], counts, received, capacity)


def addresses(segments: list[Tensor], source: int) -> Tensor:
    """Return the addresses of a source's segments: tensors [ranks, capacity, 16] of each rank."""
    capacity = segments[0].shape[1]
    return torch.tensor([t.data_ptr() + 64 * capacity * source for t in segments], device=segments[0].device)


@pytest.mark.parametrize("ranks", [1, 2, 4, 7])
def test_route_is_the_rule_of_touches(ranks: int) -> None:
    rows, views, parts = make_rows(900, 60), make_views(2), bands(ranks, 2)
    place, counts = rows.route(numbers(parts, 2), ranks)
    splats = Splats(Hits(rows.view_ids, rows.view_ids), {"means2d": rows.means2d, "radii": rows.radii})
    assert place.dtype == torch.int32 and place.shape == (ranks, 960)
    assert counts.dtype == torch.int64 and counts.shape == (ranks,)
    for rank in range(ranks):
        touch = overlaps(splats, views, [patch for owner, patch in parts if owner == rank])
        touch[900:] = False
        assert torch.equal(place[rank] >= 0, touch)
        assert place[rank][touch].tolist() == list(range(int(counts[rank]))), "their own order, without gaps"
        assert int(counts[rank]) > 20 or ranks > 4
    assert int((place >= 0).sum(0).max()) > 1 or ranks == 1


def test_route_equals_overlap_of_pixels() -> None:
    rows = make_rows(300, 0, views=1)
    patches = [0, 0, 0, 0, 20, 70, 1, 0, 20, 30, 50, 31, 1, 0, 49, 69, 50, 70]
    place, _ = rows.route(patches, 2)
    for rank in range(2):
        for row in range(300):
            (x, y), (rx, ry) = rows.means2d[row].tolist(), rows.radii[row].tolist()
            reached = rx > 0 and ry > 0 and any(
                abs(j + 0.5 - x) <= rx and abs(i + 0.5 - y) <= ry
                for k in range(0, len(patches), 6) if patches[k] == rank
                for j in range(patches[k + 2], patches[k + 4]) for i in range(patches[k + 3], patches[k + 5])
            )  # fmt: skip
            assert (int(place[rank, row]) >= 0) == reached, (rank, row)


def test_padding_dead_rows_and_other_views_are_not_sent() -> None:
    rows = make_rows(40, 10, views=2)
    rows = replace(rows, means2d=torch.full((50, 2), 25.0), radii=torch.full((50, 2), 3, dtype=torch.int32))
    rows.radii[5, 0], rows.radii[6, 1] = 0, 0
    whole = [0, 0, 0, 0, WIDTH, HEIGHT]
    place, counts = rows.route(whole, 1)
    expected = (rows.view_ids == 0) & (torch.arange(50) < 40)
    expected[5:7] = False
    assert torch.equal(place[0] >= 0, expected) and counts.tolist() == [int(expected.sum())] and 5 < counts[0] < 30
    place, counts = replace(rows, count=torch.tensor([10**12])).route([*whole, 0, 1, 0, 0, WIDTH, HEIGHT], 1)
    assert counts.tolist() == [48], "a count beyond the lines is all lines"
    for patches in ([], [0, 0, 3, 3, 3, 60], [1, 1, 3, 3, 20, 3]):
        place, counts = rows.route(patches, 2)
        assert bool((place == -1).all()) and counts.tolist() == [0, 0]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_rows_are_received_unchanged(ranks: int) -> None:
    rows = [make_rows(150 + 30 * rank, 20, seed=rank) for rank in range(ranks)]
    done = exchange(rows, numbers(bands(ranks, 2), 2), 260)
    assert int(done.counts.max()) <= 260 and int(done.counts.sum()) > 60
    check_received(done, 2)


def check_received(done: Exchange, views: int) -> None:
    """Each segment holds the rows that were routed there, up to its capacity, and padding."""
    for rank, received in enumerate(done.received):
        for source, (rows, place) in enumerate(zip(done.rows, done.places, strict=True)):
            slots = (place[rank] >= 0).nonzero().squeeze(-1)[: done.capacity]
            segment = slice(source * done.capacity, (source + 1) * done.capacity)
            mine = ReceivedRows(*(column[segment] for column in received))
            assert bool((mine.owners == source).all()) and mine.owners.dtype == torch.int32
            assert torch.equal(mine.slots[: len(slots)], slots.int())
            for name in ("view_ids", "means2d", "conics", "opacities", "features", "depths", "radii"):
                column, given = getattr(mine, name), getattr(rows, name)
                assert column.dtype == given.dtype and torch.equal(column[: len(slots)], given[slots]), name
                rest = views - 1 if name == "view_ids" else 0
                assert bool((column[len(slots) :] == rest).all()), name
            assert bool((mine.slots[len(slots) :] == 0).all())


def test_exceeded_capacity_drops_the_last_rows_and_reports() -> None:
    rows = [make_rows(200, 0, seed=rank) for rank in range(2)]
    done = exchange(rows, numbers(bands(2, 2), 2), 30)
    assert bool((done.counts > 30).any())
    check_received(done, 2)
    whole = exchange(rows, numbers(bands(2, 2), 2), 200)
    assert torch.equal(done.counts, whole.counts), "counts are those of an unlimited capacity"


def test_pack_writes_only_its_own_lines() -> None:
    rows = make_rows(160, 5, views=1)
    place, counts = rows.route([0, 0, 0, 0, 30, 70], 1)
    memory = torch.full((200, 16), 3.0)
    pack(rows, place, torch.tensor([memory[50].data_ptr()]), 20)
    assert int(counts) > 20
    untouched = torch.ones(200, dtype=torch.bool)
    untouched[50:70] = False
    assert bool((memory[untouched] == 3.0).all()) and bool((memory[50:70, 14:] == 0.0).all())


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_returned_gradients_are_summed(ranks: int) -> None:
    rows = [make_rows(150, 9, seed=rank) for rank in range(ranks)]
    done = exchange(rows, numbers(bands(ranks, 2), 2), 100)
    g = torch.Generator().manual_seed(9)
    grads = [torch.randn(ranks, 100, 16, generator=g) for _ in range(ranks)]
    for owner in range(ranks):
        found, expected = torch.zeros(2, 159, 16)
        for rank in range(ranks):
            received, mine = done.received[rank], slice(owner * 100, owner * 100 + 100)
            records = torch.where((received.radii[mine] > 0).all(-1)[:, None], grads[rank][owner], 0.0)
            sinks = torch.tensor([found.data_ptr()] * ranks)
            add_records(records, sinks, received.owners[mine], received.slots[mine])
            for line in range(owner * 100, owner * 100 + min(100, int(done.counts[owner, rank]))):
                assert received.owners[line] == owner
                expected[int(received.slots[line])] += grads[rank].view(-1, 16)[line]
        assert torch.equal(found, expected) and found.shape == (159, 16)
        assert bool((found[150:] == 0).all()) and int(found.any(1).sum()) > 30


@pytest.mark.parametrize("device", DEVICES)
def test_nothing_to_send(device: str) -> None:
    none, padding, some = (make_rows(*counts).to(device) for counts in ((0, 0), (0, 8), (30, 0)))
    patches = numbers(bands(3, 2), 2)
    place, counts = none.route(patches, 3)
    assert place.shape == (3, 0) and counts.tolist() == [0, 0, 0]
    check_received(exchange([none, padding, some], patches, 40), 2)
    nowhere = torch.zeros(3, dtype=torch.int64, device=device)
    pack(none, place, nowhere, 5)
    place, counts = some.route(patches, 3)
    pack(some, place, nowhere, 0)
    assert unpack(torch.zeros(3, 0, 16, device=device), counts, 2).means2d.shape == (0, 2)


def test_columns_of_unequal_lengths_are_named() -> None:
    rows = make_rows(4, 0)
    place, nowhere = torch.zeros(1, 4).int(), torch.zeros(1, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"depths must have the shape \[4\]"):
        pack(replace(rows, depths=rows.depths[:3]), place, nowhere, 0)


@pytest.mark.parametrize("device", DEVICES)
def test_opcheck(device: str) -> None:
    rows, patches = make_rows(20, 4).to(device), numbers(bands(2, 2), 2)
    place, counts = rows.route(patches, 2)
    inputs = (rows.view_ids, rows.count, rows.means2d, rows.radii, patches, 2, place, counts)
    torch.library.opcheck(OPS.route_lines.default, inputs)
    segments = [torch.zeros(1, 24, 16, device=device) for _ in range(2)]
    torch.library.opcheck(OPS.pack.default, (*rows.packed(), place, addresses(segments, 0), 24))
    assert bool(segments[0].any())
    came = (torch.cat(segments), counts, 2, GAUSSIAN_ROWS.columns)
    torch.library.opcheck(OPS.unpack.default, came, test_utils="test_schema")
