"""The law for exposures: with gains for each view pixels, loss and gradients, also those by the gains, are
those of one rank, in each mode; and steps of other primitives have them, too."""

from typing import Any

import pytest
import torch

from ns_multigpu.core.dist.world import World
from ns_multigpu.core.step.exposures import StepExposures
from ns_multigpu.core.step.step_settings import with_halos
from ns_multigpu.core.types import Points
from ns_multigpu.primitives.surfels.functions import Surfels
from strategies import STRATEGIES
from tests.lib.ranks import run_ranks, skip_without_gpus
from tests.strategies.scene import make_gains, make_image, make_views
from tests.strategies.test_law import LIKE_SINGLE, Outcome, check, on_machines, points_of, take_step
from tests.strategies.test_law_convexes import ALL as CONVEX
from tests.strategies.test_law_convexes import convexes
from tests.strategies.test_law_steps import MODES, POINTS, PORTRAIT, check_outcomes, count_of, fill, made, take_one
from tests.strategies.test_law_surfels import surfels

STRATEGY_NAMES = [*LIKE_SINGLE, "pixel"]


PRIMITIVES = ["gaussians", "4D gaussians", "2dgs", "convex"]


def kind_of(name: str, count: int, dtype: torch.dtype, device: Any = "cpu") -> tuple[Any, Points]:
    if name == "2dgs":
        return Surfels(sh_degree=2), surfels(count, dtype, device)
    if name == "convex":
        return CONVEX, convexes(count, dtype, device)
    return points_of(name, count, dtype, device)


def step(world: World, strategy: str, name: str, dtype: torch.dtype, exposes: bool = True) -> Outcome:
    kind = kind_of(name, 90, dtype, world.device)
    return take_step(STRATEGIES[strategy](world), name, 4, 90, dtype, kind=kind, exposes=exposes)


@pytest.mark.parametrize(
    ("name", "strategy", "ranks"),
    [*(("gaussians", strategy, 3) for strategy in STRATEGY_NAMES), *((name, "tile", 2) for name in PRIMITIVES[1:])],
)
def test_equals_single(name: str, strategy: str, ranks: int) -> None:
    expected = step(World.single(), "single", name, torch.float64)
    without = step(World.single(), "single", name, torch.float64, False)
    assert abs(float(expected["loss"] - without["loss"])) > 0.002
    for of, gradient in expected["gradients"].items():  # the scene shows a difference
        assert float((gradient - without["gradients"][of]).abs().max()) > 0.01 * float(gradient.abs().max())
    check(run_ranks(step, ranks, strategy, name, torch.float64), expected, torch.float64)


def fused(world: World, strategy: str, mode: str, primitive: str = "gaussians", machines: int = 1) -> Outcome:
    spread = STRATEGIES[strategy](on_machines(world, machines) if machines > 1 else world)
    kind, whole = kind_of(primitive, POINTS, torch.float32, world.device)
    return take_one(spread, kind, count_of(strategy), PORTRAIT, mode, whole=whole, exposes=True)


def check_fused(outcomes: list[Outcome], strategy: str, primitive: str = "gaussians") -> None:
    """Return whether ranks together did what one rank does through autograd."""
    count = count_of(strategy)
    single = STRATEGIES["single"](World.single())
    kind = kind_of(primitive, POINTS, torch.float32)
    expected = take_step(single, primitive, count, POINTS, torch.float32, PORTRAIT, kind=kind, exposes=True)
    by_gains = expected["poses"]["exposures"]
    assert float(by_gains.abs().amax(1).min()) > 0, "also views that are not in the batch hold the mean"
    for outcome in outcomes:
        found = outcome["gradients"].pop("exposures")
        torch.testing.assert_close(found, by_gains, rtol=1e-4, atol=2e-5 * float(by_gains.abs().max()))
        assert torch.equal(found, outcomes[0].setdefault("gains", found)), "each rank has all gains"
    replicated = STRATEGIES[strategy](World.single()).placement.replicated
    sized = primitive != "convex"
    check_outcomes(outcomes, expected, count, PORTRAIT, replicated=replicated, sized=sized)


@pytest.mark.parametrize(
    ("strategy", "mode", "ranks"),
    [("batch", "captured", 1), *((name, mode, 2) for name in STRATEGY_NAMES for mode in MODES)],
)
def test_a_fused_step_equals_single(strategy: str, mode: str, ranks: int) -> None:
    check_fused(run_ranks(fused, ranks, strategy, mode), strategy)


@pytest.mark.parametrize(
    ("primitive", "strategy", "ranks", "mode"),
    [("4D gaussians", "tile", 3, "step"), ("2dgs", "locality", 2, "captured"), ("convex", "batch", 2, "captured")],
)
def test_a_fused_step_of_other_points_equals_single(primitive: str, strategy: str, ranks: int, mode: str) -> None:
    check_fused(run_ranks(fused, ranks, strategy, mode, primitive), strategy, primitive)


def test_a_fused_step_over_machines_equals_single() -> None:
    """Statistics of exposures are at the end of the step statistics, which other ranks forward."""
    check_fused(run_ranks(fused, 4, "locality", "captured", "gaussians", 2), "locality")


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("strategy", STRATEGY_NAMES)
def test_a_fused_step_equals_single_on_gpus(strategy: str, mode: str, ranks: int) -> None:
    skip_without_gpus(ranks)
    check_fused(run_ranks(fused, ranks, strategy, mode, device="cuda"), strategy)


def test_step_beyond_capacity_does_not_change_gains() -> None:
    spread, count = STRATEGIES["single"](World.single()), 3
    kind, held = points_of("gaussians", POINTS, torch.float32)
    views = make_views(count, torch.float32, size=PORTRAIT)
    params = {name: value.detach() for name, value in held.params.items()}
    moments = {name: (torch.zeros_like(value), torch.zeros_like(value)) for name, value in params.items()}
    gains = make_gains(count, torch.float32)
    before, firsts, seconds = gains.clone(), torch.ones_like(gains), torch.ones_like(gains)
    step_exposures = StepExposures(gains, firsts, seconds, count)
    for rows, done in ((8, 0), (2048, 1)):
        step = made(
            spread, kind, views, params, moments, {}, False, None, None, step_exposures, capacities={"rows": rows}
        )
        fill(step, views)
        step.scalars[:, 0] = 1e-3
        plan = with_halos(spread.plan_alike(views), views)
        step.take(plan, [make_image(views[patch.view]) for patch in plan.owned[0]])
        assert step.status().done == done
        assert torch.equal(gains, before) == (not done)
        assert torch.equal(firsts, torch.ones_like(gains)) == torch.equal(seconds, torch.ones_like(gains)) == (not done)
