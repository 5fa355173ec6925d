"""The law where cells hide each other: what is left out contributes nothing, and is the same on any number of ranks."""

from collections import Counter
from dataclasses import replace
from typing import Any, Literal

import pytest
import torch

from ns_multigpu.cells.boundary import CellsInViews
from ns_multigpu.cells.options import PixelOptions
from ns_multigpu.cells.sharing import CellPixels
from ns_multigpu.cells.tree import Split
from ns_multigpu.core.assign.plan import Plan
from ns_multigpu.core.dist.world import World
from ns_multigpu.core.exchange.boundary_rows import BoundaryRows
from ns_multigpu.core.exchange.composite import CompositePixels, live_numbers
from ns_multigpu.core.exchange.fragments import BANDS, routes_of
from ns_multigpu.core.exchange.legs import LocalRows
from ns_multigpu.core.step.step_settings import with_halos
from ns_multigpu.core.strategy import Strategy
from ns_multigpu.core.types import Patch, Points
from ns_multigpu.primitives.gaussians.functions import Gaussians
from strategies.pixel import pixel
from tests.lib.ranks import run_ranks
from tests.strategies.scene import make_points, make_views
from tests.strategies.test_law import Outcome, check, held_at, stitch, take_step
from tests.strategies.test_law_steps import PORTRAIT
from tests.strategies.test_needs import learn_once
from tests.strategies.test_pixel import GivenCells

VIEWS, POINTS, CELLS, SIZE = 5, 288, 3, (150, 101)


