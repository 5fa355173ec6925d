"""Capacities of a run's first steps, and of steps after points were placed again.

Without a count each pair of ranks would need memory for all rows. So the rows that each rank will send are counted
before the first step: points are projected for the batches of the coming block, without drawing.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from ns_multigpu.core.dist.world import World
from ns_multigpu.core.exchange.hierarchy import Hierarchy
from ns_multigpu.core.exchange.pair_capacities import Pairs, all_gather_counts
from ns_multigpu.core.kernels import Kernels, Model
from ns_multigpu.core.step.forward_pass import rows_by_group
from ns_multigpu.core.step.step_settings import first_capacities, padded, with_halos
from ns_multigpu.core.strategy import Strategy
from ns_multigpu.core.types import View
from ns_multigpu.plugin.blocks.fused_rescue import bytes_of_step
from ns_multigpu.plugin.blocks.step_buffers import StepBuffers
from ns_multigpu.plugin.blocks.step_capacities import Capacities
from ns_multigpu.plugin.faults.out_of_memory import check_memory

if TYPE_CHECKING:
    from ns_multigpu.plugin.splats.pipeline import DistributedPipeline

_MOST_AT_FIRST = 1 << 22
"""Points of a run's first step up to which it has capacity to draw all; a step that needs more is retried with more."""
_MOST_TO_SEND = 1 << 20
"""Capacity in rows of a rank's first step if rows are exchanged, which takes the memory twice."""


class InitialCapacity:
    """Capacities used before any demand has been measured.

    Args:
        pipeline: a `DistributedPipeline`, ready to train. buffers: buffers of its steps.
    """

    def __init__(self, pipeline: "DistributedPipeline", world: World, buffers: StepBuffers) -> None:
        self._pipeline, self._world, self._buffers = pipeline, world, buffers
        self._placings = -1

    def due(self, now: Capacities | None) -> bool:
        """Return whether new capacities are due: none are set, or points were placed again."""
        counts = self._is_exchanged and not self._buffers.one_for_all
        return now is None or (counts and self._pipeline.strategy.placement.placings != self._placings)

    def capacities(
        self, now: Capacities | None, pixels: int, batches: Sequence[Sequence[View]], model: Callable[[], Model],
        kernels: Kernels,
    ) -> Capacities:  # fmt: skip
        """Return the capacities to begin with. Every rank calls it at the same point.

        Args:
            now: the capacities so far. pixels: of the largest view.
            batches: the views of the coming steps; empty if unknown.
            model: builds the input of `kernels`.
        """
        strategy, first = self._pipeline.strategy, self._guess(pixels)
        self._placings = strategy.placement.placings
        rows, segment, intersections = now or (first[0], self._buffers.pairs(first[1]), first[2])
        pairs = self._buffers.pairs(segment)
        if self._is_exchanged and not self._buffers.one_for_all and batches:
            counted = rows_needed(kernels, model(), strategy, batches, rows, self._buffers.hierarchy)
            pairs = tuple(tuple(map(padded, of_rank)) for of_rank in counted)
        return rows, pairs, intersections

    def check(self, now: Capacities | None, pixels: int) -> None:
        """Check that all ranks have memory for a step's buffers, before any rank begins the step.

        Args:
            now: the capacities. pixels: of the largest view.

        Raises:
            StepOutOfMemory: on every rank, if one lacks memory.
        """
        assert now is not None
        ranks = self._world.size
        drawn = pixels * self._pipeline.batch_size // ranks
        needed = bytes_of_step(now, drawn, ranks, is_exchanged=self._is_exchanged, hierarchy=self._buffers.hierarchy)
        check_memory(needed, "a step's buffers", self._world)

    @property
    def _is_exchanged(self) -> bool:
        return self._pipeline.strategy.rows.is_exchanged and self._world.size > 1

    def _guess(self, pixels: int) -> tuple[int, int, int]:
        model, batch = self._pipeline.model, self._pipeline.batch_size
        if not self._is_exchanged:
            views = self._pipeline.strategy.assignment.most_views(batch, self._world.size)
            return first_capacities(min(model.most_points, _MOST_AT_FIRST), pixels, views, is_exchanged=False)
        rows = min(model.most_points * batch, _MOST_TO_SEND)
        return first_capacities(-(-rows // batch), pixels, batch, is_exchanged=True)


@torch.no_grad()
def rows_needed(
    kernels: Kernels, model: Model, strategy: Strategy, batches: Sequence[Sequence[View]], capacity: int,
    hierarchy: Hierarchy | None,
) -> Pairs:  # fmt: skip
    """Return the most rows that ranks send each other in any of these batches; with a hierarchy, of each of its counts.

    Every rank calls it with the same batches. It synchronizes with the device.

    Args:
        capacity: maximum number of projected rows; further rows are assumed to have the same destinations.
        hierarchy: forwards rows between machines, if any.
    """
    world = strategy.world
    machines = range(world.machines) if hierarchy is not None else range(0)
    ranks, whole = [[rank] for rank in range(world.size)], [list(world.ranks_of(k)) for k in machines]
    most = [0] * (world.size + len(machines))
    for views in batches:
        plan = with_halos(strategy.plan(views), views)
        made, found = rows_by_group(strategy, kernels, model, views, plan, capacity, [*ranks, *whole])
        most = [max(a, -(-b * max(made, capacity) // capacity)) for a, b in zip(most, found, strict=True)]
    table = all_gather_counts(most, world)
    return table if hierarchy is None else hierarchy.counts_of(table)
