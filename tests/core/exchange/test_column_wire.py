"""Rows of any columns in segments of words, and their gradients back: bit for bit, or rounded to float16."""

from typing import Any

import pytest
import torch
from torch import Tensor

from ns_multigpu.core.exchange.column_wire import ColumnFormat, ColumnRows, ColumnWire
from ns_multigpu.core.row_wire import LOCAL, WireSegments

UNIT = 2.0**-11
"""Half a unit in the last place of float16, relative."""
PLACE = torch.tensor([[0, -1, 1, 2, -1], [-1, 0, 1, -1, 2], [-1, -1, -1, 0, -1]], dtype=torch.int32)
"""Lines of five rows in the segments of ranks 0 to 2; rank 1 has the rows."""
SIZES, RANK = (3, 3, 1), 1
GEOMETRY = ("means2d", "conics", "opacities", "features", "depths")


def columns_of(rows: int, dtype: torch.dtype) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(rows)
    shapes = {"means2d": (2,), "conics": (3,), "opacities": (), "lines": (4, 3), "depths": ()}
    floats = {name: torch.rand(rows, *shape, generator=g, dtype=dtype) + 0.5 for name, shape in shapes.items()}
    floats["conics"][:, [0, 2]] += 1.5  # positive definite
    ids = torch.arange(rows, dtype=torch.int32)
    return {"view_ids": ids // 2, **floats, "radii": torch.stack([ids, ids + 1], 1), "long": ids.long() << 40}


def wire_of(columns: dict[str, Tensor], *, half: bool) -> ColumnWire:
    layout = ColumnFormat.of(columns, [column for column in columns.values() if column.is_floating_point()])
    wire: Any = layout.wire(half=half, slots=False)
    return wire


def segments(words: int) -> WireSegments:
    return WireSegments((0, LOCAL, words * SIZES[0]), SIZES, RANK)


def exchanged(wire: ColumnWire, rows: ColumnRows, place: Tensor) -> ColumnRows:
    """Return what this rank receives if every rank sends to it what it sends to that rank, and its own rows."""
    there = segments(wire.row_words)
    memory = torch.full((wire.row_words * (SIZES[0] + SIZES[2]),), -7, dtype=torch.int32)
    wire.pack(rows, place, memory, there)
    received: ColumnRows = wire.unpack(memory, there, torch.tensor(SIZES), 3)
    wire.keep(rows, place[RANK], received, there, RANK)
    return received


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_received_rows_are_ordered_by_source(dtype: torch.dtype, half: bool) -> None:
    columns = columns_of(5, dtype)
    received = exchanged(wire_of(columns, half=half), ColumnRows(columns), PLACE)
    chosen = torch.tensor([0, 2, 3, 1, 2, 4, 3])
    own = torch.tensor([False] * 3 + [True] * 3 + [False])
    for name, column in columns.items():
        found = received.columns[name]
        assert found.dtype == column.dtype and found.is_contiguous() and found.storage_offset() == 0
        assert torch.equal(found[own], column[chosen][own]), "own rows are never rounded"
        if half and name in ("conics", "opacities"):
            torch.testing.assert_close(found, column[chosen], rtol=4 * UNIT, atol=0)
            assert not torch.equal(found, column[chosen])
        else:
            assert torch.equal(found, column[chosen]), name
    some = wire_of(columns, half=half).lines(received, 2, 5)
    assert torch.equal(some.view_ids, received.view_ids[2:5]) and some.count.tolist() == [3]


@pytest.mark.parametrize("half", [False, True])
def test_no_rows_and_a_single_one(half: bool) -> None:
    for rows in (0, 1):
        columns = columns_of(rows, torch.float32)
        wire, none = wire_of(columns, half=half), torch.zeros(0, dtype=torch.int32)
        place, there = torch.zeros(1, rows, dtype=torch.int32), WireSegments((LOCAL,), (rows,), 0)
        wire.pack(ColumnRows(columns), place, none, there)
        received = wire.unpack(none, there, torch.tensor([rows]), 1)
        wire.keep(ColumnRows(columns), place[0], received, there, 0)
        for name, column in columns.items():
            assert torch.equal(received.columns[name], column)
        records = torch.ones(rows, wire.layout.record_floats)
        assert torch.equal(wire.collect(place, torch.tensor([rows]), none, there, records), records)


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gradients_return_as_sums(dtype: torch.dtype, half: bool) -> None:
    columns = columns_of(5, dtype)
    wire = wire_of(columns, half=half)
    numbers, words = wire.layout.record_floats, wire.gradient_words
    assert words <= wire.row_words, "gradients return through the rows' memory"
    records = torch.randn(sum(SIZES), numbers, generator=torch.Generator().manual_seed(2), dtype=dtype)
    memory, there = torch.full((words * 4,), -7, dtype=torch.int32), segments(words)
    wire.pack_gradients(records, torch.tensor(SIZES), memory, there)
    own = records[SIZES[0] : SIZES[0] + SIZES[1]]
    sums = wire.collect(PLACE, torch.tensor([5]), memory, there, own)
    assert sums.dtype == dtype and torch.equal(sums[4], own[2])
    expected = torch.stack([records[0], own[0], records[1] + own[1], records[2] + records[6], own[2]])
    torch.testing.assert_close(sums, expected, rtol=8 * UNIT if half else 0, atol=8 * UNIT if half else 0)
    assert torch.equal(sums, expected) != half


def test_numbers_of_any_size_keep_their_bits() -> None:
    """As `cuda_ext.ops.exchange.row_wire`: what is not rounded is bit-identical; zero, NaN and infinity stay."""
    g = torch.Generator().manual_seed(1)
    rows = torch.randn(4000, 10, generator=g) * 10.0 ** torch.randint(-37, 37, (4000, 1), generator=g)
    needle = torch.tensor([[1.0, 0.99999994, 1.0], [1e4, 99.0, 1.0], [0.0, 0.0, 0.0]])
    rows[:3, 2:5], rows[3, 5:9] = needle, 0.0
    rows[4, 6], rows[5, 7] = torch.inf, torch.nan
    parts = dict(zip(GEOMETRY, rows.split([2, 3, 1, 3, 1], dim=1), strict=True))
    columns = {"view_ids": torch.zeros(4000, dtype=torch.int32), **parts}
    wire = wire_of(columns, half=True)
    # A view, 12 bytes that are not rounded, and 7 + 3 + 7 of float16 and exponents, in whole words.
    assert wire.row_words == 1 + 3 + 5 and wire.gradient_words == -(-(2 * 10 + 5) // 4)
    there, place = WireSegments((0, LOCAL), (4000, 0), 1), torch.arange(4000, dtype=torch.int32).expand(2, -1).clone()
    place[1] = -1
    memory = torch.zeros(4000 * wire.row_words, dtype=torch.int32)
    wire.pack(ColumnRows(columns), place, memory, there)
    received = wire.unpack(memory, there, torch.tensor([4000, 0]), 1).columns
    back = torch.cat([received[name] for name in GEOMETRY], dim=1)
    assert torch.equal(back[:, :2], rows[:, :2]) and torch.equal(back[:, 9], rows[:, 9])
    torch.testing.assert_close(back[6:, 5], rows[6:, 5], rtol=UNIT, atol=0)
    size = rows[6:, 6:9].abs().amax(1, keepdim=True)
    assert ((back[6:, 6:9] - rows[6:, 6:9]).abs() <= UNIT * rows[6:, 6:9].abs() + size * 2.0**-38).all()
    assert (back[3, 5:9] == 0).all() and back[4, 6] == torch.inf and back[5, 7].isnan()
    conics = back[:3, 2:5]
    assert (conics[:, 0] * conics[:, 2] - conics[:, 1] ** 2 >= 0).all(), "however long, an ellipse"
    torch.testing.assert_close(conics, needle, rtol=4 * UNIT, atol=0)
    wire.pack_gradients(rows, torch.tensor([4000, 0]), memory, there)
    sums = wire.collect(place, torch.tensor([4000]), memory, there, rows[:0])
    torch.testing.assert_close(sums[6:, 9], rows[6:, 9], rtol=UNIT, atol=0)
    torch.testing.assert_close(sums[6:, 5], rows[6:, 5], rtol=UNIT, atol=0)
