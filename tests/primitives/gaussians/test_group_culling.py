"""Steps that cull groups of points by their boxes are those that look at each point: for every strategy, to the bit."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from cuda_ext.ops.project import boxes as operators
from ns_multigpu.core.dist.world import World
from ns_multigpu.core.kernels import Model
from ns_multigpu.core.step.step import Step
from ns_multigpu.core.step.step_settings import GROUPS_FROM, StepSettings
from ns_multigpu.core.types import Points
from ns_multigpu.primitives.gaussians.kernels import GaussianKernels
from tests.lib.ranks import run_ranks
from tests.primitives.training_runs import (
    HEIGHT,
    LAMBDA,
    WIDTH,
    Outcome,
    TrainingRun,
    assert_same_run,
    ordinary,
    step_of,
    taken,
)
from tests.strategies.scene import make_points

CAPACITIES, TIGHT = (2048, 2048, 16384), (64, 16, 64)


def make_row(count: int, dtype: torch.dtype, device: torch.device) -> Points:
    """Points in a long row, of which the views see the middle, in the order in which they stand."""
    points = make_points(count, dtype, device)
    means = points.params["means"].detach()
    means[:, 0] *= 20
    order = torch.sort(means[:, 0]).indices
    return Points({name: value.detach()[order].clone().requires_grad_() for name, value in points.params.items()})


class Hidden:
    """Counts pairs of a view and a group that are culled, while a `GaussianKernels` projects outside of graphs."""

    def __init__(self) -> None:
        self.of, self.all = 0, 0
        self._project = GaussianKernels.project

    def __enter__(self) -> "Hidden":
        def project(kernels: GaussianKernels, model: Model, cameras: Any, *rest: Any) -> Any:
            if model.boxes is not None:
                table = model.lazy and model.lazy.table
                shows = operators.box_views(
                    model.boxes, cameras.viewmats, cameras.Ks, cameras.sizes, table=table,
                    compact=model.exp_avgs[0].dtype == torch.bfloat16,
                )  # fmt: skip
                self.of += int((~shows).sum())
                self.all += shows.numel()
            return self._project(kernels, model, cameras, *rest)

        GaussianKernels.project = project  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        GaussianKernels.project = self._project  # type: ignore[method-assign]


def both(world: World, run: TrainingRun) -> tuple[Outcome, Outcome, float]:
    """With and without boxes; and which part of the pairs of a view and a group was culled."""
    plain = taken(world, run)
    if run.captured:
        return taken(world, replace(run, grouped=True)), plain, 1.0
    with Hidden() as hidden:
        boxed = taken(world, replace(run, grouped=True))
    return boxed, plain, hidden.of / max(hidden.all, 1)


CASES = [
    ("single", 1, 2, {}),
    ("batch", 2, 2, {"speed": 1000.0}),
    ("batch", 2, 2, {"lazy": True, "moment": torch.bfloat16}),
    ("tile", 1, 3, {"lazy": True, "speed": 50.0, "capacities": CAPACITIES}),
    ("tile", 2, 2, {"lazy": True, "capacities": TIGHT, "bounds": (0, 70, 700)}),
    ("tile", 3, 2, {"capacities": CAPACITIES, "bounds": (0, 0, 690, 700)}),
]


@pytest.mark.parametrize(("strategy", "ranks", "batch", "options"), CASES)
def test_run_is_bitwise_the_same(strategy: str, ranks: int, batch: int, options: dict[str, Any]) -> None:
    run = TrainingRun(strategy, batch, 6, points=700, scene=make_row, **options)
    culled = 0.0
    for boxed, plain, share in run_ranks(both, ranks, run):
        assert all(torch.equal(boxed[name], plain[name]) for name in plain)
        assert int(boxed["redone"] > 0) == (run.capacities == TIGHT)
        culled = max(culled, share)
    assert culled > 0.3, "hardly a group was culled"


@pytest.mark.parametrize(("strategy", "ranks"), [("batch", 1), ("tile", 2)])
def test_run_of_captured_graphs(strategy: str, ranks: int) -> None:
    run = TrainingRun(
        strategy, 2, 12, capacities=TIGHT, lazy=True, points=700, scene=make_row, captured=True, speed=20.0
    )  # fmt: skip
    for boxed, plain, _ in run_ranks(both, ranks, run):
        assert int(boxed["replayed"]) > 4, "hardly a step came from what was recorded"
        assert all(torch.equal(boxed[name], plain[name]) for name in plain)


def test_large_models_are_culled_by_groups_by_default() -> None:
    world, settings = World.single(torch.device("cpu")), StepSettings(WIDTH, HEIGHT, 8, LAMBDA, 64, 1, 64)
    for count in (GROUPS_FROM // 8 - 32, GROUPS_FROM // 8):  # of eight views
        widths = {"means": (3,), "quats": (4,), "scales": (3,), "opacities": (1,), "features_dc": (3,)}
        params = {name: torch.zeros(1, *width).expand(count, *width) for name, width in widths.items()}
        params["features_rest"] = torch.zeros(1, 0, 3).expand(count, 0, 3)
        boxes = step_of(world, "single", params, settings, moments={k: (v, v) for k, v in params.items()})._model.boxes
        assert (boxes is None) == (count < GROUPS_FROM // 8)
        assert boxes is None or boxes.shape == (GROUPS_FROM // 8 // 32, 8)


def test_a_flush_moves_points_and_their_boxes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of points that no view had drawn."""
    looked: list[tuple[bool, bool]] = []
    flush = Step.flush

    def watched(one: Step) -> None:
        means, log_scales, boxes = one._model.params[0], one._model.params[2], one._model.boxes
        assert boxes is not None
        before = means.clone()
        flush(one)
        fresh = operators.new_boxes(means)
        operators.splat_boxes(means, log_scales, fresh)
        looked.append((bool((means != before).any()), torch.equal(boxes, fresh)))

    monkeypatch.setattr(Step, "flush", watched)
    taken(World.single(), TrainingRun("single", 2, 6, points=700, scene=make_row, lazy=True, grouped=True))
    assert looked == [(True, True)]


# ---- on GPUs ----


@pytest.mark.gpu
@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize(
    ("strategy", "ranks", "batch"), [("batch", 1, 3), ("batch", 2, 2), ("tile", 1, 3), ("tile", 2, 2)]
)
def test_run_on_gpus(strategy: str, ranks: int, batch: int, captured: bool) -> None:
    """Sums have another order each time there: rows are the same, and the run equals the ordinary one."""
    run = TrainingRun(
        strategy, batch, 4, lazy=True, points=3000, scene=make_row, captured=captured, transport="peer"
    )  # fmt: skip
    outcomes = run_ranks(both, ranks, run, device="cuda")
    for boxed, plain, share in outcomes:
        assert share > 0.5, "hardly a group was culled"
        assert all(torch.equal(boxed[name], plain[name]) for name in ("first", "redone"))
        torch.testing.assert_close(boxed["losses"], plain["losses"], rtol=1e-5, atol=1e-7)
    assert_same_run(run, [boxed for boxed, _, _ in outcomes], ordinary(run, "cpu"))
