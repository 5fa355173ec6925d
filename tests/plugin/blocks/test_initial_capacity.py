"""Capacities of a run's first steps, compared with the demand of such steps."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ns_multigpu.core.dist.world import World
from ns_multigpu.core.exchange.hierarchy import Hierarchy
from ns_multigpu.core.exchange.pair_capacities import all_gather_counts, pairs_of
from ns_multigpu.core.step.step_settings import padded, with_halos
from ns_multigpu.locality.options import LocalityOptions
from ns_multigpu.plugin.blocks.initial_capacity import InitialCapacity, rows_needed
from ns_multigpu.plugin.blocks.step_capacities import StepCapacities
from strategies.locality import locality
from tests.lib.ranks import run_ranks
from tests.strategies.scene import make_points, make_views
from tests.strategies.test_law import PRIMITIVES, held_at, on_machines
from tests.strategies.test_law_steps import CAPACITIES, LANDSCAPE, POINTS, fill, made
from tests.strategies.test_needs import target_of

VIEWS = 3
KIND = "gaussians, antialiased, absgrad"


def counted(machines: int, world: World, forwarding: bool) -> dict[str, Any]:
    """Return the demand of two steps, and the counts before them with capacity for all rows and for half of them."""
    world = on_machines(world, machines)
    spread = locality(world, LocalityOptions(relays=forwarding))
    kind: Any = PRIMITIVES[KIND]()
    views = make_views(2 * VIEWS, torch.float32, world.device, LANDSCAPE)
    batches = [views[:VIEWS], views[VIEWS:]]
    spread.placement.look(lambda: views)
    held, _ = held_at(spread, make_points(POINTS, torch.float32, world.device))
    params = {name: value.detach() for name, value in held.params.items()}
    moments = {name: (torch.zeros_like(value), torch.zeros_like(value)) for name, value in params.items()}
    kernels: Any = replace(kind, depth=False).kernels()
    model = kernels.model(params, moments, {}, None)
    handing = Hierarchy.of(world) if forwarding else None
    one, all_rows, few = (
        rows_needed(kernels, model, spread, some, rows, handing)
        for some, rows in ((batches[:1], 2048), (batches, 2048), (batches, 64))
    )
    guess = InitialCapacity(_run(spread, len(held)), world, _buffers(world, handing))
    assert guess.due(None)
    pixels = views[0].width * views[0].height
    capacities = guess.capacities(None, pixels, batches, lambda: model, kernels)
    assert not guess.due(capacities), "once is enough"
    spread.placement._placings += 1  # type: ignore[attr-defined]
    assert guess.due(capacities), "points have moved"
    redistributed = guess.capacities((7, capacities[1], 9), pixels, batches[:1], lambda: model, kernels)
    blind = guess.capacities(None, pixels, [], lambda: model, kernels)
    step = made(spread, kind, batches[0], params, moments, {}, False)
    needed = []
    for some in batches:
        fill(step, some)
        plan = with_halos(spread.plan(some), some)
        step.take(plan, [target_of(patch, some) for patch in plan.owned[world.rank]])
        status = step.status()
        assert status.done == 1
        needed.append(all_gather_counts(status.segments, world))
    all_capacities = {"room": capacities, "anew": redistributed, "blind": blind}
    return {"needed": needed, "counted": (one, all_rows, few), "rows": status.rows, **all_capacities}


def _run(spread: Any, points: int) -> Any:
    return SimpleNamespace(strategy=spread, batch_size=VIEWS, model=SimpleNamespace(most_points=points))


def _buffers(world: World, forwarding: Hierarchy | None, one_for_all: bool = False) -> Any:
    numbers = forwarding.num_counts if forwarding else 0
    return SimpleNamespace(
        hierarchy=forwarding, one_for_all=one_for_all, pairs=lambda segment: pairs_of(segment, world.size, numbers)
    )


@pytest.mark.parametrize("forwarding", [True, False])
def test_rows_are_counted_before_the_first_step(forwarding: bool) -> None:
    found = run_ranks(partial(counted, 2), 4, forwarding)
    first, second = found[0]["needed"]
    both = tuple(tuple(map(max, *of_rank)) for of_rank in zip(first, second, strict=True))
    one, all_rows, few = found[0]["counted"]
    assert one == first != second and all_rows == both, "the most of any batch, and of each kind of rows"
    assert sum(map(sum, both)) > 200 and found[0]["rows"] > 64
    # If rows exceed the capacity of counting, the counted rows are extrapolated.
    assert 0.9 * sum(map(sum, both)) < sum(map(sum, few)) < 1.1 * sum(map(sum, both))
    for outcome in found:
        assert outcome["counted"] == found[0]["counted"], "all ranks know the same"
        rows, pairs, intersections = outcome["room"]
        assert pairs == tuple(tuple(map(padded, of_rank)) for of_rank in both)
        assert outcome["anew"] == (7, tuple(tuple(map(padded, of_rank)) for of_rank in first), 9)
        blind, numbers = outcome["blind"], len(both[0])
        assert blind == (rows, pairs_of(rows, 4, numbers), intersections), "unknown views: all rows"
    assert CAPACITIES["segment"] >= max(map(max, both))


def test_no_count_if_only_written_rows_are_exchanged() -> None:
    """Through peer memory, or where rows stay."""
    world = replace(World.single(), size=2, local_size=2)
    for spread, one_for_all in ((locality(world), True), (locality(World.single()), False)):
        guess = InitialCapacity(_run(spread, 100), spread.world, _buffers(spread.world, None, one_for_all))
        assert guess.due(None) and not guess.due((1, ((1,),), 1))
        views: Any = make_views(VIEWS, torch.float32)
        unused: Any = None
        rows, pairs, _ = guess.capacities(None, 0, [views], unused, unused)
        assert pairs == pairs_of(rows if one_for_all else padded(0), spread.world.size)


def test_demand_before_a_placement_is_discarded() -> None:
    capacities = StepCapacities(10)
    capacities.begin((1024, pairs_of(90_000, 2), 1024))
    capacities.learn((10, pairs_of(80_000, 2), 10), False, 300)
    capacities.begin((1024, pairs_of(90_000, 2), 1024))
    capacities.learn((10, pairs_of(10, 2), 10), False, 300)
    assert capacities.now is not None and capacities.now[1] == pairs_of(padded(10) + padded(10) // 8, 2)
