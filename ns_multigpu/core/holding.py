"""What a rank holds of a whole model that is spread over the ranks."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ns_multigpu.core.collectives import all_gather_ints_on_device
from ns_multigpu.core.placement import Placement
from ns_multigpu.core.ranking import Ranking
from ns_multigpu.core.world import World


@dataclass
class Holding:
    """Who says where points live, and where this rank's stand in the order of the whole model.

    The model and its densifier share one: who changes the points changes it. Every rank calls its methods together.

    Attributes:
        placement: says which rank owns what.
        places: [N] int64 ascending, the places of this rank's points. None where the ranks hold ranges of the order,
            each the one behind those of the ranks before it; so on all ranks or on none.
    """

    placement: Placement
    places: Tensor | None = None

    def hold(self, places: Tensor | None, positions: Tensor) -> None:
        """Other points are here now.

        Args:
            places: theirs. positions: [N, 3] as they were when the placement said whose they are.
        """
        self.places = places
        self.placement.moved(positions.detach())

    def places_of(self, rows: Tensor, count: int, world: World) -> Tensor:
        """Places of some of this rank's `count` points, [M] int64, in the whole model."""
        if self.places is None:
            return rows + sum(row[0] for row in all_gather_ints_on_device([count], world)[: world.rank])
        self.check(count, world)
        return self.places[rows]

    def among(self, rows: Tensor, count: int, world: World) -> Tensor:
        """How many of all ranks' chosen points stand before each of this rank's chosen ones, [M] int64.

        Args:
            rows: [M] int64 ascending, which of this rank's `count` points are chosen.
        """
        if self.places is None:
            before = sum(row[0] for row in all_gather_ints_on_device([len(rows)], world)[: world.rank])
            return torch.arange(before, before + len(rows), device=rows.device)
        self.check(count, world)
        return Ranking.of(self.places[rows], world, ascending=True).places

    def before(self, values: Tensor, world: World) -> Tensor:
        """The sum of the values of all ranks' points before each of this rank's, [N] int64.

        Args:
            values: [N] int64, of each of this rank's points.
        """
        if self.places is not None:
            self.check(len(values), world)
            return Ranking.of(self.places, world, ascending=True).before(values)
        sums = values.cumsum(0)
        totals = all_gather_ints_on_device([int(sums[-1]) if len(sums) else 0], world)
        return sums - values + sum(row[0] for row in totals[: world.rank])

    def check(self, count: int, world: World) -> None:
        """Raises RuntimeError where this rank does not have as many points as it has places."""
        if self.places is not None and len(self.places) != count:
            raise RuntimeError(
                f"rank {world.rank} has {count} points, and the places of {len(self.places)}: who replaces a model "
                "says where its points stand"
            )
