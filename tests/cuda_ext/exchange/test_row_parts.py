"""Rows that are routed and packed in parts are those that are made at once, bit for bit."""

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from cuda_ext.ops.exchange.row_exchange import pack, route_lines
from tests.cuda_ext.exchange.test_row_exchange import OPS, Rows, addresses, bands, make_rows, numbers
from tests.lib.ranks import DEVICES

pytestmark = pytest.mark.usefixtures("native")


def bits(tensor: Tensor) -> Tensor:
    return tensor.view(torch.int32) if tensor.dtype == torch.float32 else tensor


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
    pack(rows, place, addresses(whole, 0), capacity)
    for first, end in pairwise([0, *stops, len(rows)]):
        before = [segment.clone() for segment in parts]
        pack(rows, place, addresses(parts, 0), capacity, first, end)
        there = (place[:, first:end] >= 0) & (place[:, first:end] < capacity)
        for was, now, lines in zip(before, parts, there, strict=True):
            assert int((bits(was) != bits(now)).any(-1).sum()) == int(lines.sum())
    assert all(torch.equal(bits(a), bits(b)) for a, b in zip(parts, whole, strict=True))


@pytest.mark.parametrize("device", DEVICES)
def test_opcheck(device: str) -> None:
    rows, patches = make_rows(20, 4).to(device), numbers(bands(2, 2), 2)
    place, counts = rows.route(patches, 2)
    inputs = (rows.view_ids, rows.count, rows.means2d, rows.radii, patches, 2, 8, 20, place, counts)
    torch.library.opcheck(OPS.route_lines.default, inputs)
    segments = [torch.zeros(1, 24, 16, device=device) for _ in range(2)]
    torch.library.opcheck(OPS.pack.default, (*rows.packed(), place, addresses(segments, 0), 24, 8, 20))
