"""Rows of each primitive through other ranks' memory and on the wire, and gradients back: nothing is lost."""

from typing import Any

import pytest
import torch
from torch import Tensor

from cuda_ext.ops.exchange.row_exchange import add_records, pack, unpack
from cuda_ext.ops.exchange.row_layout import GAUSSIAN_ROWS, RowLayout
from cuda_ext.ops.exchange.row_wire import LOCAL, pack_wire
from ns_multigpu.core.row_wire import WireSegments
from ns_multigpu.primitives.convexes.kernels import CONVEX_ROWS
from ns_multigpu.primitives.row_wire import LayoutWire
from ns_multigpu.primitives.surfels.kernels import SURFEL_ROWS
from tests.cuda_ext.exchange.test_row_exchange import addresses
from tests.lib.ranks import DEVICES

REAL, LINES, CAPACITY = 9, 12, 8
LAYOUTS = {"3dgs": GAUSSIAN_ROWS, "2dgs": SURFEL_ROWS, "convex": CONVEX_ROWS}


def make_rows(layout: RowLayout, device: str) -> Any:
    g = torch.Generator().manual_seed(4)
    shapes = {name: (width,) if width else () for name, width in layout.widths.items()}
    floats = {name: torch.randn(LINES, *shape, generator=g) for name, shape in shapes.items()}
    view_ids = torch.tensor([0] * 4 + [1] * 8).int()
    radii = torch.randint(1, 9, (LINES, 2), generator=g).int()
    rows = layout.rows(view_ids, torch.arange(LINES).int(), torch.tensor([REAL]), radii=radii, **floats)
    return layout.rows(*(part.to(device) for part in rows))


def check_received(layout: RowLayout, rows: Any, received: Any, slots: bool = True) -> None:
    """Of 5 and `REAL` rows from two ranks, as `make_place` has them."""
    for rank, sent in enumerate((range(0, REAL, 2), range(CAPACITY))):
        lines = slice(rank * CAPACITY, rank * CAPACITY + len(sent))
        for column in ("view_ids", *layout.widths, "radii"):
            assert torch.equal(getattr(received, column)[lines], getattr(rows, column)[list(sent)]), column
        assert received.owners[lines].tolist() == [rank] * len(sent)
        assert received.slots[lines].tolist() == (list(sent) if slots else [0] * len(sent))
    assert not received.radii[5:CAPACITY].any() and not received.means2d[5:CAPACITY].any()
    assert received.view_ids[5:CAPACITY].tolist() == [1] * 3


