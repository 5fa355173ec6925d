"""Rows through other ranks' memory, and gradients back: in several records each, nothing is lost."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from cuda_ext.ops.exchange.row_exchange import add_records
from ns_multigpu.primitives.convexes.kernels import CONVEX_PARTS
from ns_multigpu.primitives.record_parts import PartsWire, RecordParts
from ns_multigpu.primitives.surfels.kernels import SURFEL_PARTS
from tests.cuda_ext.exchange.test_row_exchange import addresses
from tests.lib.ranks import DEVICES

REAL, LINES, CAPACITY = 9, 12, 8


@dataclass(frozen=True)
class Kind:
    """Rows of a primitive."""

    layout: RecordParts
    widths: Mapping[str, tuple[int, ...]]

    def make_rows(self, device: str) -> Any:
        g = torch.Generator().manual_seed(4)
        floats = {name: torch.randn(LINES, *shape, generator=g) for name, shape in self.widths.items()}
        view_ids = torch.tensor([0] * 4 + [1] * 8).int()
        radii = torch.randint(1, 9, (LINES, 2), generator=g).int()
        rows = self.layout.rows(view_ids, torch.arange(LINES).int(), torch.tensor([REAL]), radii=radii, **floats)
        return self.layout.rows(*(part.to(device) for part in rows))

    @property
    def names(self) -> tuple[str, ...]:
        return ("view_ids", *self.widths, "radii")


_ALL = {"means2d": (2,), "opacities": (), "features": (3,), "depths": ()}
CASES = {
    "2dgs": Kind(SURFEL_PARTS, {**_ALL, "transforms": (9,), "normals": (3,)}),
    "convex": Kind(CONVEX_PARTS, {**_ALL, "lines": (18,), "sharpness": ()}),
}
_SPANS = [("lines", 7, 18), ("depths", 0, 1), ("features", 0, 3), ("lines", 0, 7), ("opacities", 0, 1)]
_SPANS += [("sharpness", 0, 1), ("means2d", 0, 2)]
CASES["any order"] = replace(CASES["convex"], layout=RecordParts(CONVEX_PARTS.widths, _SPANS))


def make_place(device: str) -> Tensor:
    """Rank 0 gets every other row, rank 1 all rows, of which the last exceeds the capacity."""
    place = torch.full((2, LINES), -1, dtype=torch.int32)
    place[0, 0:REAL:2] = torch.arange(5).int()
    place[1, :REAL] = torch.arange(REAL).int()
    return place.to(device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", CASES)
def test_there_and_back_through_memory(name: str, device: str) -> None:
    kind, place = CASES[name], make_place(device)
    rows, layout = kind.make_rows(device), kind.layout
    segments = [torch.zeros(1, CAPACITY, layout.record_floats, device=device) for _ in range(2)]
    layout.pack(rows, place, addresses(segments, 0), CAPACITY)
    received = layout.unpack(torch.cat(segments), torch.tensor([5, REAL], device=device), 2)
    for rank, sent in enumerate((range(0, REAL, 2), range(CAPACITY))):
        lines = slice(rank * CAPACITY, rank * CAPACITY + len(sent))
        for column in kind.names:
            assert torch.equal(getattr(received, column)[lines], getattr(rows, column)[list(sent)]), column
        assert received.slots[lines].tolist() == list(sent) and received.owners[lines].tolist() == [rank] * len(sent)
    # Each rank adds what it found of a row to the record there, which the owner adds up.
    found = layout.records_of([getattr(received, column) for column in layout.widths])
    sums = [torch.ones(1, CAPACITY, layout.record_floats, device=device) for _ in range(2)]
    slots = torch.arange(CAPACITY, dtype=torch.int32, device=device).repeat(2)
    add_records(found, addresses(sums, 0), received.owners, slots)
    records = layout.collect(place, rows.count, addresses(sums, 0), CAPACITY) - 1  # of rank 1
    seen = torch.zeros(LINES, device=device)
    seen[:CAPACITY] = 1
    once, twice = layout.gradients_of(records), [k for k in range(0, REAL, 2) if k < CAPACITY]
    for column in layout.widths:
        value = getattr(rows, column)
        expected = value * seen.view(-1, *[1] * (value.dim() - 1))
        expected[twice] *= 2
        expected[twice] += 1  # rank 0's
        expected[REAL - 1] = value[REAL - 1]  # of rank 0 alone
        expected[REAL:] -= 1  # padding gets nothing
        torch.testing.assert_close(once[column], expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", CASES)
def test_wire_size_of_a_row(name: str) -> None:
    """Twelve words a part, one more with slots; nine back, and two more of the last part where they are needed."""
    layout = CASES[name].layout
    plain, slots = (PartsWire(layout, slots=slots) for slots in (False, True))
    words = {"2dgs": (24, 26, 20), "convex": (36, 39, 27), "any order": (36, 39, 27)}[name]
    assert (plain.row_words, slots.row_words, plain.gradient_words) == words
    assert layout.record_floats == 16 * layout.parts and plain.gradient_words <= plain.row_words
    # Each gradient has a place of its own, among those that come back.
    kind = CASES[name]
    numbers = sum(max(layout.widths[column], 1) for column in layout.widths)
    back = [16 * k + n for k in range(layout.parts) for n in range(9)]
    back += [16 * layout.parts - 6, 16 * layout.parts - 5] if layout.absolute else []
    ones = [torch.ones(1, *kind.widths[column]) for column in layout.widths]
    places = layout.records_of(ones)[0].nonzero()[:, 0].tolist()
    assert len(places) == numbers and set(places) <= set(back)


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