def opaque(dtype: torch.dtype) -> Points:
    """Return a solid wall across the middle, which is a cell, and points on either side."""
    params = {name: value.detach() for name, value in make_points(POINTS, dtype).params.items()}
    side = torch.linspace(-2.2, 2.2, 8, dtype=dtype)
    wall = torch.cartesian_prod(torch.tensor([-0.02, 0.0, 0.02], dtype=dtype), side, side)[: POINTS // 3 * 2]
    params["means"][: len(wall)] = wall
    params["scales"][: len(wall)] = torch.tensor([0.02, 0.6, 0.6], dtype=dtype).log()
    params["quats"][: len(wall)] = torch.tensor([1.0, 0, 0, 0], dtype=dtype)
    params["opacities"][:] = 1.0
    params["means"][len(wall) :] *= 0.3
    params["means"][len(wall) :, 0] += 0.7
    params["means"][len(wall) :: 2, 0] *= -1
    params["scales"][len(wall) :] -= 1
    return Points({name: value.requires_grad_() for name, value in params.items()})


def strategy_of(world: World, hide: bool = True, crossing: Literal["none", "ghosts"] = "none") -> Strategy:
    """Return a strategy in which the wall is the cell in the middle."""
    options = PixelOptions(cells=CELLS, crossing=crossing)
    space = GivenCells(world, options)
    space.splits = (Split(0, -0.3, -1, 1), Split(0, 0.3, -2, -3))
    regions = CellsInViews(space) if crossing == "ghosts" else None
    rows = LocalRows() if regions is None else BoundaryRows(regions)
    pixels, views = CompositePixels(space.local, regions=regions), CellPixels(space, hide=hide)
    pixels.feedback = views.learn if hide else None
    return replace(pixel(world, options), placement=space, assignment=views, rows=rows, pixels=pixels)


def twice(world: World, hide: bool, crossing: Literal["none", "ghosts"] = "none") -> dict[str, Any]:
    """Two steps of the same views, of which the second may leave out what the first saw hidden."""
    spread = strategy_of(world, hide, crossing)
    kind = Gaussians(depth=True), opaque(torch.float64)
    first = take_step(spread, "", VIEWS, POINTS, torch.float64, SIZE, kind=kind)
    begun = spread.assignment.figures()
    second = take_step(spread, "", VIEWS, POINTS, torch.float64, SIZE, kind=kind)
    figures, state = spread.assignment.figures(), spread.assignment.state()
    drawn = spread.plan(make_views(VIEWS, torch.float64, world.device, SIZE)).drawn
    patches = Counter((patch.view, patch.cell) for patches in drawn for patch in patches)
    return {
        "first": first, "second": second, "begun": begun, "figures": figures, "state": state,
        "patches": max(patches.values()),
    }  # fmt: skip


def unlike(a: Outcome, b: Outcome) -> float:
    images = stitch(a["images"]), stitch(b["images"])
    return max(float((images[0][view] - image).abs().max()) for view, image in images[1].items())


def test_occluded_cells_are_not_drawn_and_pixels_are_equal() -> None:
    hidden, shown = (twice(World.single(), hide) for hide in (True, False))
    assert unlike(hidden["first"], shown["first"]) == 0 and "pixels_drawn" in shown["figures"]
    assert hidden["begun"]["pixels_drawn"] == hidden["begun"]["pixels_in_sight"]
    figures = hidden["figures"]
    assert (
        figures["pixels_drawn"]
        < 0.9 * figures["pixels_in_sight"]
        == pytest.approx(0.9 * shown["figures"]["pixels_drawn"])
    )
    assert unlike(hidden["second"], shown["second"]) < 1.5e-3
    assert figures["hidden_flips"] == 0.0, "nothing has changed"
    for name, gradient in shown["second"]["gradients"].items():
        assert float((hidden["second"]["gradients"][name] - gradient).norm() / gradient.norm()) < 1e-2, name


@pytest.mark.parametrize(("ranks", "crossing"), [(2, "none"), (3, "none"), (3, "ghosts")])
def test_ranks_hide_the_same(ranks: int, crossing: Literal["none", "ghosts"]) -> None:
    expected = twice(World.single(), True, crossing)
    assert expected["patches"] > 1, "a cell is drawn in several rectangles"
    outcomes = run_ranks(twice, ranks, True, crossing)
    check([one["second"] for one in outcomes], expected["second"], torch.float64)
    for one in outcomes:
        assert one["state"] == expected["state"]
        for name in ("pixels_in_sight", "pixels_drawn", "hidden_flips"):
            assert one["figures"][name] == expected["figures"][name]


def test_pixels_at_which_drawing_stopped_are_visible() -> None:
    view = replace(make_views(1, torch.float32, torch.device("cpu"), (40, 32))[0], index=0)
    plan = replace(Plan.of([[Patch.whole(0, view)]]), order=((0,),))
    alpha, before = torch.full((32 * 40,), -1.0), torch.ones(32 * 40)
    before[:40] = 5e-4
    found = live_numbers(alpha, before, routes_of(plan, [view], 0), plan).view(BANDS, 5).tolist()
    assert found[:2] == [[0, -1, 40, 16, 0], [0, -16, 40, 32, 0]]


def visible_boxes(world: World, mode: str) -> list[list[int]]:
    """Return the visible boxes of cells after a step in this mode."""
    spread = strategy_of(world)
    kind = Gaussians()
    views = make_views(VIEWS, torch.float32, world.device, PORTRAIT)
    spread.placement.look(lambda: views)
    held, _ = held_at(spread, opaque(torch.float32))
    spread.observe(kind, held, 0)
    plan = with_halos(spread.plan(views), views)
    learn_once(spread, kind, held, views, plan, mode)
    return spread.assignment.state()


@pytest.mark.parametrize("mode", ["autograd", "step"])
def test_every_mode_learns_the_same(mode: str) -> None:
    (expected,) = run_ranks(visible_boxes, 1, "autograd")
    boxes = [(row[11::4], row[13::4]) for row in expected[1:] if len(row) > 11 and row[7] > 0]
    assert any(all(a > b for a, b in zip(*ends, strict=True)) for ends in boxes), "a cell that is all hidden"
    for found in run_ranks(visible_boxes, 2, mode):
        assert found == expected
