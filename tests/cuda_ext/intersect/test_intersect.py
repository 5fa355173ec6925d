"""`intersect`: every tile has every splat that it shows, nearest first, ties by row."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from cuda_ext import intersect_capacity, use_reference
from tests.cuda_ext.splats import Splats, make_splats
from tests.lib.ranks import DEVICES
from tests.lib.threads import same_on_threads

pytestmark = pytest.mark.usefixtures("native")
ODD_PATCHES = (0, 3, 5, 40, 29, 0, 40, 5, 41, 29, 1, 0, 0, 47, 33, 0, 7, 7, 7, 20)
SCENES = {
    "mixed": make_splats(120, 47, 33, views=2),
    "needles": make_splats(120, 47, 33, sizes=(0.01, 12.0), views=2, seed=1),
    "faint": make_splats(120, 47, 33, sizes=(0.1, 8.0), opacities=(0.004, 0.02), views=2, seed=2),
    "sub-pixel": make_splats(120, 47, 33, sizes=(0.0, 0.05), views=2, seed=3),
    "huge": make_splats(20, 47, 33, sizes=(50.0, 400.0), views=2, seed=4),
}


def tile_rectangles(patches: tuple[int, ...], tile_size: int) -> list[tuple[int, int, int, int, int]]:
    """Return (view, x0, y0, x1, y1) of every tile, in the operator's order."""
    tiles = []
    for k in range(0, len(patches), 5):
        view, x0, y0, x1, y1 = patches[k : k + 5]
        for y in range(y0, y1, tile_size):
            for x in range(x0, x1, tile_size):
                tiles.append((view, x, y, min(x + tile_size, x1), min(y + tile_size, y1)))
    return tiles


def shown_rows(splats: Splats, tile: tuple[int, int, int, int, int]) -> list[int]:
    """Rows with alpha >= 1/255 at a pixel centre of the tile, nearest first, ties by row."""
    view, x0, y0, x1, y1 = tile
    y, x = torch.meshgrid(torch.arange(y0, y1) + 0.5, torch.arange(x0, x1) + 0.5, indexing="ij")
    d = splats.means2d.double()[:, None] - torch.stack([x.flatten(), y.flatten()], dim=1)
    a, b, c = splats.conics.double()[:, :, None].unbind(dim=1)
    sigma = 0.5 * (a * d[..., 0] ** 2 + c * d[..., 1] ** 2) + b * d[..., 0] * d[..., 1]
    alpha = splats.row_opacities.double()[:, None] * torch.exp(-sigma)
    rows = ((alpha >= 1 / 255).any(dim=1) & (splats.view_ids == view)).nonzero().flatten().tolist()
    return sorted(rows, key=lambda r: (float(splats.depths[r]), r))


