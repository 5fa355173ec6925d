"""Assignment of `locality`: each view of a batch is cut into patches, and each patch is drawn where its points are
(4.2.2)."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ns_multigpu.core.assign.assignment import MOST_KEPT, Assignment, Feedback
from ns_multigpu.core.assign.plan import Plan
from ns_multigpu.core.dist.collectives import all_gather_ints
from ns_multigpu.core.dist.world import World
from ns_multigpu.core.exchange.column_wire import ColumnRows
from ns_multigpu.core.exchange.row_operators import RowOperators
from ns_multigpu.core.types import SSIM_HALO, TILE, Patch, Splats, View
from ns_multigpu.locality.assign import Assigner, Volume, in_runs
from ns_multigpu.locality.options import LocalityOptions
from ns_multigpu.locality.rules import Access, Planner

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

SLACK = 17 / 16
"""An assignment is made again where the most work of a rank is at most so many times the least possible."""


def cuts(pixels: int, parts: int) -> list[int]:
    """Return the cuts of a side of `pixels` pixels: [parts + 1] ascending, at whole tiles; fewer parts than tiles
    allow."""
    tiles = -(-pixels // TILE)
    parts = min(parts, tiles)
    return [min(pixels, tiles * k // parts * TILE) for k in range(parts + 1)]


def patches_of(view: View, position: int, factor: int) -> tuple[tuple[int, Patch], ...]:
    """Return a view's patches row by row, each with its number among `factor` x `factor`."""
    return _patches(view.width, view.height, position, factor)


@lru_cache(maxsize=4096)
def _patches(width: int, height: int, position: int, factor: int) -> tuple[tuple[int, Patch], ...]:
    """Return the patches of a view of this size. Cached: sizes recur in every step."""
    rows, columns = cuts(height, factor), cuts(width, factor)
    halo = 0 if len(rows) == len(columns) == 2 else SSIM_HALO
    return tuple(
        (row * factor + column, Patch(position, x0, y0, x1, y1, halo))
        for row, (y0, y1) in enumerate(pairwise(rows))
        for column, (x0, x1) in enumerate(pairwise(columns))
    )


@dataclass
class Tally:
    """Statistics of plans since the last report.

    Attributes:
        steps: batches planned. misses: of these, those whose plan was late. between, total: points that went to another
            machine, and to another rank, in all. send, receive, draw: sums over steps of the busiest rank's load over
            the mean.
    """

    steps: int = 0
    misses: int = 0
    between: float = 0.0
    total: float = 0.0
    send: float = 0.0
    receive: float = 0.0
    draw: float = 0.0

    def add(self, volume: Volume) -> None:
        """Count one batch."""
        self.between += volume.between
        self.total += volume.total
        loads = (volume.sent, volume.received, volume.drawn)
        self.send, self.receive, self.draw = (
            before + float(load.max() / max(load.mean(), 1e-9)) if load.any() else before + 1.0
            for before, load in zip((self.send, self.receive, self.draw), loads, strict=True)
        )


_Key = tuple[tuple[int, int, int], ...]


def _key(views: Sequence[View]) -> _Key:
    """Return the key of a plan. The same views at another resolution have other patches."""
    return tuple((view.index, view.width, view.height) for view in views)


