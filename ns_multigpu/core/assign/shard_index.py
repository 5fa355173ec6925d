"""What a rank holds of a whole model that is spread over the ranks."""

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
    """Who says where points live, and where this rank's stand in the order of the whole model.

    The model and its densifier share one: who changes the points changes it. Every rank calls its methods together.

    Attributes:
        placement: says which rank owns what.
        places: [N] int64 ascending, the places of this rank's points. None where the ranks hold ranges of the order,
            each the one behind those of the ranks before it; so on all ranks or on none.
        counts: points of each rank; None where nobody has asked yet.
    """

    placement: Placement
    places: Tensor | None = None
    counts: tuple[int, ...] | None = None

    def hold(self, places: Tensor | None, positions: Tensor, counts: Sequence[int] | None = None) -> None:
        """Other points are here now.

        Args:
            places: theirs. positions: [N, 3] as they were when the placement said whose they are. counts: of all ranks,
                where they are known.
        """
        self.places, self.counts = places, None if counts is None else tuple(counts)
        self.placement.moved(positions.detach())

    def of_ranks(self, count: int, world: World) -> tuple[int, ...]:
        """How many points each rank has. They are asked only if they are not known.

        Args:
            count: those that are here.

        Raises:
            RuntimeError: somebody else has changed these.
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
        """Places of some of this rank's `count` points, [M] int64, in the whole model. Errors as of `of_ranks`."""
        if self.places is None:
            return rows + sum(self.of_ranks(count, world)[: world.rank])
        self.check(count, world)
        return self.places[rows]

    def among(self, rows: Tensor, count: int, chosen: Sequence[int], world: World) -> Tensor:
        """How many of all ranks' chosen points stand before each of this rank's chosen ones, [M] int64.

        Args:
            rows: [M] int64 ascending, which of this rank's `count` points are chosen. chosen: how many each rank has.
        """
        if self.places is None:
            before = sum(chosen[: world.rank])
            return torch.arange(before, before + len(rows), device=rows.device)
        self.check(count, world)
        return GlobalOrder.of(self.places[rows], world, ascending=True).places

    def before(self, values: Tensor, totals: Sequence[int], world: World) -> Tensor:
        """The sum of the values of all ranks' points before each of this rank's, [N] int64.

        Args:
            values: [N] int64, of each of this rank's points. totals: their sum, by rank.
        """
        if self.places is not None:
            self.check(len(values), world)
            return GlobalOrder.of(self.places, world, ascending=True).before(values)
        return values.cumsum(0) - values + sum(totals[: world.rank])

    def check(self, count: int, world: World) -> None:
        """Raises RuntimeError where this rank does not have as many points as it has places."""
        if self.places is not None and len(self.places) != count:
            raise RuntimeError(
                f"rank {world.rank} has {count} points, and the places of {len(self.places)}: who replaces a model "
                "says where its points stand"
            )
