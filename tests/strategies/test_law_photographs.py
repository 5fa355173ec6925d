"""The law for photographs with alpha channels and masks: fused steps equal ordinary steps of one rank, in each mode."""

import pytest
import torch

from ns_multigpu.core.dist.world import World
from strategies import STRATEGIES
from tests.lib.ranks import run_ranks, skip_without_gpus
from tests.strategies.test_law import LIKE_SINGLE, Outcome, points_of, take_step
from tests.strategies.test_law_steps import MODES, POINTS, check_outcomes, count_of, take_one


def fused(world: World, strategy: str, mode: str, exposes: bool) -> Outcome:
    kind, whole = points_of("gaussians", POINTS, torch.float32, world.device)
    spread = STRATEGIES[strategy](world)
    return take_one(spread, kind, count_of(strategy), None, mode, whole=whole, exposes=exposes, layered=True)


def check_fused(outcomes: list[Outcome], strategy: str, exposes: bool) -> None:
    """Return whether ranks together did what one rank does through autograd."""
    single, count = STRATEGIES["single"](World.single()), count_of(strategy)
    given = (single, "gaussians", count, POINTS, torch.float32)
    expected = take_step(*given, exposes=exposes, layered=True)
    plain = take_step(*given, exposes=exposes)
    assert abs(float(expected["loss"] - plain["loss"])) > 0.01, "layers matter"
    replicated = STRATEGIES[strategy](World.single()).placement.replicated
    for outcome in outcomes:
        if exposes:
            found, by_gains = outcome["gradients"].pop("exposures"), expected["poses"]["exposures"]
            torch.testing.assert_close(found, by_gains, rtol=1e-4, atol=2e-5 * float(by_gains.abs().max()))
    check_outcomes(outcomes, expected, count, None, replicated=replicated)


@pytest.mark.parametrize(
    ("strategy", "ranks", "mode"),
    [
        ("single", 1, "captured"),
        *((name, ranks, MODES[ranks - 2]) for name in (*LIKE_SINGLE, "pixel") for ranks in (2, 3)),
    ],
)
def test_a_fused_step_equals_single(strategy: str, ranks: int, mode: str) -> None:
    exposes = ranks != 2
    check_fused(run_ranks(fused, ranks, strategy, mode, exposes), strategy, exposes)


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("strategy", [*LIKE_SINGLE, "pixel"])
def test_a_fused_step_equals_single_on_gpus(strategy: str, mode: str, ranks: int) -> None:
    skip_without_gpus(ranks)
    check_fused(run_ranks(fused, ranks, strategy, mode, True, device="cuda"), strategy, True)
