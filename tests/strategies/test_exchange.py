"""The law where splats of a cell travel instead of pixels: whatever is chosen, N ranks do what one rank does."""

from dataclasses import replace
from functools import partial
from typing import Any, Literal

import pytest
import torch

from ns_multigpu.cells.exchange import Exchange
from ns_multigpu.cells.options import PixelOptions
from ns_multigpu.cells.seen import Rectangle
from ns_multigpu.cells.sharing import CellPixels
from ns_multigpu.cells.tree import Split
from ns_multigpu.core.assignment import Learns
from ns_multigpu.core.cell_rows import CellRows
from ns_multigpu.core.composite import CompositePixels
from ns_multigpu.core.plan import Plan
from ns_multigpu.core.strategy import Strategy
from ns_multigpu.core.types import View
from ns_multigpu.core.world import World
from ns_multigpu.primitives.gaussians.functions import Gaussians
from strategies.pixel import TIMED_ON, pixel
from tests.ranks import run_ranks, skip_without_gpus
from tests.strategies import test_stops
from tests.strategies.test_crossing import check_fused as check_single
from tests.strategies.test_law import PRIMITIVES, Outcome, check, one_step, take_step
from tests.strategies.test_law_steps import CUT, KERNELS, MODES, PORTRAIT, take_one
from tests.strategies.test_pixel import POINTS, VIEWS, GivenCells, check_fused, step_of

KINDS = ["splats", "mixed"]


class Mixed(Exchange):
    """Any choice for any part."""

    def _sends_splats(
        self, view: View, cell: int, span: tuple[int, int], rectangle: Rectangle, rows: int | None, ghosts: int = 0
    ) -> bool:
        super()._sends_splats(view, cell, span, rectangle, rows, ghosts)
        return view.index >= 0 and (view.index + cell + span[0]) % 2 > 0


def strategy_of(cells: int, world: World, kind: str, crossing: Literal["none", "ghosts"] = "none") -> Strategy:
    options = PixelOptions(cells=cells, crossing=crossing)
    spread = pixel(world, options, "splats" if kind == "mixed" else kind)  # type: ignore[arg-type]
    if kind == "mixed" and world.size > 1:
        views: Any = spread.assignment
        homes = [spread.placement.rank_of(cell) for cell in range(cells)]  # type: ignore[attr-defined]
        views._exchange = Mixed("splats", homes, ghosts=crossing == "ghosts")
    return spread


def parts_drawn(plan: Plan) -> tuple[int, int]:
    """Parts of layers that their cell's rank draws, and that others draw."""
    away = [plan.homes[p.cell] != rank for rank, patches in enumerate(plan.drawn) for p in patches]
    return away.count(False), away.count(True)


def steps(cells: int, kind: str, world: World, primitive: str, views: int, points: int, dtype: torch.dtype,
          size: tuple[int, int] | None = None, crossing: Literal["none", "ghosts"] = "none") -> Outcome:  # fmt: skip
    """Two steps of the same views: the second knows what the first has counted. And who drew what."""
    spread = strategy_of(cells, world, kind, crossing)
    plans: list[Plan] = []
    checked = spread._checked
    object.__setattr__(spread, "_checked", lambda plan, seen: plans.append(plan) or checked(plan, seen))
    take_step(spread, primitive, views, points, dtype, size)
    return {**take_step(spread, primitive, views, points, dtype, size), "plans": plans}


def check_law(outcomes: list[Outcome], cells: int, *rest: Any) -> None:
    check(outcomes, step_of(cells, World.single(), *rest), rest[3])
    assert all(one["plans"] == outcomes[0]["plans"] for one in outcomes), "all decide alike"


@pytest.mark.parametrize(("ranks", "cells"), [(2, 2), (3, 4), (4, 4)])
@pytest.mark.parametrize("kind", KINDS)
def test_ranks_equal_one_with_the_same_cells(kind: str, ranks: int, cells: int) -> None:
    primitive = list(PRIMITIVES)[ranks % len(PRIMITIVES)]
    rest = (primitive, VIEWS, POINTS, torch.float64 if primitive == "gaussians" else torch.float32)
    outcomes = run_ranks(partial(steps, cells, kind), ranks, *rest)
    check_law(outcomes, cells, *rest)
    first, second = outcomes[0]["plans"]
    home, away = parts_drawn(second)
    assert home > 0 and away > 0 and first.room == () and second.room != ()
    assert sum(map(sum, second.room)) >= away * 64


