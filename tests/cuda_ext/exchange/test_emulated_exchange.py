"""The CUDA kernels that exchange rows, run on a CPU (`emulated`): the reference's results, bit for bit."""

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from cuda_ext.ops.exchange import row_exchange, row_wire
from cuda_ext.ops.exchange.row_layout import GAUSSIAN_ROWS, RowLayout
from cuda_ext.ops.exchange.row_wire import gaussian_gradients, gradient_words, row_words
from ns_multigpu.primitives.convexes.kernels import CONVEX_ROWS
from ns_multigpu.primitives.surfels.kernels import SURFEL_ROWS
from tests.cuda_ext.emulated import EXCHANGE, compiled
from tests.cuda_ext.exchange.test_row_exchange import Rows, addresses, bands, make_rows, numbers
from tests.cuda_ext.exchange.test_row_wire import Layout, gradients, splats

_WIDTHS, _POINTERS = ctypes.c_int32 * 6, ctypes.c_void_p * 6
LAYOUTS = {"3dgs": GAUSSIAN_ROWS, "2dgs": SURFEL_ROWS, "convex": CONVEX_ROWS}
NOTHING = 7  # what no kernel writes


class _Rows(ctypes.Structure):
    """`PackRows` of `row_exchange.h`."""

    _fields_ = (
        ("widths", _WIDTHS), ("columns", _POINTERS), ("radii", ctypes.c_void_p), ("view_ids", ctypes.c_void_p),
        ("count", ctypes.c_int32),
    )  # fmt: skip


class _Unpacked(ctypes.Structure):
    """`UnpackedRows` of `row_exchange.h`."""

    _fields_ = (
        ("widths", _WIDTHS), ("columns", _POINTERS),
        *((name, ctypes.c_void_p) for name in ("radii", "view_ids", "owners", "slots")),
    )  # fmt: skip


class _Segments(ctypes.Structure):
    """`WireSegments` of `row_wire.h`."""

    _fields_ = (
        ("starts", ctypes.c_int64 * 128), ("capacities", ctypes.c_int32 * 128), ("ranks", ctypes.c_int32),
        ("rank", ctypes.c_int32), ("half", ctypes.c_bool),
    )  # fmt: skip


class _Returned(ctypes.Structure):
    """`Returned` of `row_columns.h`."""

    _fields_ = (("floats", ctypes.c_int32), ("places", ctypes.c_void_p), ("count", ctypes.c_int32))


def segments(starts: list[int], capacities: list[int], rank: int, half: bool) -> _Segments:
    return _Segments((ctypes.c_int64 * 128)(*starts), (ctypes.c_int32 * 128)(*capacities), len(starts), rank, half)


