"""The sort over ranks, operator by operator: on CPU the twins, on a GPU the kernels; against torch and `intersect`."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from cuda_ext import band_lists, intersect_keys, merge_level, publish_count, sort_pairs
from cuda_ext.ops.sort.peer_sort import LARGEST_KEY, OWNER_SHIFT
from tests.cuda_ext.peer_sorts import (
    bands_of,
    expected_lists,
    fragments_of,
    padded,
    random_bands,
    received,
    share_out,
    view_sizes,
)
from tests.cuda_ext.splats import Splats, make_splats
from tests.lib.ranks import DEVICES

pytestmark = pytest.mark.usefixtures("native")
TILE = 2816
"""Elements that a block of the merge kernel takes."""


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    yield request.param


def random_pairs(count: int, span: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    keys = torch.randint(-(span // 2), span - span // 2, (count,), generator=g)
    return keys, torch.arange(count, dtype=torch.int32)


@pytest.mark.parametrize("count", [0, 1, 700, 1000, 5000])
@pytest.mark.parametrize("span", [1, 5, 2**62])
def test_sort_takes_the_first_pairs_and_keeps_their_order(device: str, count: int, span: int) -> None:
    keys, values = random_pairs(1000, span)
    if span > 5:
        keys[3], keys[4], keys[5] = LARGEST_KEY, -LARGEST_KEY - 1, LARGEST_KEY
    number = min(count, 1000)
    expected, order = torch.sort(keys[:number], stable=True)
    num_valid = torch.tensor([count], device=device)
    got_keys, got_values = (x.cpu() for x in sort_pairs(keys.to(device), values.to(device), num_valid))
    assert torch.equal(got_keys[:number], expected) and bool((got_keys[number:] == LARGEST_KEY).all())
    assert torch.equal(got_values[:number], values[order])


@pytest.mark.parametrize(("begin", "end"), [(0, 10), (8, 24), (32, 48), (0, 63), (40, 64)])
def test_sort_by_some_bits(device: str, begin: int, end: int) -> None:
    keys, values = random_pairs(3000, 2**62, seed=1)
    digits = keys >> begin
    if end < 64:
        digits = digits & ((1 << (end - begin)) - 1)
    order = torch.sort(digits[:2900], stable=True).indices
    out = (torch.empty(3000, dtype=torch.int64, device=device), torch.empty(3000, dtype=torch.int32, device=device))
    num_valid = torch.tensor([2900], device=device)
    got = sort_pairs(keys.to(device), values.to(device), num_valid, begin, end, out)
    assert got[0].data_ptr() == out[0].data_ptr() and got[1].data_ptr() == out[1].data_ptr()
    assert torch.equal(out[0][:2900].cpu(), keys[order]) and torch.equal(out[1][:2900].cpu(), values[order])


def test_sort_of_nothing(device: str) -> None:
    keys, values = random_pairs(0, 5)
    got = sort_pairs(keys.to(device), values.to(device), torch.zeros(1, dtype=torch.int64, device=device))
    assert got[0].shape == got[1].shape == (0,)


def test_counts_are_published(device: str) -> None:
    tables = [torch.full((4,), -5, device=device) for _ in range(3)]
    for rank, count in enumerate((7, 0, 100)):
        num_valid = torch.tensor([count], device=device)
        publish_count(num_valid, [t.data_ptr() + 8 * rank for t in tables], 50)
    assert [t.tolist() for t in tables] == [[7, 0, 50, -5]] * 3


def check_merge(device: str, left: int, right: int, lengths: tuple[int, int], span: int, seed: int) -> None:
    """A merge of runs on `left` and on `right` ranks; two other ranks stand around them."""
    ranks = left + right + 2
    counts = torch.zeros(ranks, dtype=torch.int64)
    g = torch.Generator().manual_seed(seed)
    runs, keys_at, values_at, alive = [], [0], [0], []
    for first, size, length in ((1, left, lengths[0]), (1 + left, right, lengths[1])):
        # What the ranks started with, unevenly, decides the runs' lengths and nothing else.
        cuts = torch.randint(0, length + 1, (size - 1,), generator=g).sort().values.tolist()
        for k, (a, b) in enumerate(zip([0, *cuts], [*cuts, length], strict=True)):
            counts[first + k] = b - a
        keys, values = random_pairs(length, span, seed + first)
        keys = keys.sort().values
        values = values + 1_000_000_000 * (first > 1)
        runs.append((keys, values))
        for a, b in fragments_of(length, size):
            piece = keys[a:b].to(device), values[a:b].to(device)
            alive.append(piece)
            keys_at.append(piece[0].data_ptr())
            values_at.append(piece[1].data_ptr())
    keys_at.append(0)
    values_at.append(0)
    keys, order = torch.sort(torch.cat([k for k, _ in runs]), stable=True)
    values = torch.cat([v for _, v in runs])[order]
    longest = -(-len(keys) // (left + right))
    for rank, (a, b) in enumerate(fragments_of(len(keys), left + right), 1):
        for capacity in (longest, longest + 3000):
            out = (
                torch.full((capacity,), -9, dtype=torch.int64, device=device),
                torch.full((capacity,), -9, dtype=torch.int32, device=device),
            )
            runs_at = (1, 1 + left), (1 + left, 1 + left + right)
            count = merge_level(keys_at, values_at, counts.to(device), *runs_at, rank, out)
            assert count.tolist() == [b - a]
            assert torch.equal(out[0].cpu(), padded(keys[a:b], capacity, -9))
            assert torch.equal(out[1].cpu(), padded(values[a:b], capacity, -9))


@pytest.mark.parametrize(
    "lengths",
    [(0, 0), (0, 1), (1, 0), (7, 9), (0, 500), (500, 0), (TILE, TILE), (3 * TILE + 1, 5), (5, 2 * TILE), (9000, 9001)],
)
@pytest.mark.parametrize(("left", "right"), [(1, 1), (2, 1), (3, 4)])
@pytest.mark.parametrize("span", [1, 40, 2**62])
def test_merge_of_two_runs(device: str, left: int, right: int, lengths: tuple[int, int], span: int) -> None:
    check_merge(device, left, right, lengths, span, seed=left + right)


def test_merge_of_runs_that_do_not_overlap(device: str) -> None:
    low, high = torch.arange(6000), torch.arange(6000) + 10_000
    values = torch.arange(6000, dtype=torch.int32)
    counts = torch.tensor([6000, 6000], device=device)
    for left, right in ((low, high), (high, low)):
        fragments = [(k.to(device), (values + 6000 * n).to(device)) for n, k in enumerate((left, right))]
        for rank, first in enumerate((low, high)):
            out = torch.zeros(6000, dtype=torch.int64, device=device), torch.zeros_like(fragments[0][1])
            at = ([k.data_ptr() for k, _ in fragments], [v.data_ptr() for _, v in fragments])
            merge_level(*at, counts, (0, 1), (1, 2), rank, out)
            assert torch.equal(out[0].cpu(), first)


def test_fragment_is_cut_off_at_its_capacity(device: str) -> None:
    keys = torch.arange(100, device=device)
    out = torch.zeros(30, dtype=torch.int64, device=device), torch.zeros(30, dtype=torch.int32, device=device)
    values = torch.arange(100, dtype=torch.int32, device=device)
    counts = torch.tensor([100, 0], device=device)
    at = [keys.data_ptr()] * 2, [values.data_ptr()] * 2
    assert merge_level(*at, counts, (0, 1), (1, 2), 1, out).tolist() == [30]
    assert out[0].tolist() == list(range(50, 80))


def keys_of(splats: Splats, owner: int, capacity: int, device: str = "cpu") -> tuple[Tensor, Tensor, Tensor]:
    on = splats.to(device)
    rows = (on.means2d, on.conics, on.row_opacities, on.radii, on.depths, on.view_ids)
    return intersect_keys(*rows, view_sizes(splats), splats.tile_size, owner, capacity)


def lists_of(splats: Splats, device: str) -> tuple[Tensor, Tensor]:
    """Return `intersect`'s lists, on the device: CPU and GPU round differently at the very edge of a splat."""
    return tuple(x.cpu() for x in splats.to(device).intersect())  # type: ignore[return-value]