def lists_of(tile_offsets: Tensor, row_ids: Tensor) -> list[list[int]]:
    ends = tile_offsets.tolist()
    assert ends[0] == 0 and ends[-1] == len(row_ids)
    return [row_ids[start:end].tolist() for start, end in pairwise(ends)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.usefixtures("either")
@pytest.mark.parametrize("tile_size", [16, 5])
@pytest.mark.parametrize("name", SCENES)
def test_each_tile_lists_what_it_shows_by_depth(name: str, tile_size: int, dtype: torch.dtype) -> None:
    scene = SCENES[name]
    floats = {k: getattr(scene, k).to(dtype) for k in ("means2d", "conics", "row_opacities", "depths")}
    splats = replace(scene, **floats, patches=ODD_PATCHES, tile_size=tile_size)
    lists = lists_of(*splats.intersect())
    tiles = tile_rectangles(ODD_PATCHES, tile_size)
    assert len(lists) == len(tiles)
    shown = [shown_rows(splats, tile) for tile in tiles]
    assert sum(map(len, shown)) > 10
    for tile, listed, wanted in zip(tiles, lists, shown, strict=True):
        assert set(wanted) <= set(listed), tile
        assert len(set(listed)) == len(listed)
        assert listed == sorted(listed, key=lambda r: (float(splats.depths[r]), r))
        assert all(splats.view_ids[r] == tile[0] for r in listed)


def test_native_lists_are_nearly_exact() -> None:
    splats = make_splats(400, 160, 120, sizes=(0.3, 20.0), seed=5)
    exact = sum(len(shown_rows(splats, tile)) for tile in tile_rectangles(splats.patches, 16))
    native = len(splats.intersect()[1])
    with use_reference():
        boxes = len(splats.intersect()[1])
    assert exact <= native <= 1.05 * exact
    assert boxes > 1.1 * exact  # so the ellipse test has something to drop


def test_equal_depths_keep_the_order_of_rows() -> None:
    splats = make_splats(300, 32, 32)
    splats = replace(splats, depths=torch.ones(300))
    for listed in lists_of(*splats.intersect()):
        assert len(listed) > 10 and listed == sorted(listed)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_depths_of_any_size_and_sign_are_sorted(dtype: torch.dtype) -> None:
    splats = make_splats(500, 8, 8, sizes=(5.0, 9.0), dtype=dtype)
    generator = torch.Generator().manual_seed(1)
    depths = torch.randn(500, generator=generator, dtype=dtype) * 10.0 ** torch.randint(
        -20, 20, (500,), generator=generator
    )
    _, rows = replace(splats, depths=depths).intersect()
    assert len(rows) > 100 and bool((depths[rows.long()].diff() >= 0).all())


@pytest.mark.parametrize("device", DEVICES)
def test_means_on_tile_edges_overlap_both_tiles(device: str) -> None:
    edges = torch.tensor([[16.0, 8.0], [16.0, 16.0], [32.0, 16.0], [0.0, 16.0]])
    base = make_splats(4, 48, 32, opacities=(0.9, 0.9))
    splats = replace(
        base,
        means2d=edges,
        conics=torch.tensor([[1.0, 0.0, 1.0]]).repeat(4, 1),
        radii=torch.full((4, 2), 4, dtype=torch.int32),
        depths=torch.arange(4.0),
    )
    assert lists_of(*splats.to(device).intersect()) == [[0, 1, 3], [0, 1, 2], [2], [1, 3], [1, 2], [2]]


def test_rows_with_radius_zero_are_in_no_list() -> None:
    splats = make_splats(50, 32, 32)
    radii = splats.radii.clone()
    radii[::2] = 0
    _, rows = replace(splats, radii=radii).intersect()
    assert len(rows) > 0 and bool((rows % 2 == 1).all())


@pytest.mark.usefixtures("either")
@pytest.mark.parametrize("device", DEVICES)
def test_nothing_to_list(device: str) -> None:
    none, some = make_splats(0, 32, 20).to(device), make_splats(5, 32, 20).to(device)
    cases = [
        (none, [0] * 5),
        (some.with_patches(), [0]),
        (some.with_patches(0, 5, 5, 5, 20, 0, 5, 5, 20, 5), [0]),
        (some.with_patches(3, 0, 0, 16, 16), [0, 0]),  # a view without rows
        (replace(some, radii=torch.zeros_like(some.radii)), [0] * 5),
    ]
    for splats, expected in cases:
        offsets, rows = splats.intersect()
        assert offsets.tolist() == expected and rows.shape == (0,) and rows.dtype == torch.int32
        for capacity in (0, 7):
            offsets, rows, count = at_capacity(splats, capacity)
            assert offsets.tolist() == expected and rows.tolist() == [-1] * capacity and count.tolist() == [0]


def test_the_number_of_threads_changes_no_bit() -> None:
    splats = make_splats(20_000, 200, 150, views=2)
    same_on_threads(splats.intersect)


def test_wrong_arguments_are_named() -> None:
    splats = make_splats(5, 32, 32)
    with pytest.raises(ValueError, match="5 integers a patch"):
        splats.with_patches(0, 0, 0, 3).intersect()
    with pytest.raises(ValueError, match="x1 >= x0"):
        splats.with_patches(0, 8, 0, 4, 4).intersect()
    with pytest.raises(ValueError, match="tile_size"):
        replace(splats, tile_size=0).intersect()
    with pytest.raises(ValueError, match="conics"):
        replace(splats, conics=splats.conics[:, :2]).intersect()
    with pytest.raises(TypeError, match="radii"):
        replace(splats, radii=splats.radii.long()).intersect()


@pytest.mark.parametrize("device", DEVICES)
def test_opcheck(device: str) -> None:
    splats = make_splats(20, 40, 30).to(device)
    splats.intersect()  # makes sure that the operator is loaded
    torch.library.opcheck(torch.ops.ns_multigpu.intersect.default, arguments(splats))
    into = torch.ops.ns_multigpu.intersect_capacity.default
    torch.library.opcheck(into, (*arguments(splats), 64), test_utils="test_schema")


def arguments(splats: Splats) -> tuple[Any, ...]:
    return (
        splats.means2d, splats.conics, splats.row_opacities, splats.radii, splats.depths, splats.view_ids,
        list(splats.patches), splats.tile_size,
    )  # fmt: skip


def at_capacity(splats: Splats, capacity: int) -> tuple[Tensor, Tensor, Tensor]:
    return intersect_capacity(
        splats.means2d, splats.conics, splats.row_opacities, splats.radii, splats.depths, splats.view_ids,
        splats.patches, splats.tile_size, capacity,
    )  # fmt: skip


@pytest.mark.usefixtures("either")
def test_capacity_cuts_off_or_fills_up() -> None:
    splats = replace(SCENES["mixed"], patches=ODD_PATCHES, tile_size=5)
    offsets, rows = splats.intersect()
    listed = len(rows)
    for capacity in (0, 1, listed - 1, listed, listed + 100):
        cut, padded, count = at_capacity(splats, capacity)
        assert count.dtype == torch.int64 and count.tolist() == [listed]
        assert padded.shape == (capacity,) and padded.dtype == cut.dtype == torch.int32
        assert torch.equal(cut, offsets.clamp(max=capacity))
        assert torch.equal(padded[:listed], rows[:capacity]) and bool((padded[listed:] == -1).all())


def test_wrong_capacity_is_named() -> None:
    with pytest.raises(ValueError, match="capacity"):
        at_capacity(make_splats(5, 32, 32), -1)
