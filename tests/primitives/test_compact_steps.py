"""Fused steps and steps of shards with compact moments: near those with full ones, the same on all ranks."""

from typing import Any

import pytest
import torch
from torch import Tensor

from cuda_ext.ops.adam import adam_scalars
from cuda_ext.ops.lazy_adam import LazyAdam
from ns_multigpu.core.world import World
from ns_multigpu.primitives.fused_step import ORDER, FusedStep, StepSettings
from tests.primitives.test_fused_step import HEIGHT, LAMBDA, RATES, WIDTH, batch_of, fused, ordinary
from tests.primitives.test_tile_step import sharded
from tests.ranks import run_ranks, skip_without_gpus
from tests.strategies.scene import make_image, make_points

BF16 = torch.bfloat16
STEPS = 8
ROOM = (1024, 1024, 4096)


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


def whole(outcomes: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The model of ranks that each have a part."""
    names = [*RATES, *(f"v of {name}" for name in RATES), "count"]
    losses = torch.stack([o["losses"] for o in outcomes]).sum(0)
    return {name: torch.cat([o[name] for o in outcomes]) for name in names} | {"losses": losses}


def of_replicas(ranks: int, lazy: bool, points: int, device: str = "cpu") -> None:
    outcomes = run_ranks(fused, ranks, points, 1, STEPS, False, 0, 0, lazy, BF16, device=device)
    for other in outcomes[1:]:
        for name in (*RATES, *(f"v of {name}" for name in RATES)):
            assert torch.equal(other[name], outcomes[0][name]), f"{name} differs between ranks"
    losses = torch.stack([o["losses"] for o in outcomes]).sum(0)
    assert_near({**outcomes[0], "losses": losses}, ordinary(points, ranks, STEPS, False, device), points)


def of_shards(ranks: int, lazy: bool, points: int, transport: str, device: str = "cpu") -> None:
    arguments = (2, STEPS, False, None, ROOM, lazy, transport, False, points, BF16)
    outcomes = run_ranks(sharded, ranks, *arguments, device=device)
    assert_near(whole(outcomes), ordinary(points, 2, STEPS, False, device), points)


@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize("ranks", [1, 2])
def test_replicas(ranks: int, lazy: bool) -> None:
    of_replicas(ranks, lazy, 300)


@pytest.mark.parametrize(
    ("ranks", "transport", "lazy"), [(1, "own", True), (2, "collective", True), (2, "collective", False)]
)
def test_shards(ranks: int, transport: str, lazy: bool) -> None:
    of_shards(ranks, lazy, 300, transport)


def test_a_capacity_exceeded_while_steps_are_put_off() -> None:
    """A step that is taken again, and nothing else, between the same roundings: the same bits."""
    plenty = run_ranks(fused, 1, 300, 1, STEPS, False, 0, 0, True, BF16)
    tight = run_ranks(fused, 1, 300, 1, STEPS, False, *plenty[0]["first"].tolist(), True, BF16)
    assert int(tight[0]["redone"]) >= 1 and int(tight[0]["put off"]) >= 1
    for name in (*RATES, *(f"v of {name}" for name in RATES)):
        assert torch.equal(tight[0][name], plenty[0][name]), name


# ---- on GPUs ----


@pytest.mark.gpu
@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize("ranks", [1, 2])
def test_replicas_on_gpus(ranks: int, lazy: bool) -> None:
    skip_without_gpus(ranks)
    of_replicas(ranks, lazy, 3000, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize(("ranks", "transport"), [(1, "own"), (2, "collective"), (2, "atomics"), (2, "transfer")])
def test_shards_on_gpus(ranks: int, transport: str) -> None:
    skip_without_gpus(ranks)
    of_shards(ranks, True, 3000, transport, "cuda")


def _made(device: torch.device) -> FusedStep:
    params = {k: v.detach().clone() for k, v in make_points(3000, torch.float32, device).params.items()}
    moments = {k: (torch.zeros_like(v, dtype=BF16), torch.zeros_like(v, dtype=BF16)) for k, v in params.items()}
    settings = StepSettings(WIDTH, HEIGHT, 1, 2, False, False, LAMBDA, 4096, 32768)
    return FusedStep(
        params, moments, {}, settings, World.single(device), torch.float32, lazy=LazyAdam.make(3000, device)
    )


@pytest.mark.gpu
def test_a_step_in_a_graph() -> None:
    """Captured once and replayed, it goes on rounding anew in every step, as the step that is launched does."""
    device = torch.device("cuda")
    plain, graphed, warm = _made(device), _made(device), _made(device)

    def feed(one: FusedStep, step: int) -> None:
        view = batch_of(step, 1, device)[0]
        one.viewmats[0], one.Ks[0], one.targets[0] = view.viewmat, view.K, make_image(view).to(device)
        lines = [adam_scalars(RATES[name], (0.9, 0.999), 1e-15, step + 1) for name in ORDER]
        one.scalars.copy_(torch.tensor(lines))

    def take(one: Any) -> None:
        one.render()
        one.update()

    for one in (warm, graphed):
        feed(one, 0)
    take(warm)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        take(graphed)
    for step in range(STEPS):
        for one in (plain, graphed):
            feed(one, step)
        take(plain)
        graph.replay()
    for one in (plain, graphed):
        one.flush()
        status = one.status()
        assert (status.done, status.full) == (STEPS, False)
    start = make_points(3000, torch.float32, device).params
    for k, name in enumerate(ORDER):
        # Gradients of a pixel's splats are summed in whatever order: nearly the same, not to the bit.
        a, b = plain._params[k], graphed._params[k]
        moved = (a - start[name].detach().view_as(a)).abs().mean()
        assert float((a - b).abs().mean()) < 0.05 * float(moved), name
        for i in (0, 1):
            v, w = plain._moments[i][k].float(), graphed._moments[i][k].float()
            assert (v - w).norm() < 0.05 * v.norm() and v.norm() > 0, name