@pytest.mark.parametrize(("ranks", "cells"), [(2, 3), (4, 4)])
def test_with_ghosts_they_equal_single(ranks: int, cells: int) -> None:
    rest = ("gaussians", VIEWS, POINTS, torch.float64)
    outcomes = run_ranks(partial(steps, cells, "mixed"), ranks, *rest, None, "ghosts")
    check(outcomes, one_step(World.single(), "single", *rest), torch.float64)
    assert all(one["plans"] == outcomes[0]["plans"] for one in outcomes), "all decide alike"
    first, second = outcomes[0]["plans"]
    assert all(parts_drawn(second)) and first.room == () and second.room != ()
    away = sum(n for a, row in enumerate(second.room) for b, n in enumerate(row) if a != b)
    assert away == sum(map(sum, second.room)) > 64, "what a rank has it is not sent"


@pytest.mark.parametrize(("views", "points", "size"), [(2, 40, None), (1, 0, None), (3, 1, None), (1, 60, (40, 14))])
def test_ranks_without_points_or_pixels(views: int, points: int, size: tuple[int, int] | None) -> None:
    """Cells without points, a model without any, and one row of tiles for all ranks."""
    rest = ("gaussians", views, points, torch.float64, size)
    check_law(run_ranks(partial(steps, 3, "splats"), 3, *rest), 3, *rest)


def fused_step(
    cells: int, kind: str, world: World, primitive: str, mode: str, crossing: Literal["none", "ghosts"] = "none"
) -> Outcome:
    made = PRIMITIVES[primitive]()
    assert isinstance(made, Gaussians)
    return take_one(strategy_of(cells, world, kind, crossing), made, CUT, PORTRAIT, mode)


@pytest.mark.parametrize(("ranks", "cells"), [(2, 2), (2, 3), (4, 4)])
@pytest.mark.parametrize(("kind", "mode"), [("splats", "step"), ("mixed", "step"), ("mixed", "captured")])
def test_a_step_equals_one_rank_with_the_same_cells(kind: str, mode: str, ranks: int, cells: int) -> None:
    primitive = KERNELS[ranks % len(KERNELS)]
    outcomes = run_ranks(partial(fused_step, cells, kind), ranks, primitive, mode)
    check_fused(outcomes, cells, primitive, PORTRAIT)


@pytest.mark.parametrize("mode", MODES)
def test_a_step_with_ghosts_is_singles(mode: str) -> None:
    outcomes = run_ranks(partial(fused_step, 3, "mixed"), 2, KERNELS[0], mode, "ghosts")
    check_single(outcomes, KERNELS[0], PORTRAIT)
    own = [one["learnt"] for one in outcomes]
    assert torch.equal(*own) and own[0].shape[0] == 2 and bool((own[0].sum(1) > 100).all()), "of both ranks' splats"


def behind_walls(world: World) -> Outcome:
    """Cells that stop early, drawn by whomever."""
    options = PixelOptions(cells=3, crossing="none")
    space = GivenCells(world, options)
    space.splits = (Split(0, -0.4, -1, 1), Split(0, 0.4, -2, -3))
    views = CellPixels(space, exchange=Mixed("splats", [space.rank_of(cell) for cell in range(3)]))
    spread = replace(
        pixel(world, options, "splats"), placement=space, assignment=views,
        pixels=CompositePixels(space.layers), rows=CellRows(space.layers, views.learn),
    )  # fmt: skip
    kind = Gaussians(depth=True), test_stops.walls(torch.float64)
    return take_step(spread, "", test_stops.VIEWS, 108, torch.float64, test_stops.SIZE, kind=kind)


def test_cells_that_stop_early() -> None:
    check(run_ranks(behind_walls, 3), test_stops.step(World.single(), "pixel"), torch.float64)


@pytest.mark.gpu
@pytest.mark.parametrize(("ranks", "cells"), [(2, 2), (2, 3), (3, 3), (4, 4)])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", MODES)
def test_the_law_on_gpus(mode: str, kind: str, ranks: int, cells: int) -> None:
    skip_without_gpus(ranks)
    for primitive in KERNELS:
        outcomes = run_ranks(partial(fused_step, cells, kind), ranks, primitive, mode, device="cuda")
        check_fused(outcomes, cells, primitive, PORTRAIT)