class Kernels:
    """The functions of `cuda_ext.reference.row_exchange` and `row_wire`, by the CUDA kernels."""

    HALF_ROW, half_gradient_words = row_wire.composed.HALF_ROW, staticmethod(row_wire.composed.half_gradient_words)
    route_lines = staticmethod(row_exchange.composed.route_lines)

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library

    def _run(self, name: str, *arguments: Any) -> None:
        given = [ctypes.c_void_p(x.data_ptr()) if isinstance(x, Tensor) else x for x in arguments]
        passed = [ctypes.byref(x) if isinstance(x, (ctypes.Structure, ctypes.Array)) else x for x in given]
        assert getattr(self._library, name)(*passed) == 0, "an unknown layout"

    def _packed(self, columns: list[Tensor], radii: Tensor, view_ids: Tensor) -> _Rows:
        self._kept = [column.contiguous() for column in columns]
        widths = [1 if column.dim() == 1 else column.shape[1] for column in columns]
        pointers = _POINTERS(*(x.data_ptr() for x in self._kept))
        return _Rows(_WIDTHS(*widths), pointers, radii.data_ptr(), view_ids.data_ptr(), len(radii))

    def _unpacked(self, lines: int, widths: Sequence[int]) -> tuple[_Unpacked, tuple[Any, ...]]:
        columns = [torch.full((lines, width) if width > 1 else (lines,), float("nan")) for width in widths]
        rest = [torch.full((lines, *shape), NOTHING, dtype=torch.int32) for shape in ((2,), (), (), ())]
        pointers = _POINTERS(*(x.data_ptr() for x in columns))
        return _Unpacked(_WIDTHS(*widths), pointers, *(x.data_ptr() for x in rest)), (columns, *rest)

    def pack(self, columns: Any, radii: Tensor, view_ids: Tensor, place: Tensor, to: Tensor, capacity: int) -> None:
        self._run("pack", self._packed(columns, radii, view_ids), place, to, len(place), capacity)

    def unpack(self, records: Tensor, counts: Tensor, views: int, widths: Sequence[int]) -> tuple[Any, ...]:
        ranks, capacity = records.shape[:2]
        rows, found = self._unpacked(ranks * capacity, widths)
        self._run("unpack", records, counts, ranks, capacity, views, rows)
        return found

    def pack_wire(
        self, columns: Any, radii: Tensor, view_ids: Tensor, place: Tensor, wire: Tensor, starts: Any, capacities: Any,
        rank: int, half: bool, slots: bool,
    ) -> None:  # fmt: skip
        to = segments(starts, capacities, rank, half)
        self._run("pack_wire", self._packed(columns, radii, view_ids), place, to, slots, wire)

    def unpack_wire(
        self, wire: Tensor, starts: Any, capacities: Any, counts: Tensor, rank: int, half: bool, slots: bool,
        views: int, widths: Sequence[int],
    ) -> tuple[Any, ...]:  # fmt: skip
        rows, found = self._unpacked(sum(capacities), widths)
        self._run("unpack_wire", wire, segments(starts, capacities, rank, half), counts, slots, views, rows)
        return found

    def keep_rows(
        self, columns: Any, radii: Tensor, view_ids: Tensor, place: Tensor, to_columns: Any, to_radii: Tensor,
        to_view_ids: Tensor, to_slots: Tensor, start: int, capacity: int, slots: bool,
    ) -> None:  # fmt: skip
        given = self._packed(columns, radii, view_ids)
        pointers = _POINTERS(*(x.data_ptr() for x in to_columns))
        to = _Unpacked(given.widths, pointers, to_radii.data_ptr(), to_view_ids.data_ptr(), None, to_slots.data_ptr())
        self._run("keep_rows", given, place, to, ctypes.c_int64(start), capacity, slots)

    def pack_gradients(
        self, records: Tensor, counts: Tensor, wire: Tensor, starts: Any, capacities: Any, rank: int, half: bool,
        returned: list[int],
    ) -> None:  # fmt: skip
        places = torch.tensor(returned)
        which = _Returned(records.shape[1], places.data_ptr(), len(returned))
        self._run("pack_gradients", which, records, counts, segments(starts, capacities, rank, half), wire)

    def collect_wire(
        self, place: Tensor, count: Tensor, wire: Tensor, starts: Any, capacities: Any, own: Tensor, rank: int,
        half: bool, returned: list[int],
    ) -> Tensor:  # fmt: skip
        places, records = torch.tensor(returned), torch.full((place.shape[1], own.shape[1]), float("nan"))
        which = _Returned(own.shape[1], places.data_ptr(), len(returned))
        come = segments(starts, capacities, rank, half)
        self._run("collect_wire", which, place, count, wire, come, own.contiguous(), place.shape[1], records)
        return records


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Kernels:
    return Kernels(compiled(tmp_path_factory.mktemp("emulated"), EXCHANGE, "exchange.cpp"))


@contextmanager
def run_by(kernels: Kernels) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_exchange, "composed", kernels)
        patch.setattr(row_wire, "composed", kernels)
        yield


def rows_of(layout: RowLayout, real: int, padding: int) -> tuple[Any, Rows]:
    """Return rows of a layout, and those of 3D Gaussians with the same means, radii and views."""
    like, g = splats(make_rows(real, padding)), torch.Generator().manual_seed(6)
    named = {
        name: getattr(like, name, torch.randn(len(like), *((width,) if width else ()), generator=g))
        for name, width in layout.widths.items()
    }
    points = torch.arange(len(like), dtype=torch.int32)
    return layout.rows(like.view_ids, points, like.count, radii=like.radii, **named), like


def assert_same_bits(found: Any, expected: Any) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype and torch.equal(*(x.contiguous().view(torch.int32) for x in (one, other)))


