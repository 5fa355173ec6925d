"""The law for pose corrections: fused steps equal ordinary steps of one rank, in each mode."""

import pytest
import torch
from nerfstudio.cameras.camera_optimizers import CameraOptimizer, CameraOptimizerConfig

from ns_multigpu.core.dist.world import World
from ns_multigpu.core.step.poses import Mode, StepPoses
from ns_multigpu.core.step.step_settings import with_halos
from strategies import STRATEGIES
from tests.lib.ranks import run_ranks, skip_without_gpus
from tests.strategies.scene import make_corrections, make_image, make_views
from tests.strategies.test_law import LIKE_SINGLE, Outcome, on_machines, points_of, take_step
from tests.strategies.test_law_exposures import PRIMITIVES, kind_of
from tests.strategies.test_law_steps import MODES, POINTS, PORTRAIT, check_outcomes, count_of, fill, made, take_one


def optimizer_of(views: int, pose: Mode) -> CameraOptimizer:
    config = CameraOptimizerConfig(mode=pose, trans_l2_penalty=0.3, rot_l2_penalty=0.2)
    made = CameraOptimizer(config, views + 3, "cpu")
    made.pose_adjustment.data = make_corrections(views, torch.float32)
    return made


def fused(
    world: World, strategy: str, mode: str, pose: Mode, primitive: str = "gaussians", exposes: bool = False,
    machines: int = 1,
) -> Outcome:  # fmt: skip
    kind, whole = kind_of(primitive, POINTS, torch.float32, world.device)
    count, here = count_of(strategy), on_machines(world, machines) if machines > 1 else world
    return take_one(
        STRATEGIES[strategy](here), kind, count, PORTRAIT, mode, whole=whole, exposes=exposes, layered=exposes,
        corrects=optimizer_of(count, pose),
    )  # fmt: skip


def check_fused(
    outcomes: list[Outcome], strategy: str, pose: Mode, primitive: str = "gaussians", exposes: bool = False
) -> None:
    """Return whether ranks together did what one rank does through autograd."""
    single, count = STRATEGIES["single"](World.single()), count_of(strategy)
    kind = kind_of(primitive, POINTS, torch.float32)
    expected = take_step(
        single, primitive, count, POINTS, torch.float32, PORTRAIT, kind=kind, exposes=exposes, layered=exposes,
        corrects=optimizer_of(count, pose),
    )  # fmt: skip
    wanted, close = expected["poses"], 2e-5 if primitive == "gaussians" else 1e-4
    assert float(wanted["corrections"].abs().amax(1).sort().values[2]) > 1e-4, "all corrections but one are not zero"
    for outcome in outcomes:
        for name, gradient in wanted.items():
            found = outcome["gradients"].pop(name)
            torch.testing.assert_close(found, gradient, rtol=1e-4, atol=close * float(gradient.abs().max()))
            assert torch.equal(found, outcomes[0].setdefault(name, found)), "each rank takes the same step"
    if primitive != "gaussians":  # those have their laws; some are more sensitive to how matrices are rounded
        return
    replicated = STRATEGIES[strategy](World.single()).placement.replicated
    check_outcomes(outcomes, expected, count, PORTRAIT, replicated=replicated)


@pytest.mark.parametrize(
    ("strategy", "ranks", "mode", "pose"),
    [
        ("single", 1, "captured", "SE3"),
        *((name, 2, "step", "SE3") for name in LIKE_SINGLE), *((name, 3, "captured", "SO3xR3") for name in LIKE_SINGLE),
    ],
)  # fmt: skip
def test_a_fused_step_equals_single(strategy: str, ranks: int, mode: str, pose: Mode) -> None:
    exposes = ranks == 3  # and photographs have alpha and masks
    outcomes = run_ranks(fused, ranks, strategy, mode, pose, "gaussians", exposes)
    check_fused(outcomes, strategy, pose, exposes=exposes)


@pytest.mark.parametrize(
    ("primitive", "strategy", "ranks"), [("4D gaussians", "batch", 2), ("2dgs", "tile", 2), ("convex", "batch", 1)]
)
def test_a_fused_step_of_other_points_equals_single(primitive: str, strategy: str, ranks: int) -> None:
    outcomes = run_ranks(fused, ranks, strategy, "captured", "SO3xR3", primitive)
    check_fused(outcomes, strategy, "SO3xR3", primitive)


def test_a_fused_step_over_machines_equals_single() -> None:
    outcomes = run_ranks(fused, 4, "locality", "captured", "SO3xR3", "gaussians", False, 2)
    check_fused(outcomes, "locality", "SO3xR3")


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("strategy", LIKE_SINGLE)
def test_a_fused_step_equals_single_on_gpus(strategy: str, mode: str, ranks: int) -> None:
    skip_without_gpus(ranks)
    pose: Mode = "SO3xR3" if mode == "step" else "SE3"
    check_fused(run_ranks(fused, ranks, strategy, mode, pose, device="cuda"), strategy, pose)


@pytest.mark.gpu
@pytest.mark.parametrize("primitive", PRIMITIVES[1:])
def test_a_fused_step_of_other_points_equals_single_on_gpus(primitive: str) -> None:
    outcomes = run_ranks(fused, 1, "batch", "captured", "SO3xR3", primitive, device="cuda")
    check_fused(outcomes, "batch", "SO3xR3", primitive)


def test_step_beyond_capacity_does_not_change_corrections() -> None:
    spread, count = STRATEGIES["single"](World.single()), 3
    kind, held = points_of("gaussians", POINTS, torch.float32)
    views = make_views(count, torch.float32, size=PORTRAIT)
    params = {name: value.detach() for name, value in held.params.items()}
    moments = {name: (torch.zeros_like(value), torch.zeros_like(value)) for name, value in params.items()}
    corrections = make_corrections(count, torch.float32)
    before, ones = corrections.clone(), torch.ones_like(corrections)
    poses = StepPoses(corrections, ones.clone(), ones.clone(), count, "SE3", (0.3, 0.2), None)
    for rows, done in ((8, 0), (2048, 1)):
        step = made(spread, kind, views, params, moments, {}, False, poses=poses, capacities={"rows": rows})
        fill(step, views)
        step.scalars[:, 0] = 1e-3
        plan = with_halos(spread.plan_alike(views), views)
        step.take(plan, [make_image(views[patch.view]) for patch in plan.owned[0]])
        assert step.status().done == done
        assert torch.equal(corrections, before) == (not done)
        assert torch.equal(poses.exp_avg, ones) == torch.equal(poses.exp_avg_sq, ones) == (not done)
