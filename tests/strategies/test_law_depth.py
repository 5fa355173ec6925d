"""The law for the losses of depth and of normal maps: with them a step's loss, pixels and gradients are those of one
rank, in each mode and of each primitive."""

from dataclasses import replace
from typing import Any, cast

import pytest
import torch

from ns_multigpu.core.dist.world import World
from ns_multigpu.core.types import Points
from strategies import STRATEGIES
from tests.lib.ranks import DEVICES, on_gpus, run_ranks
from tests.strategies.test_law import DEPTH_WEIGHT, NORMAL_WEIGHT, Outcome, check, points_of, take_step
from tests.strategies.test_law_steps import POINTS, PORTRAIT, check_outcomes, count_of, take_one

ABSGRAD = "gaussians, antialiased, absgrad"
CASES = [
    ("2dgs", "tile", 3, "depth"), ("2dgs", "pixel", 2, "depth"), ("gaussians", "locality", 2, "depth"),
    ("4D gaussians", "batch", 2, "depth"), ("convex", "tile", 2, "depth"),
    *((name, strategy, 2, "normals") for name in ("gaussians", "2dgs") for strategy in ("batch", "tile", "locality")),
    ("gaussians", "pixel", 2, "normals"), ("convex", "tile", 3, "normals"), ("4D gaussians", "tile", 2, "normals"),
    *(("gaussians", strategy, 2, "depth normals lenses") for strategy in ("batch", "tile", "locality", "pixel")),
    ("2dgs", "tile", 3, "depth normals lenses"), ("2dgs", "pixel", 2, "depth lenses"),
    ("4D gaussians", "batch", 2, "depth lenses"), ("convex", "locality", 2, "normals lenses"),
]  # fmt: skip
STEPS = [
    ("gaussians", "single", 1, "captured", "depth"), ("gaussians", "locality", 2, "step", "depth"),
    ("gaussians", "batch", 2, "captured", "depth"), ("gaussians", "pixel", 2, "captured", "depth"),
    (ABSGRAD, "tile", 2, "step", "depth"), ("4D gaussians", "tile", 2, "captured", "depth"),
    ("2dgs", "tile", 3, "captured", "depth"), ("2dgs", "batch", 2, "captured", "depth normals"),
    ("convex", "tile", 2, "captured", "depth"),
    *(("gaussians", strategy, 2, "captured", "normals") for strategy in ("batch", "locality", "pixel")),
    ("gaussians", "single", 1, "step", "normals"), ("gaussians", "tile", 3, "captured", "depth normals"),
    *(("2dgs", strategy, 2, "captured", "normals") for strategy in ("batch", "locality")),
    ("2dgs", "tile", 3, "step", "normals"), ("convex", "batch", 2, "step", "normals"),
    ("4D gaussians", "tile", 2, "step", "normals"), ("gaussians", "single", 1, "step", "depth normals lenses"),
    *(("gaussians", strategy, 2, "captured", "depth normals lenses") for strategy in ("batch", "locality", "pixel")),
    (ABSGRAD, "tile", 3, "several", "normals lenses"), ("2dgs", "tile", 2, "captured", "depth normals lenses"),
    ("2dgs", "batch", 2, "step", "depth normals lenses"), ("2dgs", "pixel", 2, "step", "depth lenses"),
    ("4D gaussians", "tile", 2, "captured", "depth lenses"), ("convex", "batch", 2, "captured", "normals lenses"),
]  # fmt: skip


def kind_of(name: str, maps: str, count: int, dtype: torch.dtype, device: Any = "cpu") -> tuple[Any, Points]:
    kind, points = points_of(name, count, dtype, device)
    channels = {"channels": ("normals",)} if name == "2dgs" and "normals" in maps else {}
    return replace(cast(Any, kind), depth=True, **channels), points


def observed(maps: str) -> Any:
    """Return options of `take_step` and `take_one`."""
    return {"observes": "depth" in maps, "directs": "normals" in maps, "lenses": "lenses" in maps}


