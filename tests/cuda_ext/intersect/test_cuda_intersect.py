"""`intersect` and `intersect_capacity` on the GPU: the CPU twin's lists, whatever the sizes."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.cuda_ext.graphs import check_replays
from tests.cuda_ext.intersect.test_intersect import (
    ODD_PATCHES,
    SCENES,
    at_capacity,
    lists_of,
    shown_rows,
    tile_rectangles,
)
from tests.cuda_ext.splats import Splats, make_splats

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("native")]


def on_gpu(splats: Splats) -> tuple[Tensor, Tensor]:
    offsets, rows = splats.to("cuda").intersect()
    assert offsets.dtype == rows.dtype == torch.int32 and offsets.is_cuda and rows.is_cuda
    return offsets.cpu(), rows.cpu()


def assert_same_lists(splats: Splats) -> None:
    """The twin's lists: the two round differently, so a pair in ten thousand at the very edge may differ."""
    tile_count = len(tile_rectangles(splats.patches, splats.tile_size))
    pairs = []
    for offsets, rows in (splats.intersect(), on_gpu(splats)):
        assert offsets.shape == (tile_count + 1,) and offsets[0] == 0 and offsets[-1] == len(rows)
        tiles = torch.repeat_interleave(torch.arange(tile_count), offsets.diff().long())
        depths, ids = splats.depths[rows.long()].double(), rows.long()
        same_tile = tiles.diff() == 0
        later = (depths.diff() > 0) | ((depths.diff() == 0) & (ids.diff() > 0))
        assert bool(later[same_tile].all())
        pairs.append(tiles * len(splats.depths) + ids)
    expected, got = (set(p.tolist()) for p in pairs)
    assert len(expected) > 10 and len(got) == len(pairs[1])
    assert len(expected ^ got) <= 1 + len(expected) // 10_000


@pytest.mark.parametrize("tile_size", [16, 5])
@pytest.mark.parametrize("name", SCENES)
def test_each_tile_lists_what_it_shows_by_depth(name: str, tile_size: int) -> None:
    splats = replace(SCENES[name], patches=ODD_PATCHES, tile_size=tile_size)
    lists = lists_of(*on_gpu(splats))
    tiles = tile_rectangles(ODD_PATCHES, tile_size)
    assert len(lists) == len(tiles)
    for tile, listed in zip(tiles, lists, strict=True):
        assert set(shown_rows(splats, tile)) <= set(listed), tile
        assert listed == sorted(set(listed), key=lambda r: (float(splats.depths[r]), r))
        assert all(splats.view_ids[r] == tile[0] for r in listed)
    assert_same_lists(splats)


def test_lists_of_a_large_image_are_the_twins() -> None:
    assert_same_lists(make_splats(100_000, 1000, 700, sizes=(0.3, 12.0), seed=5))


def test_more_tiles_than_16_bits_count() -> None:
    splats = replace(make_splats(20_000, 1200, 1000, sizes=(0.3, 12.0), seed=6), tile_size=4)
    assert len(tile_rectangles(splats.patches, 4)) > 2**16
    assert_same_lists(splats)


@pytest.mark.parametrize("width", [65_534, 65_535, 65_536])
def test_around_the_largest_16_bit_tile_id(width: int) -> None:
    splats = replace(make_splats(1000, width, 1, sizes=(0.3, 5.0), seed=7), tile_size=1)
    assert_same_lists(splats)


def test_more_patches_than_one_launch_uploads() -> None:
    splats = make_splats(5000, 300, 200, sizes=(0.3, 12.0), views=3, seed=8)
    corners = [(k % 3, k * 37 % 280, k * 53 % 170) for k in range(200)]
    patches = tuple(n for view, x, y in corners for n in (view, x, y, x + 20, y + 30))
    assert_same_lists(splats.with_patches(*patches))


