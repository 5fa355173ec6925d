"""Boundary splats: the cells that a splat overlaps, and each cell's interval of depths. Their law: `test_pixel`."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from ns_multigpu.cells.boundary import CellsInViews
from ns_multigpu.core.assign.plan import Plan
from ns_multigpu.core.dist.world import World
from ns_multigpu.core.exchange.boundary_rows import BoundaryRows, CellRegions
from ns_multigpu.core.exchange.exchanged_rows import ExchangedRows
from ns_multigpu.core.types import TILE, Hits, Patch, Splats, View
from ns_multigpu.primitives.gaussians.functions import Gaussians
from tests.lib.ranks import run_ranks
from tests.strategies.scene import make_points, make_views
from tests.strategies.test_law import take_step
from tests.strategies.test_pixel import strategy_of, where_cameras_stand, with_splits

VIEWS, POINTS = 5, 150


def windows_of(where: str) -> tuple[CellsInViews, Plan, list[View]]:
    points, views = make_points(POINTS, torch.float64), make_views(VIEWS, torch.float64)
    spread = with_splits(World.single(), where_cameras_stand()[where], "ghosts")
    spread.placement.hold(points, World.single())
    spread.observe(Gaussians(), points, 0)
    assert isinstance(spread.rows, BoundaryRows) and isinstance(spread.rows.regions, CellsInViews)
    return spread.rows.regions, spread.plan(views), views


@pytest.mark.parametrize("where", where_cameras_stand())
def test_a_cell_keeps_its_window_where_it_is_not_drawn(where: str) -> None:
    """Otherwise other cells would draw splats of it that `hide` leaves out."""
    cells_in_views, plan, views = windows_of(where)
    own = [patch for patch in plan.drawn[0] if patch.y1 - patch.y0 > TILE]
    least = max(own, key=lambda patch: (patch.x1 - patch.x0) * (patch.y1 - patch.y0))
    border = least.y0 + TILE
    drawn = tuple(replace(patch, y1=border) if patch is least else patch for patch in plan.drawn[0])
    smaller = replace(plan, drawn=(drawn,), hidden=(*plan.hidden, replace(least, y0=border)))

    def by_patch(some: Plan) -> list[torch.Tensor]:
        sizes = [-(-(p.x1 - p.x0) // TILE) * -(-(p.y1 - p.y0) // TILE) for p in some.drawn[0]]
        return list(cells_in_views.windows(some, views, 0).split(sizes))

    for patch, before, after in zip(drawn, by_patch(plan), by_patch(smaller), strict=True):
        assert torch.equal(before[: len(after)], after), patch


@pytest.mark.parametrize("where", where_cameras_stand())
def test_each_depth_of_a_tile_is_one_cells(where: str) -> None:
    """And as near as possible that in which it lies: the ray through the tile's middle says so where all draw."""
    cells_in_views, plan, views = windows_of(where)
    windows, start = cells_in_views.windows(plan, views, 0), 0
    tree = cells_in_views._space.tree
    assert tree is not None
    counted = {view: torch.zeros(-(-v.height // TILE), -(-v.width // TILE), 200) for view, v in enumerate(views)}
    depths = torch.linspace(0.02, 9.0, 200, dtype=torch.float64)
    drawn = {view: torch.zeros_like(one[..., 0]) for view, one in counted.items()}
    for patch in plan.drawn[0]:
        drawn[patch.view][patch.y0 // TILE : -(-patch.y1 // TILE), patch.x0 // TILE : -(-patch.x1 // TILE)] += 1
    for patch in plan.drawn[0]:
        rows, columns = -(-(patch.y1 - patch.y0) // TILE), -(-(patch.x1 - patch.x0) // TILE)
        window = windows[start : start + rows * columns].view(rows, columns, 2)
        start += rows * columns
        here = (depths >= window[..., :1]) & (depths < window[..., 1:])
        there = slice(patch.y0 // TILE, patch.y0 // TILE + rows), slice(patch.x0 // TILE, patch.x0 // TILE + columns)
        counted[patch.view][there] += here
        view = views[patch.view]
        y, x = torch.meshgrid(
            *(torch.arange(s.start, s.stop, dtype=torch.float64) * TILE + TILE / 2 for s in there), indexing="ij"
        )
        ray = torch.stack(
            [(x - view.K[0, 2]) / view.K[0, 0], (y - view.K[1, 2]) / view.K[1, 1], torch.ones_like(x)], -1
        )
        at = (ray[..., None, :] * depths[:, None] - view.viewmat[:3, 3]) @ view.viewmat[:3, :3]
        lies = tree.of(at.reshape(-1, 3)).view(here.shape) == patch.cell
        everywhere = drawn[patch.view][there] == tree.cells
        assert torch.equal(here[everywhere], lies[everywhere])
    assert start == len(windows)
    for view, count in counted.items():
        assert torch.equal(count, (drawn[view] > 0).float()[..., None].expand_as(count)), (
            "each depth once, if anybody draws"
        )


def bytes_of(world: World, cross: bool) -> int:
    """Return the bytes of a step with rows sent to overlapped cells, or to overlapped rectangles."""
    spread = strategy_of(2, world, crossing="ghosts")
    spread = spread if cross else replace(spread, rows=ExchangedRows(hierarchical=False))
    world.traffic.since("step")
    take_step(spread, "gaussians", VIEWS, 1500, torch.float64)
    return world.traffic.since("step")


def test_rows_are_sent_to_cells_that_they_overlap() -> None:
    few, many = (run_ranks(bytes_of, 2, cross) for cross in (True, False))
    assert all(a < 0.75 * b for a, b in zip(few, many, strict=True))
    cells_in_views, _, views = windows_of("in a cell")
    view, places = views[0], torch.tensor([[10.0, 5.0], [25, 21], [19, 27], [29, 5]], dtype=torch.float64)
    depths = torch.tensor([4.0, 4.0, 2.0, 2.5], dtype=torch.float64)
    middles = (places / TILE).floor() * TILE + TILE / 2  # each overlaps one tile, and counts at its middle
    rays = torch.cat([(middles - view.K[:2, 2]) / view.K[[0, 1], [0, 1]], torch.ones(4, 1)], 1)
    tree = cells_in_views._space.tree
    assert tree is not None
    cells = tree.of((rays * depths[:, None] - view.viewmat[:3, 3]) @ view.viewmat[:3, :3])
    assert len(cells.unique()) == 3
    overlaps = cells_in_views.overlaps_cells(torch.zeros(4).int(), places, torch.full((4, 2), 2).int(), depths, [view])
    assert torch.equal(overlaps.T, torch.nn.functional.one_hot(cells, 3).bool())


@pytest.mark.gpu
def test_cameras_may_be_on_the_host() -> None:
    """Rows before a run's first capacities are computed."""
    cells_in_views, _, views = windows_of("in a cell")
    places = torch.tensor([[10.0, 5.0], [25, 21], [19, 27]], dtype=torch.float64)
    given = torch.zeros(3).int(), places, torch.full((3, 2), 2).int(), torch.tensor([4.0, 2, 3], dtype=torch.float64)
    there = (x.cuda().float() if x.is_floating_point() else x.cuda() for x in given)
    there_cells = cells_in_views.overlaps_cells(*there, views[:1]).cpu()
    assert torch.equal(there_cells, cells_in_views.overlaps_cells(*given, views[:1]))


class _Near(CellRegions):
    """One cell, overlapped by rows nearer than 1; counts its queries."""

    def __init__(self) -> None:
        self.asked = 0

    def windows(self, plan: Plan, views: Sequence[View], rank: int) -> torch.Tensor:
        raise NotImplementedError

    def overlaps_cells(
        self, view_ids: torch.Tensor, means2d: torch.Tensor, radii: torch.Tensor, depths: torch.Tensor,
        views: Sequence[View],
    ) -> torch.Tensor:  # fmt: skip
        self.asked += 1
        return depths[None] < 1


def test_boundary_rows_overlap_the_listed_cells() -> None:
    """Each batch is asked about once, and earlier batches do not matter."""
    regions, view = _Near(), View(torch.eye(4), torch.eye(3), 32, 32, 0)
    leg = BoundaryRows(regions)
    drawn = [(0, Patch(0, 0, 0, 32, 32, cell=0))]
    for turn, depths in enumerate(([0.5, 0.5, 2.0], [2.0, 2.0, 0.5])):
        ids = torch.zeros(3, dtype=torch.int32)
        rows = {"means2d": torch.full((3, 2), 16.0), "depths": torch.tensor(depths)}
        rows["radii"] = torch.full((3, 2), 2, dtype=torch.int32)
        own = Splats(Hits(ids, torch.arange(3, dtype=torch.int32)), rows)
        near = torch.tensor(depths) < 1
        place, counts = leg.route(own, [view], drawn, 1)
        assert torch.equal(place[0] >= 0, near) and counts.tolist() == [int(near.sum())]
        assert regions.asked == turn + 1
