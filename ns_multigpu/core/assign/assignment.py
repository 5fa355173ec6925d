"""Assignment of patches to ranks, for the views of a step's batch."""

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Sequence
from enum import Enum
from itertools import accumulate, pairwise
from typing import ClassVar

from ns_multigpu.core.assign.plan import Plan
from ns_multigpu.core.assign.tile_work import TileWork
from ns_multigpu.core.types import SSIM_HALO, TILE, Patch, View


class Feedback(Enum):
    """Measurements that an assignment receives of each batch, some steps later, on all ranks at the same step.

    NOTHING: nothing.
    WORK: the intersections of splats and tiles, summed over ranks, of each row of tiles of each view: one view after
    the other. Patches must then be bands: as wide as their view, of whole rows of tiles.
    NEEDS: the number of splats each patch needs from each rank: rank after rank, of each its patches in the order of
    `Plan.patches`.
    LIVE: for views drawn cell by cell, the visible pixels of each cell image: rank after rank, of each view, cell and
    band of the view -x0, -y0, x1, y1 of the box around those that the rank owns, and how many of its pixels receive
    light although no rank drew them (`Plan.hidden`). See `cuda_ext.live_boxes`.
    """

    NOTHING = "nothing"
    WORK = "work"
    NEEDS = "needs"
    LIVE = "live"


