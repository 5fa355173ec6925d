"""Steps of replicas and of shards with compact moments: near those with full ones, the same on all ranks."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from cuda_ext.ops.optim.lazy_adam import LazyAdam
from ns_multigpu.core.assign.plan import Plan
from ns_multigpu.core.dist.world import World
from ns_multigpu.core.step.step import Step
from ns_multigpu.core.step.step_settings import StepSettings
from ns_multigpu.core.types import Patch
from ns_multigpu.primitives.gaussians.schema import ORDER
from tests.primitives.training_runs import (
    HEIGHT,
    LAMBDA,
    RATES,
    WIDTH,
    TrainingRun,
    batch_of,
    ordinary,
    scalars,
    step_of,
    take,
    together,
)
from tests.strategies.scene import make_image, make_points

BF16 = torch.bfloat16
STEPS = 8


def assert_near(ours: dict[str, Tensor], full: dict[str, Tensor], points: int) -> None:
    start = {k: v.detach() for k, v in make_points(points, torch.float32, torch.device("cpu")).params.items()}
    torch.testing.assert_close(ours["losses"], full["losses"], rtol=5e-3, atol=1e-5)
    assert (ours["count"] != full["count"]).float().mean() < 0.02, "of points at a rim"
    for name in RATES:
        apart, moved = (ours[name] - full[name]).abs().mean(), (full[name] - start[name]).abs().mean()
        assert 0 < float(apart) < 0.05 * float(moved), name
        v, w = full[f"v of {name}"], ours[f"v of {name}"]
        assert w.dtype == BF16 and v.dtype == torch.float32
        assert (w.float() - v).norm() < 0.03 * v.norm(), name


def check(run: TrainingRun, ranks: int, device: str = "cpu") -> None:
    assert_near(together(run, take(run, ranks, device)), ordinary(run, device), run.points)


def of(strategy: str, batch: int, lazy: bool, **options: Any) -> TrainingRun:
    return TrainingRun(strategy, batch, STEPS, lazy=lazy, moment=BF16, **options)


@pytest.mark.parametrize(("ranks", "lazy"), [(1, True), (2, False)])
def test_replicas(ranks: int, lazy: bool) -> None:
    check(of("batch", ranks, lazy), ranks)


@pytest.mark.parametrize(("ranks", "transport"), [(1, "own"), (2, "collective")])
def test_shards(ranks: int, transport: str) -> None:
    check(of("tile", 2, True, capacities=(1024, 1024, 4096), transport=transport), ranks)


def test_capacity_exceeded_while_steps_are_deferred() -> None:
    """Only a retried step lies between the same roundings: results are bitwise the same."""
    run = of("batch", 1, True)
    (plenty,) = take(run, 1)
    rows, _, intersections = plenty["first"].tolist()
    (tight,) = take(replace(run, capacities=(rows, 1024, intersections)), 1)
    assert int(tight["redone"]) >= 1 and int(tight["deferred"]) >= 1
    for name in (*RATES, *(f"v of {name}" for name in RATES)):
        assert torch.equal(tight[name], plenty[name]), name


# ---- on GPUs ----


@pytest.mark.gpu
@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize("ranks", [1, 2])
def test_replicas_on_gpus(ranks: int, lazy: bool) -> None:
    check(of("batch", ranks, lazy, points=3000), ranks, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize(("ranks", "transport"), [(1, "own"), (2, "collective"), (2, "peer")])
def test_shards_on_gpus(ranks: int, transport: str) -> None:
    check(of("tile", 2, True, capacities=(1024, 1024, 4096), points=3000, transport=transport), ranks, "cuda")


def _made(device: torch.device) -> Step:
    params = {k: v.detach().clone() for k, v in make_points(3000, torch.float32, device).params.items()}
    moments = {k: (torch.zeros_like(v, dtype=BF16), torch.zeros_like(v, dtype=BF16)) for k, v in params.items()}
    settings = StepSettings(WIDTH, HEIGHT, 1, LAMBDA, 4096, 1, 32768)
    lazy = LazyAdam.make(3000, device)
    return step_of(World.single(device), "single", params, settings, moments=moments, lazy=lazy)


@pytest.mark.gpu
def test_a_step_in_a_graph() -> None:
    """Captured once and replayed, every step draws new rounding, as launched steps do."""
    device = torch.device("cuda")
    plain, graphed, warm = _made(device), _made(device), _made(device)
    target = torch.zeros(HEIGHT, WIDTH, 3, device=device)

    def set_inputs(one: Step, step: int) -> None:
        view = batch_of(step, 1, device)[0]
        one.viewmats[0], one.Ks[0] = view.viewmat, view.K
        target.copy_(make_image(view).to(device).float() / 255)
        one.scalars.copy_(scalars(step + 1))

    def take_one(one: Step) -> None:
        one.take(Plan.of([[Patch(0, 0, 0, WIDTH, HEIGHT)]]), [target])

    for one in (warm, graphed):
        set_inputs(one, 0)
    take_one(warm)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        take_one(graphed)
    for step in range(STEPS):
        for one in (plain, graphed):
            set_inputs(one, step)
        take_one(plain)
        graph.replay()
    for one in (plain, graphed):
        one.flush()
        status = one.status()
        assert (status.done, status.full) == (STEPS, False)
    start = make_points(3000, torch.float32, device).params
    for k, name in enumerate(ORDER):
        # Gradients of a pixel's splats are summed in whatever order: nearly the same, not to the bit.
        a, b = plain._model.params[k], graphed._model.params[k]
        moved = (a - start[name].detach().view_as(a)).abs().mean()
        assert float((a - b).abs().mean()) < 0.05 * float(moved), name
        for one, other in (
            (plain._model.exp_avgs, graphed._model.exp_avgs),
            (plain._model.exp_avg_sqs, graphed._model.exp_avg_sqs),
        ):
            v, w = one[k].float(), other[k].float()
            assert (v - w).norm() < 0.05 * v.norm() and v.norm() > 0, name
