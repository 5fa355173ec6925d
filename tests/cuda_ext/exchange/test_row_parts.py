"""Rows that are made, routed and packed in parts are those that are made at once, bit for bit."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from cuda_ext.ops.exchange.row_exchange import pack, route_lines
from cuda_ext.ops.optim.fused import SplatRows, splat_forward
from cuda_ext.ops.optim.lazy_adam import LazyAdam
from tests.cuda_ext.exchange.test_row_exchange import OPS, Rows, addresses, bands, make_rows, numbers
from tests.cuda_ext.fused_steps import make_model
from tests.cuda_ext.lazy_steps import StepRun, fresh_model

pytestmark = pytest.mark.usefixtures("native")
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def bits(tensor: Tensor) -> Tensor:
    return tensor.view(torch.int32) if tensor.dtype == torch.float32 else tensor


def assert_same(found: SplatRows, expected: SplatRows) -> None:
    for name, a, b in zip(SplatRows._fields, found, expected, strict=True):
        assert torch.equal(bits(a), bits(b)), name


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize("stops", [[160], [0, 32, 33, 33, 250], [700], [699]])
def test_projected_in_parts(device: str, lazy: bool, stops: list[int]) -> None:
    missed: dict[str, Any] = {}
    if lazy:
        run = StepRun(fresh_model(300).to(device, torch.float32), True, 2)
        for step in range(5):
            run.step(step)
        model = run.model
        assert isinstance(run.lazy, LazyAdam)
        missed = {"exp_avgs": model.exp_avgs, "exp_avg_sqs": model.exp_avg_sqs, "lazy": run.lazy}
    else:
        model = make_model(spread=1.5).to(device)
    expected = model.forward(700, 2, **missed)
    seen: list[tuple[int, int]] = []

    def reached(rows: SplatRows, first: int, end: int) -> None:
        seen.append((first, end))
        assert torch.equal(rows.count, expected.count)
        for name, a, b in zip(SplatRows._fields, rows, expected, strict=True):
            assert name == "count" or torch.equal(bits(a[:end]), bits(b[:end])), name

    found = model.forward(700, 2, **missed, stops=stops, reached=reached)
    assert seen == list(pairwise([0, *stops])) and 200 < int(found.count) < 600
    assert_same(found, expected)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("capacity", [100, 0])
def test_exceeded_and_zero_capacity(device: str, capacity: int) -> None:
    model = make_model().to(device)
    parts: list[int] = []
    found = model.forward(capacity, stops=[capacity // 2, capacity], reached=lambda *part: parts.append(part[2]))
    assert_same(found, model.forward(capacity))
    assert int(found.count) > 100 and parts == [capacity // 2, capacity]


def in_parts(rows: Rows, patches: list[int], ranks: int, stops: list[int]) -> tuple[Tensor, Tensor]:
    device = rows.means2d.device
    place = torch.full((ranks, len(rows)), 77, dtype=torch.int32, device=device)
    counts = torch.full((ranks,), 99, device=device)
    for first, end in pairwise([0, *stops, len(rows)]):
        route_lines(rows.view_ids, rows.count, rows.means2d, rows.radii, patches, first, end, place, counts)
        assert bool((place[:, end:] == 77).all())
    return place, counts


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("ranks", [1, 3, 32])
@pytest.mark.parametrize(
    ("real", "padding", "stops"),
    [(900, 60, [320, 640]), (40, 30, [0, 0, 1, 39, 41, 70]), (0, 9, [4]), (5000, 700, [1024, 1025, 4999, 5700])],
)
def test_routed_and_packed_in_parts(device: str, ranks: int, real: int, padding: int, stops: list[int]) -> None:
    rows, patches = make_rows(real, padding).to(device), numbers(bands(ranks, 2), 2)
    place, counts = rows.route(patches, ranks)
    found = in_parts(rows, patches, ranks, stops)
    assert torch.equal(found[0], place) and torch.equal(found[1], counts)
    assert real < 900 or int(counts.sum()) > real // 3
    capacity = max(1, real // 3)
    whole, parts = ([torch.full((1, capacity, 16), 7.0, device=device) for _ in range(ranks)] for _ in range(2))
    pack(*rows.packed(), place, addresses(whole, 0), capacity)
    for first, end in pairwise([0, *stops, len(rows)]):
        before = [segment.clone() for segment in parts]
        pack(*rows.packed(), place, addresses(parts, 0), capacity, first, end)
        there = (place[:, first:end] >= 0) & (place[:, first:end] < capacity)
        for was, now, lines in zip(before, parts, there, strict=True):
            assert int((bits(was) != bits(now)).any(-1).sum()) == int(lines.sum())
    assert all(torch.equal(bits(a), bits(b)) for a, b in zip(parts, whole, strict=True))


def test_wrong_lines_are_named() -> None:
    rows = make_rows(10, 2)
    place, counts = rows.route([0, 0, 0, 0, 50, 70], 1)
    given = (rows.view_ids, rows.count, rows.means2d, rows.radii, [])
    for first, end in ((-1, 5), (6, 5), (0, 13)):
        with pytest.raises(ValueError, match=f"lines {first} to {end}"):
            route_lines(*given, first, end, place, counts)
        with pytest.raises(ValueError, match=f"lines {first} to {end}"):
            pack(*rows.packed(), place, torch.zeros(1, dtype=torch.int64), 5, first, end)
    with pytest.raises(ValueError, match="place"):
        route_lines(*given, 0, 12, place[:, 1:], counts)
    model = make_model(20)
    for stops in ([41], [-1, 5], [5, 4]):
        with pytest.raises(ValueError, match="stops must ascend"):
            splat_forward(
                *model.params, model.viewmats, model.Ks, model.sizes, 3, 40, stops=stops, reached=lambda *_: None
            )


@pytest.mark.parametrize("device", DEVICES)
def test_opcheck(device: str) -> None:
    rows, patches = make_rows(20, 4).to(device), numbers(bands(2, 2), 2)
    place, counts = rows.route(patches, 2)
    inputs = (rows.view_ids, rows.count, rows.means2d, rows.radii, patches, 2, 8, 20, place, counts)
    torch.library.opcheck(OPS.route_lines.default, inputs)
    segments = [torch.zeros(1, 24, 16, device=device) for _ in range(2)]
    torch.library.opcheck(OPS.pack.default, (*rows.packed(), place, addresses(segments, 0), 24, 8, 20))
    model = make_model(20).to(device)
    splat = (*model.params, model.viewmats, model.Ks, model.sizes, 3, 0.3, 0.01, 1e9, True, False, 60)
    put_off = ([], [], None, None, None)
    some = ("test_schema", "test_faketensor")
    torch.library.opcheck(OPS.splat_begin.default, (*splat, *put_off), test_utils=some)
    made = [torch.zeros_like(t) for t in OPS.splat_forward(*splat)]
    torch.library.opcheck(OPS.splat_lines.default, (*splat, *put_off, made, 5, 40), test_utils=some)
