"""Demand of each batch in `locality`: the number of each rank's splats that overlap each patch, equal in all modes."""

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from ns_multigpu.core.assign.plan import Plan
from ns_multigpu.core.dist.collectives import all_gather_ints
from ns_multigpu.core.dist.world import World
from ns_multigpu.core.step.step_settings import with_halos
from ns_multigpu.core.strategy import Strategy
from ns_multigpu.core.types import TILE, Patch, Points, View, sizes_of
from strategies import STRATEGIES
from tests.lib.overlaps import overlaps
from tests.lib.ranks import run_ranks
from tests.strategies.scene import make_image, make_points, make_views
from tests.strategies.test_law import PRIMITIVES, held_at, on_machines
from tests.strategies.test_law_steps import POINTS, fill, made

VIEWS = 5
KIND = "gaussians, antialiased, absgrad"


def record_demand(machines: int, world: World, mode: str) -> dict[str, Any]:
    """Return each patch's demand from each rank, as recorded and as counted, and the plan's figures."""
    spread = STRATEGIES["locality"](on_machines(world, machines))
    kind: Any = PRIMITIVES[KIND]()
    views = make_views(VIEWS, torch.float32, world.device)
    spread.placement.look(lambda: views)
    held, _ = held_at(spread, make_points(POINTS, torch.float32, world.device))
    plan = with_halos(spread.plan(views), views)
    hits = kind.cull(held, views, list(range(VIEWS)))
    own = kind.splat(held, hits, views)
    counted = all_gather_ints([int(overlaps(own, views, [patch]).sum()) for patch in plan.patches()], world)
    spread.assignment._access.forget()  # type: ignore[attr-defined]
    learn_once(spread, kind, held, views, plan, mode)
    access = spread.assignment._access  # type: ignore[attr-defined]
    return {"counted": np.array(counted).T, "learnt": [access.of(view.index) for view in views], "plan": plan}


def learn_once(spread: Strategy, kind: Any, held: Points, views: list[View], plan: Plan, mode: str) -> None:
    """Draw the views, or take a fused step, so that the assignment learns of its work."""
    if mode == "autograd":
        spread.render(kind, held, views, plan)
        return
    params = {name: value.detach().clone() for name, value in held.params.items()}
    moments = {name: (torch.zeros_like(value), torch.zeros_like(value)) for name, value in params.items()}
    statistics = {name: torch.zeros(len(held)) for name in ("grad2d", "count", "radii")}
    step = made(spread, kind, views, params, moments, statistics, False)
    fill(step, views)
    step.take(plan, [target_of(patch, views) for patch in plan.owned[spread.world.rank]], sizes_of(views))
    assert step.status().done == 1
    spread.assignment.learn(views, step.measured_work.reshape(-1).tolist())


def target_of(patch: Patch, views: list[View]) -> torch.Tensor:
    left, top, right, bottom = patch.rendered(views[patch.view])
    return make_image(views[patch.view])[top:bottom, left:right].contiguous()


@pytest.mark.parametrize(("ranks", "machines"), [(2, 1), (3, 3), (4, 2)])
@pytest.mark.parametrize("mode", ["autograd", "step"])
def test_demand_of_patches_is_recorded(mode: str, ranks: int, machines: int) -> None:
    found = run_ranks(partial(record_demand, machines), ranks, mode)
    counted, plan = found[0]["counted"], found[0]["plan"]
    assert counted.sum() > POINTS and all((one["counted"] == counted).all() for one in found)
    assert all((counted[:, rank] > 0).any() for rank in range(ranks))
    for one in found:  # all ranks know the same
        for view in range(VIEWS):
            known = one["learnt"][view]
            cells = [patch for patch in plan.patches() if patch.view == view]
            assert known is not None and known.shape == (16, ranks)
            columns = len({patch.x0 for patch in cells})
            numbers = [k // columns * 4 + k % columns for k in range(len(cells))]
            wanted = np.zeros((16, ranks))
            wanted[numbers] = counted[[k for k, patch in enumerate(plan.patches()) if patch.view == view]]
            assert np.array_equal(known, wanted), (view, known, wanted)


def work_of(views: list[View]) -> dict[int, list[int]]:
    """Return the recorded intersections of each row of tiles, by view, after a step of one rank with these views."""
    spread, kind = STRATEGIES["tile"](World.single()), PRIMITIVES[KIND]()
    points = make_points(POINTS, torch.float32)
    params = {name: value.detach().clone() for name, value in points.params.items()}
    moments = {name: (torch.zeros_like(value), torch.zeros_like(value)) for name, value in params.items()}
    step = made(spread, kind, views, params, moments, {}, False)
    fill(step, views)
    plan = with_halos(spread.plan(views), views)
    step.take(plan, [target_of(patch, views) for patch in plan.owned[0]], sizes_of(views))
    assert step.status().done == 1
    spread.assignment.learn(views, step.measured_work.tolist())
    return dict(spread.assignment.work.counts)  # type: ignore[attr-defined]


def test_rows_of_tiles_are_counted_in_views_of_any_size() -> None:
    views = make_views(4, torch.float32)[:3]
    assert len({-(-view.height // TILE) for view in views}) > 1
    alone: dict[int, list[int]] = {}
    for view in views:
        alone |= work_of([view])
    assert work_of(views) == alone and all(sum(rows) > 0 for rows in alone.values())