def make_place(device: str) -> Tensor:
    """Rank 0 gets every other row, rank 1 all rows, of which the last exceeds the capacity."""
    place = torch.full((2, LINES), -1, dtype=torch.int32)
    place[0, 0:REAL:2] = torch.arange(5).int()
    place[1, :REAL] = torch.arange(REAL).int()
    return place.to(device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", LAYOUTS)
def test_there_and_back_through_memory(name: str, device: str) -> None:
    layout, place = LAYOUTS[name], make_place(device)
    rows = make_rows(layout, device)
    segments = [torch.full((1, CAPACITY, layout.record_floats), torch.nan, device=device) for _ in range(2)]
    pack(rows, place, addresses(segments, 0), CAPACITY, layout)
    assert not segments[1][0, :, layout.numbers + 4 :].any(), "zeros end a record"
    received = unpack(torch.cat(segments), torch.tensor([5, REAL], device=device), 2, layout)
    check_received(layout, rows, received)
    # Each rank adds what it found of a row to the record of its owner.
    found = layout.records_of(layout.columns_of(received))
    sums = torch.ones(1, LINES, layout.record_floats, device=device)
    add_records(found, addresses([sums] * 2, 0), received.owners, received.slots)
    times = torch.ones(LINES, device=device)
    times[0:REAL:2] = 2
    times[REAL - 1], times[REAL:] = 1, 0
    for column, found in layout.gradients_of(sums[0] - 1).items():
        value = getattr(rows, column)
        expected = value * times.view(-1, *[1] * (value.dim() - 1))
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    assert bool((sums[0, :, layout.numbers :] == 1).all())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("slots", [False, True])
@pytest.mark.parametrize("name", LAYOUTS)
def test_there_and_back_on_the_wire(name: str, slots: bool, device: str) -> None:
    """Of two ranks with the same rows, of which one keeps its own."""
    layout, place = LAYOUTS[name], make_place(device)
    rows, counts = make_rows(layout, device), torch.tensor([5, REAL], device=device)
    wire = LayoutWire(layout, False, slots, range(layout.numbers) if name != "3dgs" else range(10))
    memory = torch.full((CAPACITY * wire.row_words + 3,), 7, dtype=torch.int32, device=device)
    segments = WireSegments((3, LOCAL), (CAPACITY, CAPACITY), 1)
    wire.pack(rows, place, memory, segments)
    received = wire.unpack(memory, segments, counts, 2)
    wire.keep(rows, place[1], received, segments, 1)
    check_received(layout, rows, received, slots)
    records = torch.zeros(2 * CAPACITY, layout.record_floats, device=device)
    records[:, : layout.numbers] = torch.cat(
        [column.view(len(column), -1) for column in layout.columns_of(received)], dim=1
    )
    wire.pack_gradients(records, counts, memory, segments)
    sums = wire.collect(place, rows.count, memory, segments, records[CAPACITY:])
    times = torch.ones(LINES, 1, device=device)
    times[0:REAL:2] = 2
    times[REAL - 1], times[REAL:] = 1, 0
    columns = [column.view(LINES, -1) for column in layout.columns_of(rows)]
    assert torch.equal(sums[:, : layout.numbers], times * torch.cat(columns, dim=1)) and bool(sums.any())
    assert not sums[:, layout.numbers :].any()


@pytest.mark.parametrize("name", LAYOUTS)
def test_wire_size_of_a_row(name: str) -> None:
    """A word for each number and two of radii and view, one more with slots."""
    layout = LAYOUTS[name]
    plain, slots = (LayoutWire(layout, False, slots, range(layout.numbers)) for slots in (False, True))
    words = {"3dgs": (12, 13, 10, 16), "2dgs": (21, 22, 19, 32), "convex": (28, 29, 26, 32)}[name]
    assert (plain.row_words, slots.row_words, plain.gradient_words, layout.record_floats) == words


def test_only_rows_of_gaussians_are_rounded() -> None:
    rows, wire = make_rows(SURFEL_ROWS, "cpu"), torch.zeros(900, dtype=torch.int32)
    with pytest.raises(ValueError, match="leave half out"):
        pack_wire(rows, make_place("cpu"), wire, [0, 0], [5, 5], 0, half=True, slots=False, layout=SURFEL_ROWS)


@pytest.mark.parametrize("device", DEVICES)
def test_records_are_added_where_their_owners_have_them(device: str) -> None:
    sinks = [torch.zeros(5, 8, device=device) for _ in range(2)]
    records = torch.randn(4, 8, device=device)
    records[2], records[3, 1] = 0.0, torch.nan
    owners, slots = torch.tensor([[1, 1, 99, 0], [3, 3, -7, 4]], dtype=torch.int32, device=device)
    add_records(records, addresses([sink[None] for sink in sinks], 0), owners, slots)
    torch.testing.assert_close(sinks[1][3], records[0] + records[1])
    torch.testing.assert_close(sinks[0][4], records[3], equal_nan=True)
    assert not sinks[0][:4].any() and not sinks[1][[0, 1, 2, 4]].any()
    with pytest.raises(TypeError, match="owners"):
        add_records(records, addresses([sinks[0][None]], 0), owners.long(), slots)
    given = (records, addresses([sink[None] for sink in sinks], 0), owners, slots, False)
    torch.library.opcheck(torch.ops.ns_multigpu.add_records.default, given)