def test_patches_in_any_order_of_views() -> None:
    splats = make_splats(3000, 100, 80, views=4, seed=9)
    assert_same_lists(splats.with_patches(2, 3, 4, 99, 80, 0, 0, 0, 50, 80, 3, 9, 9, 9, 50, 2, 0, 0, 17, 33))


def covering(count: int, width: int, height: int) -> Splats:
    """Splats that overlap every pixel of an image."""
    base = make_splats(count, width, height, opacities=(0.9, 0.9))
    return replace(
        base,
        means2d=torch.tensor([[width / 2, height / 2]]).repeat(count, 1),
        conics=torch.tensor([[1e-8, 0.0, 1e-8]]).repeat(count, 1),
        radii=torch.full((count, 2), 40_000, dtype=torch.int32),
    )


def test_splats_over_all_tiles_of_a_4k_image() -> None:
    few = make_splats(2000, 3840, 2160, sizes=(0.3, 9.0))
    splats = covering(40, 3840, 2160)
    offsets, rows = on_gpu(splats)
    tiles = 240 * 135
    assert torch.equal(offsets, torch.arange(tiles + 1, dtype=torch.int32) * 40)
    order = torch.sort(splats.depths, stable=True).indices.int()
    assert torch.equal(rows.view(tiles, 40), order.expand(tiles, 40))
    both = {k: torch.cat([getattr(few, k), getattr(splats, k)]) for k in vars(few) if k not in ("patches", "tile_size")}
    assert_same_lists(replace(few, **both))


def test_a_tile_with_100_000_splats() -> None:
    splats = make_splats(100_000, 16, 16, sizes=(20.0, 30.0), opacities=(0.5, 0.9))
    splats = replace(splats, depths=(splats.depths * 5000).round())  # many ties
    offsets, rows = on_gpu(splats)
    assert offsets.tolist() == [0, 100_000]
    assert torch.equal(rows.long(), torch.sort(splats.depths, stable=True).indices)


def test_depths_of_any_size_and_sign_are_sorted() -> None:
    splats = make_splats(500, 8, 8, sizes=(5.0, 9.0))
    generator = torch.Generator().manual_seed(1)
    scale = 10.0 ** torch.randint(-20, 20, (500,), generator=generator)
    splats = replace(splats, depths=torch.randn(500, generator=generator) * scale)
    assert_same_lists(splats)


def test_dead_and_padding_rows_are_in_no_list() -> None:
    splats = make_splats(5000, 64, 64, views=2)
    radii, means2d, depths = splats.radii.clone(), splats.means2d.clone(), splats.depths.clone()
    radii[::2], radii[4000:], means2d[4000:], depths[4000:] = 0, 0, 0, 0
    radii[1, 0] = 0
    splats = replace(splats, radii=radii, means2d=means2d, depths=depths)
    _, rows = on_gpu(splats)
    assert bool((rows % 2 == 1).all()) and bool((rows < 4000).all()) and not bool((rows == 1).any())
    assert_same_lists(splats)


def test_rows_need_not_begin_where_two_numbers_are_read_at_once() -> None:
    """Part of a single row is contiguous wherever it begins."""
    splats = make_splats(1, 64, 64).to("cuda")
    expected = lists_of(*(x.cpu() for x in splats.intersect()))
    assert any(expected)
    radii, means2d = (
        torch.cat([x.new_zeros(1, 1), x], 1)[:, 1:] for x in (splats.radii, splats.means2d)
    )  # fmt: skip
    assert radii.is_contiguous() and radii.data_ptr() % 8 == means2d.data_ptr() % 8 == 4
    shifted = replace(splats, radii=radii, means2d=means2d)
    assert lists_of(*(x.cpu() for x in shifted.intersect())) == expected


def test_runs_repeat_bit_for_bit() -> None:
    splats = make_splats(50_000, 500, 400, views=2, seed=10).to("cuda")
    first = splats.intersect()
    for _ in range(3):
        assert all(torch.equal(a, b) for a, b in zip(first, splats.intersect(), strict=True))


