"""State of the placement of cells, and the steps at which it is updated."""

from typing import Any, Literal

import torch

from ns_multigpu.cells.options import PixelOptions
from ns_multigpu.cells.placing import LOOKED_EVERY, ByCells
from ns_multigpu.core.assign.placement import NewPoints
from ns_multigpu.core.dist.world import World
from ns_multigpu.core.types import Points

CELLS = 3
ALONE = World.single()


def placed(boundary_mode: Literal["none", "ghosts"] = "none") -> tuple[ByCells, torch.Tensor]:
    means = torch.rand(300, 3, generator=torch.Generator().manual_seed(1)) * torch.tensor([4.0, 1.0, 1.0])
    space = ByCells(ALONE, PixelOptions(cells=CELLS, crossing=boundary_mode))
    space.shares(len(means), lambda: means, 1)
    space.moved(means)
    return space, means


def test_resumed_run_keeps_points_in_their_cells() -> None:
    space, means = placed()
    of_points = space.local.of_points
    assert of_points is not None and torch.bincount(of_points.long()).tolist() == [100, 100, 100]
    drifted, again = means + torch.tensor([1.5, 0.0, 0.0]), ByCells(ALONE, PixelOptions(cells=CELLS))
    again.load_state(space.state())
    again.moved(drifted)
    assert again.tree == space.tree and again.local.of_points is not None and space.tree is not None
    assert torch.equal(again.local.of_points, of_points), "not by where it has drifted to since"
    # Another number of ranks distributes points again, to the same cells.
    other = ByCells(ALONE, PixelOptions(cells=CELLS))
    other.load_state(space.state())
    other.shares(len(drifted), lambda: drifted, 1)
    other.moved(drifted)
    assert other.tree == space.tree and other.local.of_points is not None
    assert torch.equal(other.local.of_points.long(), space.tree.of(drifted))
    assert not torch.equal(other.local.of_points, of_points)


def test_when_boxes_are_measured() -> None:
    space, means = placed()
    looked: list[int] = []

    def look(images: int | None) -> Any:
        def extents() -> torch.Tensor:
            looked.append(-1 if images is None else images)
            return torch.full_like(means, 0.25)

        space.observe(Points({"means": means}), extents, images, ALONE)

    for images in (None, None, 40, 41, None, 40 + LOOKED_EVERY - 1, 40 + LOOKED_EVERY, 41 + LOOKED_EVERY):
        look(images)
    assert looked == [-1, 40 + LOOKED_EVERY], "a viewer's image is measured and does not change training"
    assert space.boxes is not None and space.tree is not None
    inside = means[space.tree.of(means) == 1].double()
    torch.testing.assert_close(torch.from_numpy(space.boxes[1, 0]), inside.amin(0) - 0.25, rtol=0, atol=1e-6)
    torch.testing.assert_close(torch.from_numpy(space.boxes[1, 1]), inside.amax(0) + 0.25, rtol=0, atol=1e-6)


def test_boxes_are_also_around_what_crosses() -> None:
    """Boxes enclose all points that overlap another cell, and no others."""
    (space, means), small = placed("ghosts"), torch.full((300, 3), 0.05)
    assert space.tree is not None
    space.observe(Points({"means": means}), lambda: small, 0, ALONE)
    assert space.boxes is not None
    of, cut = space.tree.of(means), space.tree.boxes()[1].float()
    far = 2 * small[0].norm()
    near = ((means + far >= cut[0]) & (means - far <= cut[1])).all(1) | (of == 1)
    assert int((of == 1).sum()) < int(near.sum()) < 200
    torch.testing.assert_close(torch.from_numpy(space.boxes[1, 0]), means[near].amin(0).double() - 0.05)
    torch.testing.assert_close(torch.from_numpy(space.boxes[1, 1]), means[near].amax(0).double() + 0.05)


def test_cells_are_cut_again_when_work_is_unbalanced() -> None:
    space, means = placed()
    tree = space.tree
    keys = torch.arange(len(means))

    def redistributed(work: torch.Tensor) -> bool:
        new = NewPoints(keys, lambda: means, work, [int(work.sum())], 1.1)
        return space.place(new, ALONE).redistributed

    assert not redistributed(torch.full((300,), 5)) and space.tree == tree
    work = torch.where(means[:, 0] > 2, 9, 1)
    assert redistributed(work) and space.tree != tree and space.tree is not None and space.placings == 2
    held = torch.zeros(CELLS, dtype=torch.int64).index_add_(0, space.tree.of(means), work)
    assert float(held.max() * CELLS / held.sum()) < 1.1
    assert not redistributed(work), "it is as level as it can be"
