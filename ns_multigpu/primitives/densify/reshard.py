"""Resharding after a refinement: each rank creates new points from its own old ones.

Most refinements keep the order: a new point replaces its old one. If owners hold ranges with balanced work, nothing is
then exchanged. Periodically all points are sorted by position and distributed (`sharded_order`).
"""

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ns_multigpu.core.assign.placement import Sharded
from ns_multigpu.core.assign.shard_index import ShardIndex
from ns_multigpu.core.assign.splitters import imbalance
from ns_multigpu.core.dist.collectives import all_gather_ints_on_device
from ns_multigpu.core.dist.world import World
from ns_multigpu.primitives.densify.gathering import gather_points
from ns_multigpu.primitives.densify.index_map import IndexMap
from ns_multigpu.primitives.densify.sharded_rows import Edit, OptimizerStates, move_rows
from ns_multigpu.primitives.sharded_order import Reordering, Survey, clock, order_keys, plan_move


@dataclass
class ShardedPoints:
    """State of a densifier of shards that one of replicas does not have.

    Attributes:
        shard_index: index of this rank's shard, with the placement; ranges of equal work by default.
        threshold: points are redistributed if a rank's work is more than this times the mean.
        reordering: record of the last refinement; reset to None by the logger.
    """

    morton: bool = True
    shard_index: ShardIndex = field(default_factory=lambda: ShardIndex(Sharded()))
    threshold: float = 1.1
    reordering: Reordering | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        if not self.morton:
            raise ValueError("shards are ranges of an order, or parts of one: a sharded densifier cannot do without it")


@dataclass(frozen=True)
class Resharding:
    """Replacement of old points by new ones. Every rank calls its methods together, with its own points.

    Arguments of all of them:
        params: by name, with a line for each old point; replaced by new `Parameter`s.
        optimizers: by parameter; may lack some, the same on every rank. They go on with the new parameters.
        index_map: of the new points.
        work: returns the work of each new point, [T] int64 in creation order; called only if needed.
        edit: see `Edit`; None to change nothing.

    Attributes:
        shard_index: index of this rank's shard, with the placement; updated at the end.
        threshold: points are redistributed if a rank's work is more than this times the mean.
        world: the ranks.
    """

    shard_index: ShardIndex
    threshold: float
    world: World

    @torch.no_grad()
    def in_order(
        self, params: MutableMapping[str, Any], optimizers: Mapping[str, torch.optim.Optimizer], index_map: IndexMap,
        categories: Tensor, work: Callable[[], Tensor], edit: Edit | None = None,
    ) -> Reordering:  # fmt: skip
        """Sort all points by `order_keys` and send them to their owners.

        Args:
            categories: [T] int64 in [0, 4), in creation order.
        """
        started = clock(params["means"].device)
        positions, kept = index_map.positions(params["means"]), OptimizerStates.here(params, optimizers)
        weights = work()
        survey = Survey.of(positions, weights.sum(), kept.tag, self.world)
        keys, order = torch.sort(order_keys(positions, categories, survey.grid), stable=True)
        del positions
        kept = kept.agree(survey.tags, self.world)
        return self._move(params, optimizers, index_map, keys, order, weights, survey.works, kept, started, edit)

    @torch.no_grad()
    def place(
        self, params: MutableMapping[str, Any], optimizers: Mapping[str, torch.optim.Optimizer], index_map: IndexMap,
        counts: Sequence[int] | None, works: Sequence[int] | None, work: Callable[[], Tensor], edit: Edit | None = None,
    ) -> Reordering | None:  # fmt: skip
        """Insert new points next to their old ones (`IndexMap.place`) and send them to their owners.

        Args:
            counts: new points by rank; None to all-gather them. works: approximate work by rank; None for equal work.

        Returns:
            the record; None if owners hold balanced ranges, so that all points are local.
        """
        count, order = len(params["means"]), index_map.source_order()
        if counts is None:
            counts = [row[0] for row in all_gather_ints_on_device([len(order)], self.world)]
        if self.shard_index.placement.in_ranges and imbalance(works or counts) <= self.threshold:
            regrouping = index_map.ordered(order)
            gather_points(params, optimizers, regrouping, edit and (lambda name, rows: edit(name, rows, regrouping)))
            self.shard_index.hold(None, params["means"], counts)
            return None
        started, source = clock(order.device), index_map.source[order]
        each = torch.zeros(count, dtype=torch.int64, device=order.device).index_add_(0, source, torch.ones_like(source))
        starts = self.shard_index.before(each, counts, self.world) - (each.cumsum(0) - each)
        keys = starts[source] + torch.arange(len(order), device=order.device)
        return self._by_places(params, optimizers, index_map, keys, order, work(), started, edit)

    @torch.no_grad()
    def send_to_owners(
        self, params: MutableMapping[str, Any], optimizers: Mapping[str, torch.optim.Optimizer], index_map: IndexMap
    ) -> Reordering:
        """Send points that only moved to their owners, for a placement without ranges.

        Args:
            index_map: the points, unchanged.
        """
        places = self.shard_index.places
        assert places is not None, "of owners that hold no ranges"
        order = torch.arange(len(places), device=places.device)
        started = clock(places.device)
        return self._by_places(params, optimizers, index_map, places, order, torch.ones_like(places), started, None)

    def _by_places(
        self, params: MutableMapping[str, Any], optimizers: Mapping[str, torch.optim.Optimizer], index_map: IndexMap,
        places: Tensor, order: Tensor, weights: Tensor, started: float, edit: Edit | None,
    ) -> Reordering:  # fmt: skip
        """Send the points, with these global indices in this order, to their owners."""
        kept = OptimizerStates.here(params, optimizers)
        gathered = all_gather_ints_on_device([int(weights.sum()), kept.tag], self.world)
        works, tags = ([row[k] for row in gathered] for k in (0, 1))
        kept = kept.agree(tags, self.world)
        return self._move(params, optimizers, index_map, places, order, weights, works, kept, started, edit)

    def _move(
        self, params: MutableMapping[str, Any], optimizers: Mapping[str, torch.optim.Optimizer], index_map: IndexMap,
        keys: Tensor, order: Tensor, weights: Tensor, works: Sequence[int], kept: OptimizerStates, started: float,
        edit: Edit | None,
    ) -> Reordering:  # fmt: skip
        """Send the points, with these keys in this order, to their owners."""
        means, world = params["means"], self.world
        parents = partial(self.shard_index.places_of, index_map.source[order], len(means), world)
        move = plan_move(
            keys, weights[order], works, world, self.threshold, self.shard_index.placement,
            partial(index_map.positions, means, order), parents,
        )  # fmt: skip
        del parents
        row_bytes = move_rows(
            params, optimizers, index_map.ordered(move.in_sending_order(order)), move, kept, world, edit
        )
        self.shard_index.hold(move.places, params["means"], move.counts_after)
        return move.record(started, row_bytes)
