"""Cells of space: level, the same on any number of ranks, and in one order for all rays of a view."""

import itertools
from typing import Any

import pytest
import torch

from ns_multigpu.cells import tree as tree_module
from ns_multigpu.cells.tree import CellTree
from ns_multigpu.core.dist.world import World
from tests.lib.ranks import run_ranks

ALONE = World.single()


def cloud(points: int, seed: int = 0) -> torch.Tensor:
    """Points in a long box, most of them at one end."""
    g = torch.Generator().manual_seed(seed)
    drawn = torch.rand(points, 3, generator=g)
    return torch.stack([8 * drawn[:, 0] ** 3, 3 * drawn[:, 1], drawn[:, 2] - 4], 1)


def tree_of(cells: int, points: int = 4000, seed: int = 0) -> CellTree:
    return CellTree.of_work(cloud(points, seed), torch.ones(points, dtype=torch.int64), cells, ALONE)


@pytest.mark.parametrize("cells", [1, 2, 3, 5, 7, 8, 13])
def test_cells_have_equal_work(cells: int) -> None:
    positions = cloud(5000)
    work = torch.arange(5000) % 7 + 1
    tree = CellTree.of_work(positions, work, cells, ALONE)
    assert tree.cells == cells
    held = torch.zeros(cells, dtype=torch.int64).index_add_(0, tree.of(positions), work)
    assert int(held.sum()) == int(work.sum())
    assert float(held.max() * cells / held.sum()) < 1.02 and float(held.min() * cells / held.sum()) > 0.98


def test_work_that_is_all_in_the_first_bin_is_shared() -> None:
    """A point far away stretches the histogram so far that the second look has to part all others."""
    positions = torch.cat([cloud(4000) * 1e-4, torch.tensor([[100.0, 0.0, 0.0]])])
    cells = CellTree.of_work(positions, torch.ones(4001, dtype=torch.int64), 2, ALONE).of(positions)
    assert abs(int((cells == 0).sum()) - 2000) < 40


def test_work_that_is_all_at_the_upper_end_leaves_no_cell_empty() -> None:
    """Whichever way the end of the last bin is rounded."""
    ends = torch.randn(200, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(3)).sort(1).values
    for low, high in ends.tolist():
        positions = torch.tensor([[low, 0.0, 0.0], *[[high, 0.0, 0.0]] * 9], dtype=torch.float64)
        cells = CellTree.of_work(positions, torch.ones(10, dtype=torch.int64), 2, ALONE).of(positions)
        assert cells.tolist() == [0] + [1] * 9


def test_parts_of_a_level_are_cut_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks meet three times a level, however many planes it has, and each part is cut as if it were alone."""
    met: list[str] = []
    for name in ("sum_in_place", "max_in_place"):
        monkeypatch.setattr(tree_module, name, lambda *_, name=name: met.append(name))
    positions, work = cloud(5000), torch.arange(5000) % 7
    tree = CellTree.of_work(positions, work, 8, ALONE)
    assert len(met) == 3 * 3
    cells = tree.of(positions)
    for half in (0, 1):
        within = cells // 4 == half
        alone = CellTree.of_work(positions[within], work[within], 4, ALONE)
        assert torch.equal(alone.of(positions[within]), cells[within] - 4 * half)


def test_the_largest_extent_is_cut_first() -> None:
    splits = tree_of(4).splits
    assert [split.axis for split in splits] == [0, 1, 0]
    assert splits[0].plane == pytest.approx(8 * 0.5**3, rel=0.1)


@pytest.mark.parametrize("cells", [1, 2, 3, 6, 11])
def test_a_point_is_in_the_box_of_its_cell(cells: int) -> None:
    tree, positions = tree_of(cells), 20 * torch.rand(3000, 3) - 8
    boxes, owners = tree.boxes(), tree.of(positions)
    low, high = boxes[owners].unbind(1)
    assert bool(((positions.double() >= low) & (positions.double() < high)).all())
    assert set(owners.tolist()) == set(range(cells))
    again = CellTree.from_tensor(tree.tensor())
    assert again == tree and torch.equal(again.of(positions), owners)


@pytest.mark.parametrize("cells", [2, 3, 6, 11])
def test_one_order_serves_all_rays(cells: int) -> None:
    """Along any ray cells come in the order of the tree, from a camera anywhere: inside a cell, far off, on a plane."""
    tree, g = tree_of(cells, seed=3), torch.Generator().manual_seed(1)
    eyes = (12 * torch.rand(40, 3, generator=g, dtype=torch.float64) - torch.tensor([2.0, 4, 8])).tolist()
    for split in tree.splits:
        eyes[split.axis][split.axis] = split.plane
    steps = torch.linspace(1e-9, 30, 3001, dtype=torch.float64)
    for eye in eyes:
        order = tree.order(tuple(eye))
        assert sorted(order) == list(range(cells))
        place = torch.tensor([order.index(cell) for cell in range(cells)])
        for _ in range(15):
            ray = torch.nn.functional.normalize(torch.randn(3, generator=g, dtype=torch.float64), dim=0)
            along = place[tree.of(torch.tensor(eye, dtype=torch.float64) + steps[:, None] * ray)]
            assert bool((along.diff() >= 0).all()), (eye, ray)


def test_a_camera_on_a_plane_sees_what_is_above_first() -> None:
    tree = tree_of(2)
    plane = tree.splits[0].plane
    assert tree.order((plane, 0.0, 0.0)) == (1, 0)
    assert tree.order((plane - 1e-9, 0.0, 0.0)) == (0, 1)


@pytest.mark.parametrize("cells", [3, 4])
def test_coincident_points_give_empty_cells(cells: int) -> None:
    for positions in (torch.ones(50, 3), torch.empty(0, 3)):
        tree = CellTree.of_work(positions, torch.ones(len(positions), dtype=torch.int64), cells, ALONE)
        assert tree.cells == cells and len(set(tree.of(positions).tolist())) == min(1, len(positions))
    with pytest.raises(ValueError, match="at least 1"):
        CellTree.of_work(torch.ones(5, 3), torch.ones(5, dtype=torch.int64), 0, ALONE)


def test_without_any_work_points_count() -> None:
    positions = cloud(1000)
    tree = CellTree.of_work(positions, torch.zeros(1000, dtype=torch.int64), 2, ALONE)
    assert abs(int((tree.of(positions) == 0).sum()) - 500) < 10


def shared(world: World, cells: int) -> Any:
    mine = slice(world.rank, None, world.size) if world.rank else slice(0, 0)  # the first rank has none
    positions = cloud(999)
    held = positions[mine] if world.size > 1 else positions[[k for k in range(999) if k % 3]]
    return CellTree.of_work(held, (held[:, 0] * 50).long(), cells, world).splits


def test_ranks_agree_on_the_tree_of_one() -> None:
    for one in itertools.chain(run_ranks(shared, 3, 5)):
        assert one == shared(ALONE, 5)