SCENES = {
    "mixed": make_splats(600, 130, 75, sizes=(0.3, 9.0), views=3),
    "needles": make_splats(300, 130, 75, sizes=(0.01, 30.0), seed=1),
    "huge": make_splats(40, 130, 75, sizes=(50.0, 400.0), views=2, seed=2),
    "other tiles": replace(make_splats(300, 60, 41, sizes=(0.3, 9.0), views=2, seed=3), tile_size=5),
    "none": make_splats(0, 60, 41),
}


@pytest.mark.parametrize("name", SCENES)
def test_sorted_keys_are_the_lists_of_whole_views(device: str, name: str) -> None:
    splats = SCENES[name]
    depths = (splats.depths * 20).round() - 25  # many ties, and both signs
    splats = replace(splats, depths=depths)
    offsets, rows = lists_of(splats, device)
    capacity = len(rows) + 77
    for owner in (0, 9):
        keys, values, count = keys_of(splats, owner, capacity, device)
        assert count.tolist() == [len(rows)]
        assert bool((keys[len(rows) :] == LARGEST_KEY).all()) and bool((values[len(rows) :] == -1).all())
        by_depth = torch.stack([keys[: len(rows)].cpu() & 0xFFFFFFFF, values[: len(rows)].cpu() & 0x0FFFFFFF])
        steps = by_depth.diff()
        assert bool(((steps[0] > 0) | ((steps[0] == 0) & (steps[1] >= 0))).all())
        for begin in (0, 32):
            sorted_keys, sorted_values = sort_pairs(keys.clone(), values, count, begin)
            tiles = (sorted_keys[: len(rows)] >> 32).cpu()
            assert torch.equal(tiles, torch.repeat_interleave(torch.arange(len(offsets) - 1), offsets.diff().long()))
            got = sorted_values[: len(rows)].cpu().long() & 0xFFFFFFFF
            assert torch.equal(got & 0x0FFFFFFF, rows.long()) and bool((got >> OWNER_SHIFT == owner).all())
            assert bool((sorted_keys[: len(rows)].diff() >= 0).all())


