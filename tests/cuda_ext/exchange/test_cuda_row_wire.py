"""Rows and gradients on the wire, on one GPU: the CPU's results, bit for bit."""

from dataclasses import replace

import pytest
import torch

from cuda_ext.ops.exchange.row_wire import (
    LOCAL,
    collect_wire,
    gaussian_gradients,
    gradient_words,
    keep_rows,
    pack_gradients,
    pack_wire,
    row_words,
    unpack_wire,
)
from tests.cuda_ext.exchange.test_cuda_row_exchange import assert_same_bits
from tests.cuda_ext.exchange.test_local_rows import check_kept
from tests.cuda_ext.exchange.test_row_exchange import Rows, bands, make_rows, numbers
from tests.cuda_ext.exchange.test_row_wire import Layout, check_received, gradients, send, splats, uneven
from tests.cuda_ext.graphs import check_replays

pytestmark = pytest.mark.gpu

SIZES = [  # rows, padding, ranks, capacity of a pair
    (1, 0, 1, 1),
    (32, 0, 2, 7),
    (1025, 700, 5, 300),
    (5000, 5000, 7, 5000),
    (300_000, 1237, 32, 9999),
    (1_500_000, 123_457, 4, 600_001),
    (0, 500, 2, 3),
]


def mixed_rows(real: int, padding: int) -> Rows:
    """Rows as a projection makes them, some of them with numbers that no float16 holds."""
    rows = splats(make_rows(real, padding))
    g = torch.Generator().manual_seed(5)
    size = 10.0 ** torch.randint(-40, 30, (len(rows), 1), generator=g)
    some = torch.rand(len(rows), 1, generator=g) < 0.3
    conics, features = (torch.where(some, x * size, x) for x in (rows.conics, rows.features))
    conics[::50, 2] = 0.0
    return replace(rows, conics=conics, features=features)


@pytest.mark.parametrize("slots", [False, True])
@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize(("real", "padding", "ranks", "capacity"), SIZES)
def test_rows_there(real: int, padding: int, ranks: int, capacity: int, half: bool, slots: bool) -> None:
    rows, patches = mixed_rows(real, padding), numbers(bands(ranks, 2), 2)
    place, counts = rows.route(patches, ranks)
    capacities = [capacity // (1 + rank) for rank in range(ranks)]
    layout = Layout.of(capacities, row_words(half=False, slots=slots))
    wires = [torch.full((layout.words,), 7, dtype=torch.int32, device=device) for device in ("cpu", "cuda")]
    for wire, one in zip(wires, (rows, rows.to("cuda")), strict=True):
        where = (place.to(wire.device), wire, layout.starts, capacities, ranks - 1)
        pack_wire(one, *where, half=half, slots=slots)
    assert_same_bits(wires[1], wires[0])
    columns = [
        unpack_wire(wire, layout.starts, capacities, counts.to(wire.device), ranks - 1, 2, half=half, slots=slots)
        for wire in wires
    ]
    assert real < 1000 or int((columns[0].radii > 0).all(-1).sum()) > 100
    for name, column in columns[1]._asdict().items():
        assert_same_bits(column, getattr(columns[0], name))


@pytest.mark.parametrize("depth", [False, True])
@pytest.mark.parametrize("absgrad", [False, True])
@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize(("real", "padding", "ranks", "capacity"), SIZES)
def test_gradients_back(
    real: int, padding: int, ranks: int, capacity: int, half: bool, absgrad: bool, depth: bool
) -> None:
    rows, patches = make_rows(real, padding), numbers(bands(ranks, 2), 2)
    place, counts = rows.route(patches, ranks)
    capacities, rank = [capacity // (1 + rank) for rank in range(ranks)], ranks // 2
    returned = gaussian_gradients(absgrad=absgrad, depth=depth)
    layout = Layout.of(capacities, gradient_words(returned, half=half))
    grads, found = gradients(sum(capacities), 3), []
    for device in ("cpu", "cuda"):
        wire, there = torch.full((layout.words,), 7, dtype=torch.int32, device=device), grads.to(device)
        where = (layout.starts, capacities)
        pack_gradients(there, counts.to(device), wire, *where, rank, half=half, returned=returned)
        own = there.split(capacities)[rank]
        given = (place.to(device), rows.count.to(device), wire, *where, own, rank)
        found.append((wire, collect_wire(*given, half=half, returned=returned)))
    for here, on_gpu in zip(*found, strict=True):
        assert_same_bits(on_gpu, here)


@pytest.mark.parametrize("half", [False, True])
def test_rows_are_received_unchanged(half: bool) -> None:
    rows = [splats(make_rows(3000 + 100 * rank, 50, seed=rank), rank).to("cuda") for rank in range(4)]
    sent = send(rows, numbers(bands(4, 2), 2), uneven(4), half, True)
    check_received(sent, half, True)
    check_kept(sent, half, True)


def test_a_cuda_graph_holds_it() -> None:
    rows = splats(make_rows(4000, 100)).to("cuda")
    patches = numbers(bands(2, 2), 2)
    layout = Layout.of([900, 2000], 12)
    where = (layout.starts, layout.capacities)
    wire = torch.zeros(layout.words, dtype=torch.int32, device="cuda")
    grads, returned = gradients(2900, 1).cuda(), gaussian_gradients(absgrad=True)

    def step() -> list[torch.Tensor]:
        place, counts = rows.route(patches, 2)
        stays = ([LOCAL, layout.starts[1]], layout.capacities)
        pack_wire(rows, place, wire, *stays, 0, half=True, slots=False)
        received = unpack_wire(wire, *stays, counts, 0, 2, half=True, slots=False)
        keep_rows(rows, place[0], received, 0, 900, slots=False)
        pack_gradients(grads, counts, wire, *where, 0, half=True, returned=returned)
        sums = collect_wire(place, rows.count, wire, *where, grads[:900], 0, half=True, returned=returned)
        return [*received, sums]

    found = check_replays(step, rows.means2d.add_, (0.0, 9.0, 1000.0))
    assert not bool(found[6].any())  # all moved out


def test_wrong_arguments_are_named() -> None:
    rows = make_rows(10, 2).to("cuda")
    place, _ = rows.route([0, 0, 0, 0, 50, 70], 1)
    wire = torch.zeros(144, dtype=torch.int32, device="cuda")
    op = torch.ops.ns_multigpu.pack_wire
    with pytest.raises(ValueError, match="in place"):
        op(*rows.packed(), place, wire.repeat(2)[::2], [0], [12], 0, False, False)
    with pytest.raises(TypeError, match="on cpu like the rest"):
        pack_wire(rows, place, wire.cpu(), [0], [12], 0, half=False, slots=False)
