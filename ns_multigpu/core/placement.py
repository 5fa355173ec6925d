"""Which rank owns which point."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from ns_multigpu.core.types import Patch
from ns_multigpu.core.world import World

Plan = Sequence[Sequence[Patch]]
"""The patches of the step's batch, by the rank that renders them."""


class Placement(ABC):
    """Where points live."""

    replicated: bool
    """Whether every rank holds every point (and densification must come out the same on each)."""

    @abstractmethod
    def views_to_splat(self, plan: Plan, world: World) -> list[int]:
        """Positions of the views for which this rank splats the points that it holds, ascending."""

    @abstractmethod
    def loss_share(self, world: World) -> float:
        """The weight on this rank of a loss term on the points themselves, so that the ranks' sum counts it once."""


class AllHere(Placement):
    """Every point is on the only rank there is."""

    replicated = True

    def views_to_splat(self, plan: Plan, world: World) -> list[int]:
        return sorted({patch.view for patch in plan[world.rank]})

    def loss_share(self, world: World) -> float:
        return 1.0


class Replicated(Placement):
    """Every rank holds every point, and all copies stay identical."""

    replicated = True

    def views_to_splat(self, plan: Plan, world: World) -> list[int]:
        return sorted({patch.view for patch in plan[world.rank]})

    def loss_share(self, world: World) -> float:
        return 1.0 / world.size
