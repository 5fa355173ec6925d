"""The law for `pixel`: N ranks do what one rank does with the same cells. And how far that is from `single`."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from ns_multigpu.cells.options import PixelOptions
from ns_multigpu.core.strategy import Strategy
from ns_multigpu.core.world import World
from ns_multigpu.primitives.gaussians.functions import Gaussians
from strategies.pixel import pixel
from tests.ranks import run_ranks, skip_without_gpus
from tests.strategies.test_law import PRIMITIVES, Outcome, check, one_step, stitch, take_step
from tests.strategies.test_law_steps import CUT, KERNELS, MODES, PORTRAIT, check_outcomes, take_one

VIEWS, POINTS = 5, 150


def strategy_of(cells: int, world: World) -> Strategy:
    return pixel(world, PixelOptions(cells=cells))


def step_of(cells: int, world: World, primitive: str, views: int, points: int, dtype: torch.dtype, *rest: Any) -> Outcome:
    return take_step(strategy_of(cells, world), primitive, views, points, dtype, *rest)


@pytest.mark.parametrize("primitive", PRIMITIVES)
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_ranks_equal_one_with_the_same_cells(ranks: int, primitive: str) -> None:
    dtype = torch.float64 if primitive == "gaussians" else torch.float32
    step = partial(step_of, ranks)
    expected = step(World.single(), primitive, VIEWS, POINTS, dtype)
    assert sum(float(image.std()) > 0.02 for image in stitch(expected["images"]).values()) >= 4
    check(run_ranks(step, ranks, primitive, VIEWS, POINTS, dtype), expected, dtype)


@pytest.mark.parametrize(("ranks", "cells"), [(2, 5), (3, 4)])
def test_a_rank_may_have_several_cells(ranks: int, cells: int) -> None:
    step = partial(step_of, cells)
    expected = step(World.single(), "gaussians", VIEWS, POINTS, torch.float64)
    check(run_ranks(step, ranks, "gaussians", VIEWS, POINTS, torch.float64), expected, torch.float64)


def test_one_cell_is_single() -> None:
    expected = one_step(World.single(), "single", "gaussians", VIEWS, POINTS, torch.float64)
    check([step_of(1, World.single(), "gaussians", VIEWS, POINTS, torch.float64)], expected, torch.float64)
    assert pixel(World.single()).placement.kind == "ByCells 1", "the default"
    with pytest.raises(ValueError, match=r"cells 1: each of the 2 GPUs wants a cell at least\. Give 2 or more"):
        strategy_of(1, replace(World.single(), size=2))


@pytest.mark.parametrize(("views", "points", "size"), [(2, 40, None), (1, 0, None), (3, 1, None), (1, 60, (40, 14))])
def test_ranks_without_points_or_pixels(views: int, points: int, size: tuple[int, int] | None) -> None:
    """Cells without points, models without any, a view that sees no cell, and one row of tiles for all ranks."""
    step = partial(step_of, 3)
    expected = step(World.single(), "gaussians", views, points, torch.float64, size)
    check(run_ranks(step, 3, "gaussians", views, points, torch.float64, size), expected, torch.float64)


def fused_step(cells: int, world: World, primitive: str, mode: str, size: tuple[int, int]) -> Outcome:
    kind = PRIMITIVES[primitive]()
    assert isinstance(kind, Gaussians)
    return take_one(strategy_of(cells, world), kind, CUT, size, mode)


def check_fused(outcomes: list[Outcome], cells: int, primitive: str, size: tuple[int, int]) -> None:
    expected = step_of(cells, World.single(), primitive, CUT, POINTS, torch.float32, size)
    check_outcomes(outcomes, expected, CUT, size, replicated=False)


@pytest.mark.parametrize(("ranks", "cells"), [(1, 1), (1, 3), (2, 2), (2, 3), (3, 3), (4, 4)])
@pytest.mark.parametrize("mode", MODES)
def test_a_step_equals_one_rank_with_the_same_cells(mode: str, ranks: int, cells: int) -> None:
    primitive = KERNELS[ranks % len(KERNELS)]
    outcomes = run_ranks(partial(fused_step, cells), ranks, primitive, mode, PORTRAIT)
    check_fused(outcomes, cells, primitive, PORTRAIT)


@pytest.mark.gpu
@pytest.mark.parametrize(("ranks", "cells"), [(1, 3), (2, 2), (2, 3), (3, 3), (4, 4)])
@pytest.mark.parametrize("mode", ["autograd", *MODES])
def test_the_law_on_gpus(mode: str, ranks: int, cells: int) -> None:
    skip_without_gpus(ranks)
    if mode == "autograd":
        step, rest = partial(step_of, cells), ("gaussians", VIEWS, POINTS, torch.float32)
        check(run_ranks(step, ranks, *rest, device="cuda"), step(World.single("cuda:0"), *rest), torch.float32)
        return
    for primitive in KERNELS:
        outcomes = run_ranks(partial(fused_step, cells), ranks, primitive, mode, PORTRAIT, device="cuda")
        check_fused(outcomes, cells, primitive, PORTRAIT)
