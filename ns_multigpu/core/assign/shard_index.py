"""Index of a rank's shard of a whole model that is distributed over the ranks."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ns_multigpu.core.assign.global_order import GlobalOrder
from ns_multigpu.core.assign.placement import Placement
from ns_multigpu.core.dist.collectives import all_gather_ints_on_device
from ns_multigpu.core.dist.world import World


@dataclass
class ShardIndex:
    """Placement of points, and places of this rank's points in the order of the whole model.

    The model and its densifier share one; code that changes the points must update it. Every rank calls its methods
    together.

    Attributes:
        placement: decides which rank owns what.
        places: [N] int64 ascending, the places of this rank's points. None on all ranks if each holds a contiguous
            range of the order, in the ranks' order.
        counts: points of each rank; None if not gathered yet.
    """

    placement: Placement
    places: Tensor | None = None
    counts: tuple[int, ...] | None = None

    def hold(self, places: Tensor | None, positions: Tensor, counts: Sequence[int] | None = None) -> None:
        """Record that this rank holds other points now.

        Args:
            places: theirs. positions: [N, 3] at the time of placement. counts: of all ranks, if known.
        """
        self.places, self.counts = places, None if counts is None else tuple(counts)
        self.placement.moved(positions.detach())

    def of_ranks(self, count: int, world: World) -> tuple[int, ...]:
        """Return the number of points of each rank, gathered only if unknown.

        Args:
            count: this rank's points.

        Raises:
            RuntimeError: this rank's points changed without `hold`.
        """
        if self.counts is None:
            self.counts = tuple(row[0] for row in all_gather_ints_on_device([count], world))
        if self.counts[world.rank] != count:
            raise RuntimeError(
                f"rank {world.rank} has {count} points, not the {self.counts[world.rank]} that it had: who replaces a "
                "model says so, by ShardIndex.hold on every rank"
            )
        return self.counts

    def places_of(self, rows: Tensor, count: int, world: World) -> Tensor:
        """Return the places of some of this rank's `count` points, [M] int64. Errors as of `of_ranks`."""
        if self.places is None:
            return rows + sum(self.of_ranks(count, world)[: world.rank])
        self.check(count, world)
        return self.places[rows]

    def among(self, rows: Tensor, count: int, chosen: Sequence[int], world: World) -> Tensor:
        """Return for each of this rank's chosen points the number of all ranks' chosen points before it, [M] int64.

        Args:
            rows: [M] int64 ascending, the chosen ones of this rank's `count` points. chosen: number of chosen points by
                rank.
        """
        if self.places is None:
            before = sum(chosen[: world.rank])
            return torch.arange(before, before + len(rows), device=rows.device)
        self.check(count, world)
        return GlobalOrder.of(self.places[rows], world, ascending=True).places

    def before(self, values: Tensor, totals: Sequence[int], world: World) -> Tensor:
        """Return the sum of the values of all ranks' points before each of this rank's, [N] int64.

        Args:
            values: [N] int64, of each of this rank's points. totals: their sum, by rank.
        """
        if self.places is not None:
            self.check(len(values), world)
            return GlobalOrder.of(self.places, world, ascending=True).before(values)
        return values.cumsum(0) - values + sum(totals[: world.rank])

    def check(self, count: int, world: World) -> None:
        """Raise RuntimeError if this rank does not have as many points as places."""
        if self.places is not None and len(self.places) != count:
            raise RuntimeError(
                f"rank {world.rank} has {count} points, and the places of {len(self.places)}: who replaces a model "
                "says where its points stand"
            )