class Assignment(ABC):
    """Assignment of the patches of a batch of views to ranks. Every rank computes the same plan."""

    learns: ClassVar[Feedback] = Feedback.NOTHING
    """Input of `learn`."""
    recurs: ClassVar[bool] = True
    """True if plans are few, so that what is prepared for one, such as a CUDA graph, is reused."""
    fast_links: bool = False
    """True if ranks access each other's memory. Bytes are cheap then: an assignment may repeat a few plans, whose
    graphs are reused, although other plans would send less."""
    by_size: ClassVar[bool] = False
    """True if a plan follows from the sizes of its views alone, without preferred holders."""

    @abstractmethod
    def assign(self, views: Sequence[View], ranks: int, holders: Sequence[int] | None = None) -> Plan:
        """Return the plan for `views`.

        Args:
            views: the step's batch, the same list on every rank.
            ranks: the world's size.
            holders: the rank that holds each view's image, to be preferred; None for no preference.
        """

    def assign_alike(self, views: Sequence[View], ranks: int) -> Plan:
        """Return a plan as `assign` does, but reuse an earlier one if it is nearly as good. Prepared state, such as a
        CUDA graph, is then reused. Equal to `assign` unless an assignment makes many different plans."""
        return self.assign(views, ranks)

    @property
    def prefetches(self) -> bool:
        """True if `prefetch_plans` is to be called."""
        return False

    def prefetch_plans(self, batches: Sequence[Sequence[View]]) -> None:
        """Prepare plans for coming batches, each given once, in their order. Every rank calls it with the same batches,
        and then `assign_alike` in that order."""
        return

    def figures(self) -> dict[str, float]:
        """Return the plans' figures since the last call, by name, for the log; the same on every rank."""
        return {}

    def most_views(self, batch: int, ranks: int) -> int:
        """Return the maximum number of the `batch` views of which a rank may have patches."""
        return batch

    def most_pixels(self, batch: int, width: int, height: int, ranks: int, halo: int) -> int:
        """Return the maximum pixels of a rank's patches of `batch` views of at most this size, halos included."""
        return self.most_views(batch, ranks) * width * height

    def most_exchanged(self, batch: int, width: int, height: int, ranks: int) -> int:
        """Return the maximum pixels that a rank receives of a batch of views of at most this size, or 0 if they go by
        collectives. Asked where ranks access each other's memory."""
        return 0

    def counts(self, batch: int, width: int, height: int) -> int:
        """Return the maximum number of counts per rank of a batch of views of at most this size: see `Feedback`."""
        return batch * -(-height // TILE) if self.learns is Feedback.WORK else 0

    def learn(self, views: Sequence[View], counts: Sequence[int]) -> None:
        """Store what `learns` names of `views`; numbers beyond theirs (see `counts`) are not used."""
        return

    def state(self) -> list[list[int]]:
        """Return the state that plans depend on besides the batch, for a checkpoint: rows of integers."""
        return []

    def load_state(self, state: Sequence[Sequence[int]]) -> None:
        """Restore the state that `state` returned."""
        return


class AllViewsHere(Assignment):
    """Assignment of every whole view to rank 0 (of a world of one)."""

    by_size = True

    def assign(self, views: Sequence[View], ranks: int, holders: Sequence[int] | None = None) -> Plan:
        if ranks != 1:
            raise ValueError(f"the strategy `single` runs on one rank, not {ranks}: choose another strategy")
        return Plan.of([[Patch.whole(position, view) for position, view in enumerate(views)]])


class RoundRobinViews(Assignment):
    """Round-robin distribution of whole views, each to the rank that holds its image where the numbers stay even.

    With B views and R ranks, each rank gets B // R or one more; with fewer views than ranks some get none.
    """

    by_size = True

    def assign(self, views: Sequence[View], ranks: int, holders: Sequence[int] | None = None) -> Plan:
        capacity = [len(views) // ranks + (1 if rank < len(views) % ranks else 0) for rank in range(ranks)]
        owner: list[int] = [-1] * len(views)
        if holders is not None:
            for position, holder in enumerate(holders):
                if capacity[holder] > 0:
                    owner[position] = holder
                    capacity[holder] -= 1
        spare = (rank for rank in range(ranks) for _ in range(capacity[rank]))
        plan: list[list[Patch]] = [[] for _ in range(ranks)]
        for position, view in enumerate(views):
            rank = owner[position] if owner[position] >= 0 else next(spare)
            plan[rank].append(Patch.whole(position, view))
        return Plan.of(plan)

    def most_views(self, batch: int, ranks: int) -> int:
        return -(-batch // ranks)


class TileRanges(Assignment):
    """Assignment that cuts every view of the batch into bands of whole rows of tiles, so that all ranks have equal
    work.

    The rows of tiles of all views form one sequence, which is cut into one run for each rank. A rank gets a band of a
    large view, several small views, or the end of one and the beginning of the next. The ranks that hold images do not
    matter: a band of an image is small compared with its splats.

    Args:
        work: the work of each row, as far as it is known; the same on every rank.
    """

    learns = Feedback.WORK

    def __init__(self, work: TileWork) -> None:
        self.work = work
        self._kept: list[tuple[int, ...]] = []  # cuts, those used last at the end
        self._plans: dict[tuple[object, ...], Plan] = {}  # made lately: it is quicker to find one than to make it

    def assign(self, views: Sequence[View], ranks: int, holders: Sequence[int] | None = None) -> Plan:
        work = self.work.estimate(views)
        return self._plan(views, work, ideal_cuts(work, ranks))

    def assign_alike(self, views: Sequence[View], ranks: int) -> Plan:
        """Assign patches as `assign` does, or by an earlier batch's cuts if they balance work nearly as well."""
        work = self.work.estimate(views)
        before = list(accumulate((amount for rows in work for amount in rows), initial=0))

        def most(cuts: Sequence[int]) -> int:
            return max(before[b] - before[a] for a, b in pairwise(cuts))

        best = ideal_cuts(work, ranks)
        fitting = [cuts for cuts in self._kept if len(cuts) == ranks + 1 and cuts[-1] == len(before) - 1]
        chosen = min(reversed(fitting), key=most, default=best)
        if most(chosen) * _SLACK > most(best) * (_SLACK + 1):
            chosen = best
        self._kept = [*(cuts for cuts in self._kept if cuts != chosen), chosen][-MOST_KEPT:]
        return self._plan(views, work, chosen)

    def learn(self, views: Sequence[View], counts: Sequence[int]) -> None:
        self.work.learn(views, counts[: sum(map(self.work.rows, views))])

    def state(self) -> list[list[int]]:
        """Return rows of integers for a checkpoint. A row is a view's number and the work of each of its rows of tiles,
        or -1 and one set of cuts that is kept."""
        known = [[index, *counts] for index, counts in sorted(self.work.counts.items())]
        return known + [[-1, *cuts] for cuts in self._kept]

    def load_state(self, state: Sequence[Sequence[int]]) -> None:
        self.work.counts = {row[0]: list(row[1:]) for row in state if row[0] >= 0}
        self._kept = [tuple(row[1:]) for row in state if row[0] < 0]

    def _plan(self, views: Sequence[View], work: Sequence[Sequence[int]], cuts: Sequence[int]) -> Plan:
        key = (tuple(cuts), tuple((view.width, view.height) for view in views))
        if key not in self._plans:
            ranges = stretches(cuts, [len(rows) for rows in work])
            plan = Plan.of([self._band(view, views[view], first, last) for view, first, last in one] for one in ranges)
            self._plans = {**dict(list(self._plans.items())[1 - 4 * MOST_KEPT :]), key: plan}
        return self._plans[key]

    def _band(self, position: int, view: View, first: int, last: int) -> Patch:
        if first == 0 and last == self.work.rows(view):
            return Patch.whole(position, view)
        tile = self.work.tile
        return Patch(position, 0, first * tile, view.width, min(last * tile, view.height), SSIM_HALO)


_SNAP = 32
"""A cut that is off by less than this fraction of a rank's share goes between two views, where it costs no halo."""
_SLACK = 16
"""Cuts are made again where the most work of a rank is not more than this fraction above the least possible."""
MOST_KEPT = 16
"""Cuts that are kept to be made again."""


def ideal_cuts(work: Sequence[Sequence[int]], ranks: int) -> tuple[int, ...]:
    """Cut the rows of several views, one view after the other, into stretches of equal work.

    A rank's work differs from the mean by no more than the largest row's, or a sixteenth of the mean where that is
    more: each cut is made at the end of a row that is nearest to its ideal place. With more ranks than rows, or much of
    the work in one row, some ranks get none. Integers alone: the same cuts everywhere.

    Args:
        work: by view, by row, not negative; where all is 0 all rows count alike.
        ranks: how many stretches.

    Returns:
        [ranks + 1] ascending, the rows before each cut; the first is 0, the last the number of rows.

    Raises:
        ValueError: `ranks` is not positive, or some work is negative.
    """
    if ranks < 1:
        raise ValueError(f"ideal_cuts: {ranks} ranks; at least one is needed")
    line = [amount for rows in work for amount in rows]
    if any(amount < 0 for amount in line):
        raise ValueError(f"ideal_cuts: negative work, {min(line)}")
    before = list(accumulate(line if any(line) else [1] * len(line), initial=0))
    starts = list(accumulate((len(rows) for rows in work), initial=0))
    total = before[-1]

    def off(place: int, rank: int) -> int:
        """Return the distance of a cut at `place` from its ideal place, in units of 1/ranks."""
        return abs(before[place] * ranks - rank * total)

    cuts = [0]
    for rank in range(1, ranks):
        below = bisect_right(before, rank * total // ranks) - 1
        nearest = min((place for place in (below, below + 1) if place <= len(line)), key=lambda p: off(p, rank))
        between = min(starts, key=lambda p: off(p, rank))
        cuts.append(between if _SNAP * off(between, rank) <= total else nearest)
    return (*cuts, len(line))


def stretches(cuts: Sequence[int], rows: Sequence[int]) -> list[list[tuple[int, int, int]]]:
    """Return the rows between the cuts: by rank, ascending, (view, first row, end row), never empty. Every row is in
    one.

    Args:
        cuts: `ideal_cuts`'.
        rows: of each view.
    """
    starts = list(accumulate(rows, initial=0))
    return [
        [
            (view, max(first, start) - start, min(last, end) - start)
            for view, (start, end) in enumerate(pairwise(starts))
            if max(first, start) < min(last, end)
        ]
        for first, last in pairwise(cuts)
    ]
