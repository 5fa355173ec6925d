"""The law for 2D Gaussians: all that they render, their losses and all gradients are those of one rank."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from ns_multigpu.core.dist.world import World
from ns_multigpu.core.types import Points
from ns_multigpu.primitives.surfels.functions import Surfels
from ns_multigpu.primitives.surfels.schema import CHANNELS
from strategies import STRATEGIES
from tests.lib.ranks import run_ranks, skip_without_gpus
from tests.strategies.scene import make_points
from tests.strategies.test_law import Outcome, check, stitch, take_step
from tests.strategies.test_law_steps import POINTS, PORTRAIT, check_outcomes, count_of, take_one

CASES = [("batch", 2), ("tile", 3), ("locality", 2)]
ALL = Surfels(sh_degree=3, depth=True, channels=CHANNELS)
PLAIN = Surfels(sh_degree=2, depth=True)


def surfels(count: int, dtype: torch.dtype, device: Any = "cpu") -> Points:
    params = {name: value.detach() for name, value in make_points(count, dtype, device).params.items()}
    params["scales"] = params["scales"][:, :2] + 0.3
    return Points({name: value.clone().requires_grad_() for name, value in params.items()})


def step(
    world: World, strategy: str, views: int, points: int, dtype: torch.dtype = torch.float64, kind: Surfels = ALL
) -> Outcome:
    made = surfels(points, dtype, world.device)
    return take_step(STRATEGIES[strategy](world), "surfels", views, points, dtype, kind=(kind, made))


@pytest.mark.parametrize(("strategy", "size"), CASES)
def test_equals_single(strategy: str, size: int) -> None:
    expected = step(World.single(), "single", 5, 120)
    assert sum(float(image.std()) > 0.02 for image in stitch(expected["images"]).values()) >= 4
    assert sum(float(deep[..., 4].max()) > 0.01 for deep in stitch(expected["depths"]).values()) >= 3  # distortion
    assert all(float(gradient.abs().sum()) > 0 for gradient in expected["gradients"].values())
    assert float(expected["statistics"][0].sum()) > 0
    check(run_ranks(step, size, strategy, 5, 120), expected, torch.float64)


@pytest.mark.parametrize(("views", "points"), [(1, 0), (2, 1)])
def test_ranks_without_views_and_models_without_points(views: int, points: int) -> None:
    expected = step(World.single(), "single", views, points)
    check(run_ranks(step, 3, "tile", views, points), expected, torch.float64)


def test_pixel_equals_single_without_further_channels_and_refuses_them() -> None:
    plain = partial(step, kind=PLAIN)
    expected = plain(World.single(), "single", 4, 120)
    check(run_ranks(plain, 2, "pixel", 4, 120), expected, torch.float64)
    with pytest.raises(ValueError, match="normals, distortion, median cannot be put together"):
        step(World.single(), "pixel", 2, 10)


LOSSES = {"normals": 1.0, "distortion": 0.1}
"""The weights of `take_step`."""
STEPS = [("single", 1, "captured"), ("batch", 3, "captured"), ("tile", 3, "captured"), ("locality", 2, "step")]


def fused_step(
    world: World, strategy: str, mode: str, losses: dict[str, float], by_sort: bool = False, half: bool | None = None,
    kind: Surfels = PLAIN,
) -> Outcome:  # fmt: skip
    whole = surfels(POINTS, torch.float32, world.device)
    return take_one(
        STRATEGIES[strategy](world), kind, count_of(strategy), PORTRAIT, mode, by_sort, half, whole, losses=losses
    )  # fmt: skip


def check_fused(outcomes: list[Outcome], strategy: str, losses: dict[str, float], kind: Surfels = PLAIN) -> None:
    """Return whether ranks together did what one rank does through autograd."""
    kind = replace(kind, channels=("normals", "distortion") if losses else ())
    made, count = surfels(POINTS, torch.float32), count_of(strategy)
    spread = STRATEGIES["single"](World.single())
    expected = take_step(spread, "surfels", count, POINTS, torch.float32, PORTRAIT, kind=(kind, made))
    replicated = STRATEGIES[strategy](World.single()).placement.replicated
    check_outcomes(outcomes, expected, count, PORTRAIT, replicated=replicated)


@pytest.mark.parametrize(("strategy", "ranks", "mode"), STEPS)
def test_a_fused_step_equals_single(strategy: str, ranks: int, mode: str) -> None:
    check_fused(run_ranks(fused_step, ranks, strategy, mode, LOSSES), strategy, LOSSES)


def test_a_fused_step_without_losses_and_with_sorted_lists() -> None:
    check_fused(run_ranks(fused_step, 2, "tile", "step", {}, True), "tile", {})


def test_a_fused_step_of_plain_colours() -> None:
    kind = replace(PLAIN, sh_degree=None)
    check_fused(run_ranks(partial(fused_step, kind=kind), 2, "batch", "captured", {}), "batch", {}, kind)


@pytest.mark.gpu
@pytest.mark.parametrize("losses", [LOSSES, {}], ids=["losses", "plain"])
@pytest.mark.parametrize(("strategy", "ranks", "mode"), STEPS)
def test_a_fused_step_equals_single_on_gpus(strategy: str, ranks: int, mode: str, losses: dict[str, float]) -> None:
    skip_without_gpus(ranks)
    check_fused(run_ranks(fused_step, ranks, strategy, mode, losses, device="cuda"), strategy, losses)


@pytest.mark.gpu
@pytest.mark.parametrize(("strategy", "size"), CASES)
def test_equals_single_on_gpus(strategy: str, size: int) -> None:
    skip_without_gpus(size)
    expected = step(World.single("cuda:0"), "single", 5, 120, torch.float32)
    outcomes = run_ranks(step, size, strategy, 5, 120, torch.float32, device="cuda")
    check(outcomes, expected, torch.float32)
