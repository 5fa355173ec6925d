"""A fused step with a gradient that is not finite, on any rank, changes nothing on all ranks. The next one trains."""

from typing import Any

import pytest
import torch

from cuda_ext.ops.optim.adam import adam_scalars
from ns_multigpu.core.dist.world import World
from ns_multigpu.core.step.exposures import StepExposures
from ns_multigpu.core.step.step_settings import with_halos
from ns_multigpu.core.types import sizes_of
from ns_multigpu.plugin.blocks.graphs import GraphPool, StepGraphs
from ns_multigpu.plugin.blocks.timing import StepTimer
from strategies import STRATEGIES
from tests.lib.ranks import DEVICES, run_ranks
from tests.lib.recorded import RecordedPool
from tests.strategies.scene import make_gains, make_image, make_views
from tests.strategies.test_law import held_at, points_of
from tests.strategies.test_law_steps import MODES, POINTS, PORTRAIT, count_of, fill, made

CASES = [("single", 1), ("batch", 2), ("tile", 3), ("pixel", 2)]


def skip_one(world: World, strategy: str, mode: str, exposes: bool) -> list[tuple[bool, bool, bool, bool]]:
    """Return of a step with NaN on rank 0, one behind it, and one after both: (taken, finite flag is finite, the model
    is finite, the model is unchanged). NaN is in a photograph, or in a row's gradient if only one rank has the row."""
    spread, count, device = STRATEGIES[strategy](world), count_of(strategy), world.device
    kind, whole = points_of("gaussians", POINTS, torch.float32, device)
    views = make_views(count, torch.float32, device, PORTRAIT)
    spread.placement.look(lambda: views)
    held, _ = held_at(spread, whole)
    params = {name: value.detach().clone() for name, value in held.params.items()}
    moments = {name: (torch.zeros_like(value), torch.zeros_like(value)) for name, value in params.items()}
    statistics = {name: torch.zeros(len(held), device=device) for name in ("grad2d", "count", "radii")}
    spread.observe(kind, held, 0)
    exposures = None
    if exposes:
        params["exposures"] = make_gains(count, torch.float32, device)
        moments["exposures"] = (torch.zeros_like(params["exposures"]), torch.zeros_like(params["exposures"]))
        exposures = StepExposures(params["exposures"], *moments["exposures"], count)
    step = made(
        spread, kind, views, params, moments, statistics, False, exposures=exposures, capacities={"skips": True}
    )
    poison, returned = torch.zeros(1, device=device), step._transport.return_gradients

    def poisoned(*given: Any) -> Any:
        back = yield from returned(*given)
        back.records[:1].add_(poison)
        return back

    step._transport.return_gradients = poisoned  # type: ignore[method-assign]
    fill(step, views)
    step.scalars.copy_(torch.tensor(adam_scalars(1e-3, (0.9, 0.999), 1e-15, 1)).expand_as(step.scalars))
    plan = with_halos(spread.plan_alike(views), views)
    rectangles = [(views[patch.view], *patch.rendered(views[patch.view])) for patch in plan.owned[world.rank]]
    finite = [make_image(view)[y0:y1, x0:x1].to(device) / 255 for view, x0, y0, x1, y1 in rectangles]
    targets = [image.clone() for image in finite]
    pool = GraphPool(device) if device.type == "cuda" else RecordedPool()
    graphs = StepGraphs(StepTimer(device), lambda: None, pool if mode == "captured" else None)
    model = [*params.values(), *statistics.values(), *(one for pair in moments.values() for one in pair)]

    def taken(bad: bool) -> tuple[bool, bool, bool, bool]:
        bad = bad and world.is_main
        poison.fill_(torch.nan if bad and not spread.placement.replicated else 0.0)
        for target, image in zip(targets, finite, strict=True):
            target.copy_(torch.full_like(image, torch.nan) if bad and spread.placement.replicated else image)
        before = [one.clone() for one in model]
        step.rgb = graphs.take(plan, lambda: step.parts(plan, targets, sizes_of(views)))
        same = all(torch.equal(a, b) for a, b in zip(before, model, strict=True))
        usable = all(bool(one.isfinite().all()) for one in model)
        return bool(step.taken), bool(step.report[-1].isfinite()), usable, same

    for _ in range(2):  # as it comes, and captured
        assert taken(False) == (True, True, True, False)
    found: list[Any] = [taken(True), taken(False)]
    assert step.status().full
    return [*found, taken(False)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("strategy", "ranks"), CASES)
@pytest.mark.parametrize("mode", MODES)
def test_no_rank_takes_it(strategy: str, ranks: int, mode: str, device: str) -> None:
    for found in run_ranks(skip_one, ranks, strategy, mode, strategy == "batch", device=device):
        assert found == [(False, False, True, True), (False, True, True, True), (True, True, True, False)]