def test_keys_beyond_the_capacity_are_the_farthest(device: str) -> None:
    splats = SCENES["mixed"]
    whole = keys_of(splats, 2, 100_000, device)
    listed = int(whole[2])
    for capacity in (0, 1, 500, listed - 1):
        keys, values, count = keys_of(splats, 2, capacity, device)
        assert count.tolist() == [listed] and len(keys) == len(values) == capacity
        assert torch.equal(keys & 0xFFFFFFFF, whole[0][:capacity] & 0xFFFFFFFF)


def check_bands(device: str, splats: Splats, ranks: int, seed: int) -> None:
    """List of random bands out of pieces on `ranks` ranks, where rows belong to 3 owners."""
    shards = share_out(splats, [k * 7 % 3 for k in range(len(splats.depths))])
    sizes = view_sizes(splats)
    keys, values, counts = zip(*(keys_of(s, owner, 50_000, device) for owner, s in enumerate(shards)), strict=True)
    num_valid = [int(count) for count in counts]
    keys, order = torch.sort(torch.cat([k[:n] for k, n in zip(keys, num_valid, strict=True)]), stable=True)
    values = torch.cat([v[:n] for v, n in zip(values, num_valid, strict=True)])[order]
    fragments = [(keys[a:b].clone(), values[a:b].clone()) for a, b in fragments_of(len(keys), ranks)]
    started = torch.zeros(ranks, dtype=torch.int64, device=device)
    started[seed % ranks] = len(keys)
    at = [k.data_ptr() for k, _ in fragments], [v.data_ptr() for _, v in fragments]
    where, segment = received(shards, seed)
    bands = [band for of_rank in random_bands(sizes, 6, splats.tile_size, seed) for band in of_rank]
    tiles, patches = bands_of(sizes, bands, splats.tile_size)
    on = [shard.to(device) for shard in shards]
    table = where.to(device)
    listed = int(expected_lists(on, patches, table, segment, 0)[2])
    assert listed > 100
    for capacity in (listed, listed + 1000):
        expected = expected_lists(on, patches, table, segment, capacity)
        for got, wanted in zip(band_lists(*at, started, tiles, table, segment, capacity), expected, strict=True):
            assert got.dtype == wanted.dtype and torch.equal(got, wanted)
    offsets, ids, count = expected_lists(on, patches, table, segment, listed)
    for capacity in (0, 1, listed // 2):
        got_offsets, got_ids, got_count = band_lists(*at, started, tiles, table, segment, capacity)
        assert torch.equal(got_count, count) and torch.equal(got_ids, ids[:capacity])
        assert torch.equal(got_offsets, offsets.clamp(max=capacity))


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("name", ["mixed", "other tiles"])
def test_lists_of_bands_are_those_of_patches(device: str, name: str, ranks: int) -> None:
    check_bands(device, SCENES[name], ranks, seed=ranks)


def test_bands_without_tiles_or_pairs(device: str) -> None:
    keys = torch.tensor([5 << 32, LARGEST_KEY], device=device)
    values = torch.tensor([3, -1], dtype=torch.int32, device=device)
    at, where = ([keys.data_ptr()], [values.data_ptr()]), torch.zeros((1, 4), dtype=torch.int32, device=device)
    one, none = (torch.tensor([n], device=device) for n in (1, 0))
    for bands, count, expected in (
        ([], one, ([0], [-1, -1], [0])),
        ([4, 4], one, ([0], [-1, -1], [0])),
        ([0, 5], one, ([0] * 6, [-1, -1], [0])),
        ([6, 8, 5, 6, 5, 5], one, ([0, 0, 0, 1], [0, -1], [1])),
        ([5, 6, 4, 7], one, ([0, 1, 1, 2, 2], [0, 0], [2])),
        ([0, 9], none, ([0] * 10, [-1, -1], [0])),
    ):
        got = band_lists(*at, count, bands, where, 10, 2)
        assert tuple(x.tolist() for x in got) == expected, bands


def test_rows_not_yet_received_are_kept_in_bounds(device: str) -> None:
    keys = torch.arange(4, device=device) << 32
    values = torch.tensor([0, 1 << OWNER_SHIFT, 3 | 1 << OWNER_SHIFT, -1], dtype=torch.int32, device=device)
    where = torch.tensor([[-1, 0, 0], [7, 99, 6]], dtype=torch.int32, device=device)
    count = torch.tensor([4], device=device)
    _, ids, _ = band_lists([keys.data_ptr()], [values.data_ptr()], count, [0, 4], where, 8, 4)
    assert ids.tolist() == [0, 15, 14, 14]


def test_opcheck(device: str) -> None:
    splats = make_splats(20, 40, 30).to(device)
    keys, values, count = keys_of(splats, 1, 100, device)  # makes sure that the operators are loaded
    rows = (splats.means2d, splats.conics, splats.row_opacities, splats.radii, splats.depths, splats.view_ids)
    out = torch.empty_like(keys), torch.empty_like(values)
    at = [keys.data_ptr()] * 2, [values.data_ptr()] * 2
    counts = torch.zeros(2, dtype=torch.int64, device=device)
    where = torch.zeros((2, 20), dtype=torch.int32, device=device)
    checks: list[tuple[Any, tuple[Any, ...]]] = [
        (torch.ops.ns_multigpu.intersect_keys, (*rows, [40, 30], 16, 1, 100)),
        (torch.ops.ns_multigpu.sort_pairs, (keys, values, count, 0, 64, *out)),
        (torch.ops.ns_multigpu.merge_level, (*at, counts, 0, 1, 2, 0, *out)),
        (torch.ops.ns_multigpu.band_lists, (*at, counts, [0, 3, 2, 5], where, 20, 64)),
    ]
    for op, arguments in checks:
        torch.library.opcheck(op.default, arguments, test_utils="test_schema")