class LocalPatches(Assignment):
    """Assignment of patches to ranks, by the points that each patch needs from each rank.

    A view's patches' needs are those of its last drawing (`Access`), and before that the placement's counts. Patches of
    unknown views are distributed in runs.

    Args:
        world: the ranks. options: see there. access: shared with the placement.
    """

    learns = Feedback.NEEDS

    def __init__(self, world: World, options: LocalityOptions, access: Access) -> None:
        self._world, self._options, self._access = world, options, access
        self._factor = options.patches if world.size > 1 else 1  # alone a rank draws views whole
        self._assigner = Assigner(world.machines, world.size // world.machines)
        ahead = options.plans == "ahead" or (options.plans == "auto" and world.device.type == "cuda")
        self._planner = Planner(self._assigner) if ahead and world.machines > 1 else None
        self._kept: list[tuple[int, ...]] = []  # assignments in one machine, those used last at the end
        self._coming: deque[tuple[_Key, int]] = deque()  # prefetched batches, and their numbers
        self._prefetched, self._agreed = 0, -1
        self.tally = Tally()

    def assign(self, views: Sequence[View], ranks: int, holders: Sequence[int] | None = None) -> Plan:
        return self._made(views, self._at_once(views, ranks), ranks)

    def assign_alike(self, views: Sequence[View], ranks: int) -> Plan:
        """Return the prefetched plan of this batch, or the rule's if that is late. Within one machine, where only
        balance matters, return an earlier batch's assignment if it is nearly as balanced."""
        chosen = self._prefetched_plan(_key(views))
        needed = self._needed(views)
        if chosen is None and needed is not None and self._world.machines == 1:
            chosen = self._kept_or_new(needed)
        if chosen is None:
            chosen = self._at_once(views, ranks)
        self._count(chosen, needed)
        return self._made(views, chosen, ranks)

    @property
    def prefetches(self) -> bool:
        return self._planner is not None

    def prefetch_plans(self, batches: Sequence[Sequence[View]]) -> None:
        if self._planner is None:
            return
        ready = all_gather_ints([self._planner.ready_through()], self._world)
        self._agreed = min(row[0] for row in ready)
        for views in batches:
            needed = self._needed(views)
            self._planner.submit(self._prefetched, len(self._cut(views)) if needed is None else needed)
            self._coming.append((_key(views), self._prefetched))
            self._prefetched += 1

    def figures(self) -> dict[str, float]:
        """Return means over the steps since the last call.

        These are the splats sent to other machines and to other ranks, the busiest rank's load over the mean, and the
        part of plans that were late.
        """
        tally, self.tally = self.tally, Tally()
        if tally.steps == 0:
            return {}
        return {
            "splats_between_machines": tally.between / tally.steps,
            "splats_sent": tally.total / tally.steps,
            "busiest_sender": tally.send / tally.steps,
            "busiest_receiver": tally.receive / tally.steps,
            "busiest_drawer": tally.draw / tally.steps,
            "plan_misses": tally.misses / tally.steps,
        }

    def most_pixels(self, batch: int, width: int, height: int, ranks: int, halo: int) -> int:
        rows, columns = cuts(height, self._factor), cuts(width, self._factor)
        most = [max(b - a for a, b in pairwise(side)) for side in (rows, columns)]
        if len(rows) == len(columns) == 2:
            halo = 0
        patches = batch * (len(rows) - 1) * (len(columns) - 1)
        machines = self._world.machines if ranks == self._world.size else 1
        of_machine = -(-patches // machines)
        each = -(-of_machine // (ranks // machines))
        return each * (most[0] + 2 * halo) * (most[1] + 2 * halo)

    def counts(self, batch: int, width: int, height: int) -> int:
        return batch * (len(cuts(width, self._factor)) - 1) * (len(cuts(height, self._factor)) - 1)

    def learn(self, views: Sequence[View], counts: Sequence[int]) -> None:
        table = np.array(counts, dtype=np.float64).reshape(self._world.size, -1)
        self._record(views, table.T)

    def state(self) -> list[list[int]]:
        return [list(one) for one in self._kept]

    def load_state(self, state: Sequence[Sequence[int]]) -> None:
        self._kept = [tuple(one) for one in state]

    # ---- of rows that autograd exchanges: `RowCounts` ----

    def count(self, splats: Splats, views: Sequence[View], plan: Plan) -> Tensor:
        """Return [patches] int64, the number of this rank's splats that touch each patch of the plan."""
        drawn = list(enumerate(plan.patches()))
        return RowOperators().count(ColumnRows.of(splats), views, drawn, len(drawn))

    def record(self, views: Sequence[View], plan: Plan, table: Sequence[Sequence[int]]) -> None:
        """Store what each rank has counted."""
        needed = np.array(table, dtype=np.float64).reshape(self._world.size, -1).T
        drawers = {patch: rank for rank, patches in enumerate(plan.drawn) for patch in patches}
        self._count(np.array([drawers[patch] for patch in plan.patches()], dtype=np.int64), needed)
        self._record(views, needed)

    # ---- the plan ----

    def _cut(self, views: Sequence[View]) -> list[tuple[int, Patch]]:
        return [one for k, view in enumerate(views) for one in patches_of(view, k, self._factor)]

    def _needed(self, views: Sequence[View]) -> Floats | None:
        """Return [patches, ranks], the points that the batch's patches need; None if no view has been measured."""
        cut = self._cut(views)
        known = [self._access.of(view.index) for view in views]
        if all(one is None for one in known):
            return None
        rows = np.zeros((len(cut), self._world.size))
        for row, (number, patch) in enumerate(cut):
            of_view = known[patch.view]
            if of_view is not None:
                rows[row] = of_view[number]
        return rows

    def _at_once(self, views: Sequence[View], ranks: int) -> Ints:
        needed = self._needed(views)
        if needed is None:
            return in_runs(len(self._cut(views)), ranks)
        return self._assigner.assign(needed)

    def _kept_or_new(self, needed: Floats) -> Ints:
        """Return the most balanced of the kept assignments, or a new one if that is clearly better."""
        work, ranks = needed.sum(1), needed.shape[1]

        def most(chosen: Sequence[int]) -> float:
            return float(np.bincount(chosen, weights=work, minlength=ranks).max())

        fitting = [one for one in self._kept if len(one) == len(work)]
        chosen = min(reversed(fitting), key=most, default=None)
        if chosen is None or most(chosen) > SLACK * max(work.sum() / ranks, work.max()):
            best = tuple(self._assigner.assign(needed).tolist())
            if chosen is None or most(chosen) > SLACK * most(best):
                chosen = best
        self._kept = [*(one for one in self._kept if one != chosen), chosen][-MOST_KEPT:]
        return np.array(chosen, dtype=np.int64)

    def _made(self, views: Sequence[View], chosen: Ints, ranks: int) -> Plan:
        drawn: list[list[Patch]] = [[] for _ in range(ranks)]
        for (_, patch), rank in zip(self._cut(views), chosen.tolist(), strict=True):
            drawn[rank].append(patch)
        return Plan.of(drawn)

    def _prefetched_plan(self, key: _Key) -> Ints | None:
        """Return the prefetched plan of a batch of these views; None if there is none."""
        while self._planner is not None and any(views == key for views, _ in self._coming):
            first, number = self._coming.popleft()
            if first == key:
                assigned = self._planner.serve(number, self._agreed)
                self.tally.misses += not assigned.planned
                return assigned.ranks
        return None

    def _count(self, chosen: Ints, needed: Floats | None) -> None:
        self.tally.steps += 1
        if needed is not None:
            self.tally.add(Volume.of(needed, chosen, self._assigner.per_machine))

    def _record(self, views: Sequence[View], needed: Floats) -> None:
        """Remember what was needed: [patches or more, ranks] of a batch's patches in the plan's order, which is that of
        `_cut`."""
        rows = np.zeros((len(views), self._options.patches**2, self._world.size))
        for row, (number, patch) in enumerate(self._cut(views)):
            rows[patch.view, number] = needed[row]
        self._access.record([view.index for view in views], rows.reshape(-1, self._world.size))
