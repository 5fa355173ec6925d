"""A step reports the rank of nonfinite gradients, without reading all gradients."""

from itertools import pairwise

import pytest
import torch

from ns_multigpu.core.assign.placement import even_bounds
from ns_multigpu.core.assign.plan import Plan
from ns_multigpu.core.dist.world import World
from ns_multigpu.core.step.step_settings import StepSettings, with_halos
from ns_multigpu.core.types import Patch
from strategies import STRATEGIES
from tests.lib.ranks import run_ranks
from tests.primitives.training_runs import HEIGHT, LAMBDA, WIDTH, batch_of, scalars, step_of
from tests.strategies.scene import make_image, make_points

POINTS = 200


def flags_of(world: World, strategy: str, rows: int) -> list[tuple[float, bool]]:
    """Return the finite flag of a step's report, and whether the step was taken. Each replica has a whole image, each
    shard a part of one. A second step has a broken image on the last rank."""
    replicas = strategy == "batch"
    views = batch_of(0, world.size if replicas else 1, world.device)
    whole = make_points(POINTS, torch.float32, world.device).params
    first, end = (0, POINTS) if replicas else even_bounds(POINTS, world.size)[world.rank :][:2]
    params = {k: v.detach()[first:end].contiguous() for k, v in whole.items()}
    settings = StepSettings(WIDTH, HEIGHT, len(views), LAMBDA, rows, rows, 1 << 14)
    step = step_of(world, strategy, params, settings, "own" if world.size == 1 else "collective")
    step.viewmats.copy_(torch.stack([v.viewmat for v in views]))
    step.Ks.copy_(torch.stack([v.K for v in views]))
    step.scalars.copy_(scalars(1))
    if replicas:
        plan = STRATEGIES[strategy](world).plan(views)
    else:
        cuts = [0, 32, HEIGHT] if world.size == 2 else [0, HEIGHT]
        plan = Plan.of([[Patch(0, 0, top, WIDTH, bottom)] for top, bottom in pairwise(cuts)])
    plan = with_halos(plan, views)
    found: list[tuple[float, bool]] = []
    for broken in (False, True):
        (patch,) = plan.drawn[world.rank]
        _, top, _, bottom = patch.rendered(views[patch.view])
        target = make_image(views[patch.view]).to(world.device)[top:bottom].float().contiguous()
        if broken and world.rank == world.size - 1:
            target[len(target) // 2 if replicas else -1, WIDTH // 2] = float("nan")
        step.take(plan, [target])
        found.append((float(step.report[-1]), step.status().done == 1))
    return found


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_rank_that_drew_it(ranks: int) -> None:
    for rank, (fine, broken) in enumerate(run_ranks(flags_of, ranks, "batch", 301)):  # odd: another alignment
        assert fine == (0.0, True)
        assert broken[1] and (broken[0] != broken[0]) == (rank == ranks - 1)


@pytest.mark.parametrize("ranks", [1, 2])
def test_shard_reports_nonfinite_returned_gradients(ranks: int) -> None:
    outcomes = run_ranks(flags_of, ranks, "tile", 400)
    assert all(fine == (0.0, True) for fine, _ in outcomes)
    assert all(taken for _, (_, taken) in outcomes) and any(number != number for _, (number, _) in outcomes)


@pytest.mark.parametrize("strategy", ["batch", "tile"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_cancelled_step_reports_nothing(ranks: int, strategy: str) -> None:
    for found in run_ranks(flags_of, ranks, strategy, 11):
        assert found == [(0.0, False), (0.0, False)]
