"""The law for pose corrections: fused steps equal ordinary steps of one rank, in each mode."""

import pytest
import torch
from nerfstudio.cameras.camera_optimizers import CameraOptimizer, CameraOptimizerConfig

from ns_multigpu.core.dist.world import World
from ns_multigpu.core.step.poses import Mode
from strategies import STRATEGIES
from tests.lib.ranks import run_ranks
from tests.strategies.scene import make_corrections
from tests.strategies.test_law import LIKE_SINGLE, Outcome, points_of, take_step
from tests.strategies.test_law_steps import MODES, POINTS, PORTRAIT, check_outcomes, count_of, take_one


def optimizer_of(views: int, pose: Mode) -> CameraOptimizer:
    config = CameraOptimizerConfig(mode=pose, trans_l2_penalty=0.3, rot_l2_penalty=0.2)
    made = CameraOptimizer(config, views + 3, "cpu")
    made.pose_adjustment.data = make_corrections(views, torch.float32)
    return made


def fused(
    world: World, strategy: str, mode: str, pose: Mode, primitive: str = "gaussians", exposes: bool = False
) -> Outcome:
    kind, whole = points_of(primitive, POINTS, torch.float32, world.device)
    count = count_of(strategy)
    return take_one(
        STRATEGIES[strategy](world), kind, count, PORTRAIT, mode, whole=whole, exposes=exposes, layered=exposes,
        corrects=optimizer_of(count, pose),
    )  # fmt: skip


def check_fused(
    outcomes: list[Outcome], strategy: str, pose: Mode, primitive: str = "gaussians", exposes: bool = False
) -> None:
    """Return whether ranks together did what one rank does through autograd."""
    single, count = STRATEGIES["single"](World.single()), count_of(strategy)
    expected = take_step(
        single, primitive, count, POINTS, torch.float32, PORTRAIT, exposes=exposes, layered=exposes,
        corrects=optimizer_of(count, pose),
    )  # fmt: skip
    wanted = expected["poses"]
    assert float(wanted["corrections"].abs().amax(1).sort().values[2]) > 1e-4, "all corrections but one are not zero"
    for outcome in outcomes:
        for name, gradient in wanted.items():
            found = outcome["gradients"].pop(name)
            torch.testing.assert_close(found, gradient, rtol=1e-4, atol=2e-5 * float(gradient.abs().max()))
            assert torch.equal(found, outcomes[0].setdefault(name, found)), "each rank takes the same step"
    replicated = STRATEGIES[strategy](World.single()).placement.replicated
    check_outcomes(outcomes, expected, count, PORTRAIT, replicated=replicated)


@pytest.mark.parametrize(
    ("strategy", "ranks", "pose"),
    [
        ("single", 1, "SO3xR3"), ("single", 1, "SE3"),
        *((name, ranks, "SE3" if ranks == 3 else "SO3xR3") for name in LIKE_SINGLE for ranks in (2, 3)),
    ],
)  # fmt: skip
@pytest.mark.parametrize("mode", MODES)
def test_a_fused_step_equals_single(strategy: str, ranks: int, pose: Mode, mode: str) -> None:
    exposes = mode == "captured" and ranks == 2
    outcomes = run_ranks(fused, ranks, strategy, mode, pose, "gaussians", exposes)
    check_fused(outcomes, strategy, pose, exposes=exposes)
