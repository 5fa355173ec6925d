"""The sort over ranks on the GPU, at sizes that CPUs take long for, in a CUDA graph. The rest: test_peer_sort.py."""

import pytest
import torch
from torch import Tensor

from cuda_ext import band_lists, merge_level, sort_pairs
from cuda_ext.ops.sort import peer_sort_composed as composed
from tests.cuda_ext.graphs import captured
from tests.cuda_ext.intersect.test_peer_sort import check_merge, keys_of, random_pairs
from tests.cuda_ext.peer_sorts import bands_of, expected_lists, received, share_out, view_sizes
from tests.cuda_ext.splats import make_splats

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("native")]


@pytest.mark.parametrize("lengths", [(3_000_000, 2_345_678), (1, 4_000_000), (4_000_000, 0)])
@pytest.mark.parametrize("span", [1, 1000, 2**62])
def test_merge_of_millions(lengths: tuple[int, int], span: int) -> None:
    check_merge("cuda", 2, 3, lengths, span, seed=5)


def test_sort_of_millions() -> None:
    for span in (3, 2**62):
        keys, values = (x.cuda() for x in random_pairs(5_000_000, span, seed=6))
        count = torch.tensor([4_999_999], device="cuda")
        expected = tuple(torch.empty_like(x) for x in (keys, values))
        composed.sort_pairs(keys.clone(), values, count, 0, 64, *expected)
        for got, wanted in zip(sort_pairs(keys, values, count), expected, strict=True):
            assert torch.equal(got, wanted)


def test_lists_of_a_large_image() -> None:
    splats = make_splats(40_000, 1000, 700, sizes=(0.3, 12.0), views=2, seed=7)
    shards = share_out(splats, [k % 3 for k in range(40_000)])
    key_counts = [int(keys_of(s, 0, 0, "cuda")[2]) for s in shards]
    assert sum(key_counts) > 200_000
    keys, values, _ = zip(*(keys_of(s, o, key_counts[o], "cuda") for o, s in enumerate(shards)), strict=True)
    keys, order = torch.sort(torch.cat(keys), stable=True)
    values = torch.cat(values)[order]
    where, segment = received(shards, 1)
    tiles, patches = bands_of(view_sizes(splats), [(1, 3, 40), (0, 0, 44), (1, 2, 3)], 16)
    on, count = [s.to("cuda") for s in shards], torch.tensor([len(keys)], device="cuda")
    expected = expected_lists(on, patches, where.cuda(), segment, 2 * len(keys))
    at = [keys.data_ptr()], [values.data_ptr()]
    for got, wanted in zip(band_lists(*at, count, tiles, where.cuda(), segment, 2 * len(keys)), expected, strict=True):
        assert torch.equal(got, wanted)


def test_a_cuda_graph_holds_them() -> None:
    splats = make_splats(2000, 200, 150, seed=13).to("cuda")
    where = torch.arange(2000, dtype=torch.int32, device="cuda")[None]

    def step() -> tuple[Tensor, ...]:
        keys, values, count = keys_of(splats, 0, 50_000, "cuda")
        keys, values = sort_pairs(keys, values, count, 32, 48)
        counts = torch.cat([count, count * 0])
        out = torch.empty_like(keys), torch.empty_like(values)
        at = [keys.data_ptr()] * 2, [values.data_ptr()] * 2  # the right run has nothing
        merged = [merge_level(*at, counts, (0, 1), (1, 2), rank, out) for rank in range(2)]
        lists = band_lists([keys.data_ptr()], [values.data_ptr()], count, [26, 100], where, 2000, 50_000)
        return keys, values, *out, *merged, *lists

    graph, kept = captured(step)
    listed = set()
    for shift in (0.0, 13.0, 1000.0):
        splats.means2d.add_(shift)
        graph.replay()
        number = int(kept[4] + kept[5])
        listed.add(number)
        expected = step()
        for k, (got, wanted) in enumerate(zip(kept, expected, strict=True)):
            end = {0: number, 1: number, 2: int(kept[5]), 3: int(kept[5])}.get(k)
            assert torch.equal(got[:end], wanted[:end]), k
    assert len(listed) == 3 and 0 in listed