def through_memory(layout: RowLayout, real: int, padding: int, ranks: int) -> list[Tensor]:
    rows, like = rows_of(layout, real, padding)
    place, counts = like.route(numbers(bands(ranks, 2), 2), ranks)
    there = [torch.full((1, 90, layout.record_floats), float(NOTHING)) for _ in range(ranks)]
    row_exchange.pack(rows, place, addresses(there, 0), 80, layout)
    assert real == 0 or int(counts.max()) > 80, "some exceed the capacity"
    return [*there, *row_exchange.unpack(torch.cat(there)[:, :80].contiguous(), counts, 2, layout)]


def on_the_wire(
    layout: RowLayout, real: int, padding: int, ranks: int, half: bool, slots: bool, returned: Sequence[int]
) -> list[Tensor]:  # fmt: skip
    rows, like = rows_of(layout, real, padding)
    place, counts = like.route(numbers(bands(ranks, 2), 2), ranks)
    capacities, rank = [270 // (1 + k) for k in range(ranks)], ranks - 1
    there = Layout.of(capacities, row_words(half=False, slots=slots, layout=layout))
    wire = torch.full((there.words,), NOTHING, dtype=torch.int32)
    starts = [*there.starts[:-1], row_wire.LOCAL] if slots else there.starts
    where = (starts, capacities)
    row_wire.pack_wire(rows, place, wire, *where, rank, half=half, slots=slots, layout=layout)
    sent = wire.clone()
    received = row_wire.unpack_wire(wire, *where, counts, rank, 2, half=half, slots=slots, layout=layout)
    if slots:
        received.slots[sum(capacities[:-1]) :], received.radii[sum(capacities[:-1]) :] = 0, 0  # not yet written
        for column in (received.view_ids, *layout.columns_of(received)):
            column[sum(capacities[:-1]) :] = 0
        row_wire.keep_rows(rows, place[rank], received, sum(capacities[:-1]), capacities[-1], slots=True, layout=layout)
    records = gradients(sum(capacities), 3).repeat(1, layout.record_floats // 16)
    back = Layout.of(capacities, gradient_words(returned, half=half))
    wire = torch.full((back.words,), NOTHING, dtype=torch.int32)
    where = (back.starts, capacities)
    row_wire.pack_gradients(records, counts, wire, *where, rank, half=half, returned=returned)
    own = records[sum(capacities[:-1]) :]
    collected = row_wire.collect_wire(place, like.count, wire, *where, own, rank, half=half, returned=returned)
    return [sent, *received, wire, collected]


@pytest.mark.parametrize(("real", "padding", "ranks"), [(700, 40, 3), (0, 5, 2), (300, 0, 1)])
@pytest.mark.parametrize("name", LAYOUTS)
def test_records_are_the_references(name: str, real: int, padding: int, ranks: int, kernels: Kernels) -> None:
    expected = through_memory(LAYOUTS[name], real, padding, ranks)
    with run_by(kernels):
        assert_same_bits(through_memory(LAYOUTS[name], real, padding, ranks), expected)


@pytest.mark.parametrize("slots", [False, True])
@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("name", [*LAYOUTS, "half", "absolute", "half, depth", "half, all"])
def test_words_are_the_references(name: str, ranks: int, slots: bool, kernels: Kernels) -> None:
    layout, half = LAYOUTS.get(name, GAUSSIAN_ROWS), name.startswith("half")
    returned = gaussian_gradients(absgrad="abs" in name or "all" in name, depth="depth" in name or "all" in name)
    given = (layout, 400, 40, ranks, half, slots, returned if layout is GAUSSIAN_ROWS else range(layout.numbers))
    expected = on_the_wire(*given)
    with run_by(kernels):
        assert_same_bits(on_the_wire(*given), expected)


def test_unknown_columns_are_refused(kernels: Kernels) -> None:
    with run_by(kernels), pytest.raises(AssertionError, match="unknown layout"):
        through_memory(RowLayout({"means2d": 2, "opacities": 0, "depths": 0}), 300, 0, 1)
    with run_by(kernels), pytest.raises(AssertionError, match="unknown layout"):
        on_the_wire(GAUSSIAN_ROWS, 400, 0, 1, False, False, range(8))
