"""A step tells on its own, and without a look at all gradients, which rank's were not finite."""

from itertools import pairwise

import pytest
import torch

from cuda_ext.ops.adam import adam_scalars
from ns_multigpu.core.placement import Plan
from ns_multigpu.core.types import Patch
from ns_multigpu.core.world import World
from ns_multigpu.primitives.fused_step import ORDER, FusedStep, StepSettings
from ns_multigpu.primitives.tile_rows import CollectiveRows, OwnRows
from ns_multigpu.primitives.tile_settings import TileSettings, bands
from ns_multigpu.primitives.tile_step import TileStep
from tests.primitives.test_fused_step import HEIGHT, LAMBDA, RATES, WIDTH, batch_of
from tests.ranks import run_ranks
from tests.strategies.scene import make_image, make_points

POINTS = 200
Step = FusedStep | TileStep


def prepared(step: Step, world: World) -> None:
    views = batch_of(0, len(step.viewmats), world.device)
    step.viewmats.copy_(torch.stack([v.viewmat for v in views]))
    step.Ks.copy_(torch.stack([v.K for v in views]))
    step.scalars.copy_(torch.tensor([adam_scalars(RATES[k], (0.9, 0.999), 1e-15, 1) for k in ORDER]))


def told(step: Step) -> tuple[float, bool]:
    """What the last step's report ends with, and whether the step was taken."""
    return float(step.report[-1]), step.status().done == 1


def fused(world: World, rows: int) -> list[tuple[float, bool]]:
    params = {k: v.detach() for k, v in make_points(POINTS, torch.float32, world.device).params.items()}
    moments = {k: (torch.zeros_like(v), torch.zeros_like(v)) for k, v in params.items()}
    settings = StepSettings(WIDTH, HEIGHT, 1, 2, False, False, LAMBDA, rows, 1 << 14)
    step = FusedStep(params, moments, {}, settings, world, torch.float32)
    prepared(step, world)
    found: list[tuple[float, bool]] = []
    for broken in (False, True):
        step.targets.fill_(0.5)
        if broken and world.rank == world.size - 1:
            step.targets[0, HEIGHT // 2, WIDTH // 2] = float("nan")
        step.render()
        step.exchange()
        step.update()
        found.append(told(step))
    return found


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_rank_that_drew_it(ranks: int) -> None:
    for rank, (fine, broken) in enumerate(run_ranks(fused, ranks, 301)):  # an odd number, which moves what travels
        assert fine == (0.0, True)
        assert broken[1] and (broken[0] != broken[0]) == (rank == ranks - 1)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_step_that_is_not_taken_tells_nothing(ranks: int) -> None:
    for found in run_ranks(fused, ranks, 11):
        assert found == [(0.0, False), (0.0, False)]


def tiled(world: World, rows: int) -> list[tuple[float, bool]]:
    whole = make_points(POINTS, torch.float32, world.device).params
    params = {k: v.detach()[world.rank :: world.size].contiguous() for k, v in whole.items()}
    moments = {k: (torch.zeros_like(v), torch.zeros_like(v)) for k, v in params.items()}
    settings = TileSettings(WIDTH, HEIGHT, 1, 2, False, False, LAMBDA, rows, rows, 1 << 14)
    kind = OwnRows if world.size == 1 else CollectiveRows
    step = TileStep(params, moments, {}, settings, world, kind(world, rows, rows, settings.words))
    prepared(step, world)
    view = batch_of(0, 1, world.device)[0]
    cuts = [0, 32, HEIGHT] if world.size == 2 else [0, HEIGHT]
    plan: Plan = [[Patch(0, 0, top, WIDTH, bottom)] for top, bottom in pairwise(cuts)]
    plan = bands(plan, settings)
    found: list[tuple[float, bool]] = []
    for broken in (False, True):
        (patch,) = plan[world.rank]
        _, top, _, bottom = patch.rendered(view)
        target = make_image(view).to(world.device)[top:bottom].float().contiguous()
        if broken and world.rank == world.size - 1:
            target[-1, WIDTH // 2] = float("nan")
        step.render(plan, [target])
        step.update()
        found.append(told(step))
    return found


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_tile_step_tells_of_what_came_back(ranks: int) -> None:
    outcomes = run_ranks(tiled, ranks, 400)
    assert all(fine == (0.0, True) for fine, _ in outcomes)
    assert all(taken for _, (_, taken) in outcomes) and any(number != number for _, (number, _) in outcomes)
    for found in run_ranks(tiled, ranks, 11):
        assert found == [(0.0, False), (0.0, False)]
