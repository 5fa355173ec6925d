"""Which rank renders which patch of the step's batch."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from ns_multigpu.core.placement import Plan
from ns_multigpu.core.types import Patch, View


class Assignment(ABC):
    """Cuts a batch of views into patches and gives each to a rank. Every rank computes the same plan."""

    @abstractmethod
    def assign(self, views: Sequence[View], ranks: int, holders: Sequence[int] | None = None) -> Plan:
        """The plan for `views`.

        Args:
            views: the step's batch, the same list on every rank.
            ranks: the world's size.
            holders: the rank that holds each view's image, where there is one to prefer.
        """


class AllViewsHere(Assignment):
    """Every view, whole, on rank 0 (of a world of one)."""

    def assign(self, views: Sequence[View], ranks: int, holders: Sequence[int] | None = None) -> Plan:
        if ranks != 1:
            raise ValueError(f"the strategy `single` runs on one rank, not {ranks}: choose another strategy")
        return [[Patch.whole(position, view) for position, view in enumerate(views)]]


class DealtViews(Assignment):
    """Whole views, dealt out evenly, each to the rank that holds its image where that keeps the deal even.

    With B views and R ranks, each rank gets B // R or one more; with fewer views than ranks some get none.
    """

    def assign(self, views: Sequence[View], ranks: int, holders: Sequence[int] | None = None) -> Plan:
        room = [len(views) // ranks + (1 if rank < len(views) % ranks else 0) for rank in range(ranks)]
        owner: list[int] = [-1] * len(views)
        if holders is not None:
            for position, holder in enumerate(holders):
                if room[holder] > 0:
                    owner[position] = holder
                    room[holder] -= 1
        spare = (rank for rank in range(ranks) for _ in range(room[rank]))
        plan: list[list[Patch]] = [[] for _ in range(ranks)]
        for position, view in enumerate(views):
            rank = owner[position] if owner[position] >= 0 else next(spare)
            plan[rank].append(Patch.whole(position, view))
        return plan