def fused_options(name: str, maps: str) -> Any:
    """Return options of `take_one`."""
    weights = {"depth_weight": DEPTH_WEIGHT} if "depth" in maps else {}
    losses = {"normal_map": NORMAL_WEIGHT} if name == "2dgs" and "normals" in maps else {}
    if "normals" in maps and not losses:
        weights["normal_weight"] = NORMAL_WEIGHT
    of_kernels = ({"depth": True} if weights else {}) | ({"losses": losses} if losses else {})
    return {**observed(maps), **of_kernels, "capacities": weights}


def step(
    world: World, name: str, strategy: str, views: int, points: int, dtype: torch.dtype, maps: str, counts: bool = True
) -> Outcome:
    kind = kind_of(name, maps, points, dtype, world.device)
    options = observed(maps if counts else maps.replace("depth", "").replace("normals", ""))
    return take_step(STRATEGIES[strategy](world), name, views, points, dtype, kind=kind, **options)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("name", "strategy", "size", "maps"), CASES)
def test_equals_single(name: str, strategy: str, size: int, maps: str, device: str) -> None:
    dtype, alone = (torch.float64, World.single()) if device == "cpu" else (torch.float32, World.single("cuda:0"))
    outcomes = run_ranks(step, size, name, strategy, 4, 90, dtype, maps, device=device)
    expected, without = (step(alone, name, "single", 4, 90, dtype, maps, counts) for counts in (True, False))
    assert float(expected["loss"] - without["loss"]) > 0.02
    for group in ("gradients", "poses"):  # the scene shows a difference
        apart = [float((expected[group][k] - without[group][k]).abs().max()) for k in expected[group]]
        assert max(apart) > 0.05 * max(float(value.abs().max()) for value in without[group].values())
    check(outcomes, expected, dtype)


def fused_step(world: World, name: str, strategy: str, mode: str, maps: str, half: bool | None = None) -> Outcome:
    kind, whole = kind_of(name, maps, POINTS, torch.float32, world.device)
    return take_one(
        STRATEGIES[strategy](world), kind, count_of(strategy), PORTRAIT, mode, half=half, whole=whole,
        **fused_options(name, maps),
    )  # fmt: skip


def check_fused(outcomes: list[Outcome], name: str, strategy: str, maps: str) -> None:
    """Return whether ranks together did what one rank does through autograd."""
    kind, count = kind_of(name, maps, POINTS, torch.float32), count_of(strategy)
    spread = STRATEGIES["single"](World.single())
    expected = take_step(spread, name, count, POINTS, torch.float32, PORTRAIT, kind=kind, **observed(maps))
    replicated = STRATEGIES[strategy](World.single()).placement.replicated
    check_outcomes(outcomes, expected, count, PORTRAIT, replicated=replicated, sized=name != "convex")


@pytest.mark.parametrize(("half", "device"), [(None, "cpu"), on_gpus(None), on_gpus(False)])
@pytest.mark.parametrize(("name", "strategy", "ranks", "mode", "maps"), STEPS)
def test_a_fused_step_equals_single(
    name: str, strategy: str, ranks: int, mode: str, maps: str, half: bool | None, device: str
) -> None:
    """On GPUs through peer memory, or by collectives (`half` False)."""
    outcomes = run_ranks(fused_step, ranks, name, strategy, mode, maps, half, device=device)
    check_fused(outcomes, name, strategy, maps)


def narrow_step(world: World) -> Outcome:
    (kind, whole), tile = points_of("2dgs", POINTS, torch.float32, world.device), STRATEGIES["tile"](world)
    return take_one(tile, kind, 1, (45, 30), "step", whole=whole, **fused_options("2dgs", "depth"))


def test_a_rank_without_pixels_takes_part_in_a_fused_step() -> None:
    """Two rows of tiles for three ranks."""
    outcomes = run_ranks(narrow_step, 3)
    assert sorted(len(outcome["images"]) for outcome in outcomes) == [0, 1, 1]
    single = STRATEGIES["single"](World.single())
    expected = take_step(single, "2dgs", 1, POINTS, torch.float32, (45, 30), observes=True)
    check_outcomes(outcomes, expected, 1, (45, 30), replicated=False)