@pytest.mark.gpu
@pytest.mark.parametrize(("ranks", "cells"), [(2, 3), (4, 4)])
@pytest.mark.parametrize("mode", MODES)
def test_single_with_ghosts_on_gpus(mode: str, ranks: int, cells: int) -> None:
    skip_without_gpus(ranks)
    outcomes = run_ranks(partial(fused_step, cells, "mixed"), ranks, KERNELS[0], mode, "ghosts", device="cuda")
    check_single(outcomes, KERNELS[0], PORTRAIT)


def steps_of_ways(world: World, crossing: Literal["none", "ghosts"], mode: str) -> list[Outcome]:
    """A step of each way, one after the other with the same cells, by the strategies that a run would take them with.
    Those of autograd know what the ones before have counted."""
    TIMED_ON.append("cpu")
    spread = pixel(world, PixelOptions(cells=3, crossing=crossing), "auto")
    assert spread.choice is not None and spread.choice.trials.way == "mixed"
    found: list[Outcome] = []
    for way in ("mixed", "pixels", "splats", "mixed", "pixels"):
        spread.choice.trials.way = way
        chosen = spread.choice.others.get(way, spread)
        if mode == "autograd":
            outcome = take_step(chosen, "gaussians", VIEWS, POINTS, torch.float64)
        else:
            made = PRIMITIVES[KERNELS[0]]()
            assert isinstance(made, Gaussians)
            outcome = take_one(chosen, made, CUT, PORTRAIT, mode)
        found.append({**outcome, "known": spread.assignment.knowledge() == chosen.assignment.knowledge() != []})
    return found


@pytest.mark.parametrize("mode", ["autograd", "step"])
def test_the_law_for_each_way_that_time_may_choose(mode: str) -> None:
    for ways in zip(*run_ranks(steps_of_ways, 2, "ghosts", mode), strict=True):
        if mode == "autograd":
            rest = ("gaussians", VIEWS, POINTS, torch.float64)
            check(list(ways), one_step(World.single(), "single", *rest), torch.float64)
        else:
            check_single(list(ways), KERNELS[0], PORTRAIT)
        assert all(one["known"] for one in ways), "whichever is taken, a checkpoint has what others know"


def test_the_law_for_each_way_where_splats_stay_in_their_cells() -> None:
    rest = ("gaussians", VIEWS, POINTS, torch.float64)
    for ways in zip(*run_ranks(steps_of_ways, 2, "none", "autograd"), strict=True):
        check(list(ways), step_of(3, World.single(), *rest), torch.float64)


@pytest.mark.parametrize("crossing", ["none", "ghosts"])
def test_pixels_chosen_are_pixels_asked_for(crossing: Any) -> None:
    """The same legs, and the same plans, though the other way would send splats."""
    pair, options = replace(World.single(), size=2), PixelOptions(crossing=crossing)
    assert pixel(pair, options, "auto").choice is None, "on a CPU not by time: a resumed run gives the same bits"
    TIMED_ON.append("cpu")
    try:
        auto, asked = pixel(pair, options, "auto"), pixel(pair, options, "pixels")
        for fixed in ("pixels", "splats", "mixed"):
            assert pixel(pair, options, fixed).choice is None  # type: ignore[arg-type]
        assert pixel(World.single(), options, "auto").choice is None, "one rank sends nothing"
    finally:
        TIMED_ON.remove("cpu")
    assert auto.choice is not None
    chosen = auto.choice.others["pixels"]
    assert chosen.placement is auto.placement and chosen.world is auto.world
    for leg in ("rows", "pixels", "gradients"):
        of_chosen, of_asked = getattr(chosen, leg), getattr(asked, leg)
        assert type(of_chosen) is type(of_asked) and of_chosen is not getattr(auto, leg)
    assert not chosen.rows.planned and chosen.assignment.learns is asked.assignment.learns is Learns.NOTHING
    views = [View(torch.eye(4), torch.eye(3), 64, 48, index) for index in range(2)]
    assert chosen.plan(views) == asked.plan(views) and auto.plan(views).homes
    assert chosen.assignment.counts(2, 64, 48) == 0 < auto.assignment.counts(2, 64, 48)


def test_what_does_not_go_with_it() -> None:
    pair = replace(World.single(), size=2)
    with pytest.raises(ValueError, match=r"--pipeline\.pixel\.hide True: .*--pipeline\.exchange is auto"):
        pixel(pair, PixelOptions(hide=True, crossing="none"), "auto")
