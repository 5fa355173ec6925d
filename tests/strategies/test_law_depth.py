"""The law for the loss of depth: with it a step's loss, pixels and gradients are those of one rank, in each mode and of
each primitive."""

from dataclasses import replace
from typing import Any, cast

import pytest
import torch

from ns_multigpu.core.dist.world import World
from ns_multigpu.core.types import Points
from strategies import STRATEGIES
from tests.lib.ranks import DEVICES, run_ranks
from tests.strategies.test_law import DEPTH_WEIGHT, Outcome, check, points_of, take_step
from tests.strategies.test_law_steps import POINTS, PORTRAIT, check_outcomes, count_of, take_one

ABSGRAD = "gaussians, antialiased, absgrad"
CASES = [
    ("2dgs", "tile", 3), ("2dgs", "pixel", 2), ("gaussians", "locality", 2), ("4D gaussians", "batch", 2),
    ("convex", "tile", 2),
]  # fmt: skip
STEPS = [
    ("gaussians", "single", 1, "captured"), ("gaussians", "locality", 2, "step"),
    ("gaussians", "batch", 2, "captured"), ("gaussians", "pixel", 2, "captured"), (ABSGRAD, "tile", 2, "step"),
    ("4D gaussians", "tile", 2, "captured"), ("2dgs", "tile", 3, "captured"), ("2dgs", "batch", 2, "captured"),
    ("convex", "tile", 2, "captured"),
]  # fmt: skip
FUSED: Any = {"depth": True, "capacities": {"depth_weight": DEPTH_WEIGHT}}
"""Options of `take_one`."""


def kind_of(name: str, count: int, dtype: torch.dtype, device: Any = "cpu") -> tuple[Any, Points]:
    kind, points = points_of(name, count, dtype, device)
    return replace(cast(Any, kind), depth=True), points


def step(
    world: World, name: str, strategy: str, views: int, points: int, dtype: torch.dtype, observes: bool = True
) -> Outcome:
    kind = kind_of(name, points, dtype, world.device)
    return take_step(STRATEGIES[strategy](world), name, views, points, dtype, kind=kind, observes=observes)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("name", "strategy", "size"), CASES)
def test_equals_single(name: str, strategy: str, size: int, device: str) -> None:
    dtype, alone = (torch.float64, World.single()) if device == "cpu" else (torch.float32, World.single("cuda:0"))
    outcomes = run_ranks(step, size, name, strategy, 4, 90, dtype, device=device)
    expected, without = (step(alone, name, "single", 4, 90, dtype, observes) for observes in (True, False))
    assert float(expected["loss"] - without["loss"]) > 0.02
    for group in ("gradients", "poses"):  # the scene shows a difference
        apart = [float((expected[group][k] - without[group][k]).abs().max()) for k in expected[group]]
        assert max(apart) > 0.05 * max(float(value.abs().max()) for value in without[group].values())
    check(outcomes, expected, dtype)


def fused_step(world: World, name: str, strategy: str, mode: str, half: bool | None = None) -> Outcome:
    kind, whole = kind_of(name, POINTS, torch.float32, world.device)
    return take_one(
        STRATEGIES[strategy](world), kind, count_of(strategy), PORTRAIT, mode, half=half, whole=whole, observes=True,
        **FUSED,
    )  # fmt: skip


def check_fused(outcomes: list[Outcome], name: str, strategy: str) -> None:
    """Return whether ranks together did what one rank does through autograd."""
    kind, count = kind_of(name, POINTS, torch.float32), count_of(strategy)
    spread = STRATEGIES["single"](World.single())
    expected = take_step(spread, name, count, POINTS, torch.float32, PORTRAIT, kind=kind, observes=True)
    replicated = STRATEGIES[strategy](World.single()).placement.replicated
    check_outcomes(outcomes, expected, count, PORTRAIT, replicated=replicated, sized=name != "convex")


@pytest.mark.parametrize(("name", "strategy", "ranks", "mode"), STEPS)
def test_a_fused_step_equals_single(name: str, strategy: str, ranks: int, mode: str) -> None:
    check_fused(run_ranks(fused_step, ranks, name, strategy, mode), name, strategy)


@pytest.mark.gpu
@pytest.mark.parametrize("half", [None, False], ids=["peer", "collective"])
@pytest.mark.parametrize(("name", "strategy", "ranks", "mode"), STEPS)
def test_a_fused_step_equals_single_on_gpus(name: str, strategy: str, ranks: int, mode: str, half: bool | None) -> None:
    check_fused(run_ranks(fused_step, ranks, name, strategy, mode, half, device="cuda"), name, strategy)


def narrow_step(world: World) -> Outcome:
    (kind, whole), tile = points_of("2dgs", POINTS, torch.float32, world.device), STRATEGIES["tile"](world)
    return take_one(tile, kind, 1, (45, 30), "step", whole=whole, observes=True, **FUSED)


def test_a_rank_without_pixels_takes_part_in_a_fused_step() -> None:
    """Two rows of tiles for three ranks."""
    outcomes = run_ranks(narrow_step, 3)
    assert sorted(len(outcome["images"]) for outcome in outcomes) == [0, 1, 1]
    single = STRATEGIES["single"](World.single())
    expected = take_step(single, "2dgs", 1, POINTS, torch.float32, (45, 30), observes=True)
    check_outcomes(outcomes, expected, 1, (45, 30), replicated=False)
