"""Splats that reach into other cells as ghosts: any cells, on any number of ranks, are `single`."""

from functools import partial

import pytest
import torch

from ns_multigpu.cells.options import PixelOptions
from ns_multigpu.core.strategy import Strategy
from ns_multigpu.core.world import World
from ns_multigpu.primitives.gaussians.functions import Gaussians
from strategies.pixel import pixel
from tests.ranks import run_ranks, skip_without_gpus
from tests.strategies.test_law import PRIMITIVES, Outcome, check, one_step, take_step
from tests.strategies.test_law_steps import CUT, KERNELS, MODES, PORTRAIT, check_outcomes, take_one

VIEWS, POINTS = 5, 150


def strategy_of(cells: int, world: World) -> Strategy:
    return pixel(world, PixelOptions(cells=cells, crossing="ghosts"))


def step_of(
    cells: int, world: World, primitive: str, views: int, points: int, dtype: torch.dtype,
    size: tuple[int, int] | None = None,
) -> Outcome:  # fmt: skip
    return take_step(strategy_of(cells, world), primitive, views, points, dtype, size)


@pytest.mark.parametrize(("ranks", "cells", "primitive"), [
    (1, 5, "gaussians"), (2, 2, "gaussians, antialiased, absgrad"), (2, 5, "gaussians"), (3, 3, "gaussians"),
    (4, 4, "gaussians, plain colours"),
])  # fmt: skip
def test_any_cells_are_single(ranks: int, cells: int, primitive: str) -> None:
    dtype = torch.float64 if primitive == "gaussians" else torch.float32
    expected = one_step(World.single(), "single", primitive, VIEWS, POINTS, dtype)
    check(run_ranks(partial(step_of, cells), ranks, primitive, VIEWS, POINTS, dtype), expected, dtype)


@pytest.mark.parametrize(("views", "points", "size"), [(2, 40, None), (1, 0, None), (3, 1, None), (1, 60, (40, 14))])
def test_ranks_without_points_or_pixels(views: int, points: int, size: tuple[int, int] | None) -> None:
    expected = one_step(World.single(), "single", "gaussians", views, points, torch.float64, size)
    step = partial(step_of, 3)
    check(run_ranks(step, 3, "gaussians", views, points, torch.float64, size), expected, torch.float64)


def fused_step(cells: int, world: World, primitive: str, mode: str, size: tuple[int, int]) -> Outcome:
    kind = PRIMITIVES[primitive]()
    assert isinstance(kind, Gaussians)
    return take_one(strategy_of(cells, world), kind, CUT, size, mode)


def check_fused(outcomes: list[Outcome], primitive: str, size: tuple[int, int]) -> None:
    expected = one_step(World.single(), "single", primitive, CUT, POINTS, torch.float32, size)
    check_outcomes(outcomes, expected, CUT, size, replicated=False)


@pytest.mark.parametrize(("ranks", "cells"), [(1, 3), (2, 2), (2, 3), (4, 4)])
@pytest.mark.parametrize("mode", MODES)
def test_a_step_is_singles(mode: str, ranks: int, cells: int) -> None:
    primitive = KERNELS[ranks % len(KERNELS)]
    check_fused(run_ranks(partial(fused_step, cells), ranks, primitive, mode, PORTRAIT), primitive, PORTRAIT)


@pytest.mark.gpu
@pytest.mark.parametrize(("ranks", "cells"), [(1, 3), (2, 2), (2, 3), (4, 4)])
@pytest.mark.parametrize("mode", ["autograd", *MODES])
def test_single_on_gpus(mode: str, ranks: int, cells: int) -> None:
    skip_without_gpus(ranks)
    if mode == "autograd":
        rest = ("gaussians", VIEWS, POINTS, torch.float32)
        expected = one_step(World.single("cuda:0"), "single", *rest)
        check(run_ranks(partial(step_of, cells), ranks, *rest, device="cuda"), expected, torch.float32)
        return
    for primitive in KERNELS:
        outcomes = run_ranks(partial(fused_step, cells), ranks, primitive, mode, PORTRAIT, device="cuda")
        check_fused(outcomes, primitive, PORTRAIT)
