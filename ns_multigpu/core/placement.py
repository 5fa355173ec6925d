"""Which rank owns which point."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import final

from ns_multigpu.core.plan import Plan
from ns_multigpu.core.types import Points
from ns_multigpu.core.world import World


class Placement(ABC):
    """Where points live."""

    replicated: bool
    """Whether every rank holds every point (and densification must come out the same on each)."""

    @abstractmethod
    def views_to_splat(self, plan: Plan, world: World) -> list[int]:
        """Positions of the views for which this rank splats the points that it holds, ascending."""

    def hold(self, points: Points, world: World) -> Points:
        """This rank's part of a whole model: all of it, unless the placement shards points."""
        return points


class AllHere(Placement):
    """Every point is on the only rank there is."""

    replicated = True

    def views_to_splat(self, plan: Plan, world: World) -> list[int]:
        return plan.views_of(world.rank)


class Replicated(Placement):
    """Every rank holds every point, and all copies stay identical."""

    replicated = True

    def views_to_splat(self, plan: Plan, world: World) -> list[int]:
        return plan.views_of(world.rank)


@final
@dataclass(frozen=True)
class Sharded(Placement):
    """Every point is on one rank: each owns a contiguous range of the whole model's rows, in the order of the ranks.

    A point's global id is its row in the whole model: the points of the ranks before its owner, plus its row there. So
    rows ordered by (view, owner, row there) are ordered by (view, global id), and splats of equal depth are blended in
    the order in which `single` blends them.

    Attributes:
        bounds: [ranks + 1] rank r owns the rows [bounds[r], bounds[r + 1]), perhaps none; None for equal numbers.
    """

    bounds: tuple[int, ...] | None = None
    replicated = False

    def views_to_splat(self, plan: Plan, world: World) -> list[int]:
        """All of the batch's views that anybody renders: which ranks' patches a point reaches only its splat tells."""
        return plan.views()

    def hold(self, points: Points, world: World) -> Points:
        """This rank's range of `points`, copied, so that the rest can be let go.

        Raises:
            ValueError: the bounds do not fit the points or the world.
        """
        count = len(points)
        bounds = even_bounds(count, world.size) if self.bounds is None else self.bounds
        if len(bounds) != world.size + 1 or bounds[0] != 0 or bounds[-1] != count or list(bounds) != sorted(bounds):
            raise ValueError(
                f"bounds {list(bounds)} do not deal {count} points out to {world.size} ranks: give {world.size + 1} "
                f"ascending numbers from 0 to {count}"
            )
        own = slice(bounds[world.rank], bounds[world.rank + 1])
        return Points({k: v.detach()[own].clone().requires_grad_(v.requires_grad) for k, v in points.params.items()})


def even_bounds(count: int, ranks: int) -> tuple[int, ...]:
    """[ranks + 1] ascending numbers from 0 to `count` whose differences differ by one at most."""
    return tuple(rank * count // ranks for rank in range(ranks + 1))