@pytest.mark.parametrize("tile_size", [16, 1])  # 16-bit and 32-bit tile ids
def test_enough_capacity_changes_nothing(tile_size: int) -> None:
    splats = replace(make_splats(3000, 400, 300, views=2, seed=11), tile_size=tile_size).to("cuda")
    offsets, rows = splats.intersect()
    for more in (0, 1, 100_000):
        padded_offsets, padded, count = at_capacity(splats, len(rows) + more)
        assert count.tolist() == [len(rows)] and torch.equal(padded_offsets, offsets)
        assert torch.equal(padded[: len(rows)], rows) and bool((padded[len(rows) :] == -1).all())


def test_too_little_capacity_keeps_valid_lists() -> None:
    splats = make_splats(5000, 400, 300, views=2, seed=12)
    whole = lists_of(*on_gpu(splats))
    listed = sum(map(len, whole))
    for capacity in (1, 1000, listed - 1):
        offsets, rows, count = at_capacity(splats.to("cuda"), capacity)
        assert count.tolist() == [listed]
        lists = lists_of(offsets.cpu(), rows.cpu())
        # What is missing is the farthest of each tile.
        assert all(part == full[: len(part)] for part, full in zip(lists, whole, strict=True))


def test_more_intersections_than_int32_are_counted() -> None:
    splats = covering(70_000, 3840, 2160).to("cuda")
    offsets, rows, count = at_capacity(splats, 5000)
    assert count.tolist() == [70_000 * 240 * 135] and count.item() > 2**31
    assert offsets[-1] == 5000 and bool((offsets.diff() >= 0).all()) and bool((rows >= 0).all())
    with pytest.raises(RuntimeError, match="intersections"):
        splats.intersect()


def test_a_cuda_graph_holds_it() -> None:
    splats = make_splats(2000, 200, 150, seed=13).to("cuda")
    found = check_replays(lambda: at_capacity(splats, 50_000), splats.means2d.add_, (0.0, 13.0, 1000.0))
    assert found[2].item() == 0  # all moved out


def test_rows_and_bytes_beyond_int32() -> None:
    """2.2 GB of conics: offsets in bytes do not fit an int32."""
    count = 190_000_000
    if torch.cuda.mem_get_info()[0] < 20 * 2**30:
        pytest.skip("needs 20 GB of free GPU memory")
    zeros = torch.zeros(count, 3, device="cuda")
    radii = torch.zeros(count, 2, dtype=torch.int32, device="cuda")
    means2d, conics, opacities = torch.zeros(count, 2, device="cuda"), zeros, torch.zeros(count, device="cuda")
    view_ids = torch.zeros(count, dtype=torch.int32, device="cuda")
    last = slice(count - 3, count)
    radii[last], means2d[last], opacities[last] = 4, 8.0, 0.9
    conics[last] = torch.tensor([1.0, 0.0, 1.0], device="cuda")
    depths = torch.arange(count, 0, -1, device="cuda", dtype=torch.float32)
    depths[last] = torch.tensor([3.0, 1.0, 2.0], device="cuda")
    splats = Splats(means2d, conics, opacities, zeros, radii, depths, view_ids, (0, 0, 0, 16, 16))
    offsets, rows = splats.intersect()
    assert offsets.tolist() == [0, 3] and rows.tolist() == [count - 2, count - 1, count - 3]


def test_wrong_arguments_are_named() -> None:
    splats = make_splats(5, 32, 32).to("cuda")
    with pytest.raises(TypeError, match="float32"):
        names = ("means2d", "conics", "row_opacities", "depths")
        replace(splats, **{name: getattr(splats, name).double() for name in names}).intersect()
    with pytest.raises(TypeError, match="radii"):
        replace(splats, radii=splats.radii.cpu()).intersect()
