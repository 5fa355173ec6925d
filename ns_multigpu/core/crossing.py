# torch annotates only part of itself:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
"""Splats that reach into other cells are drawn there too, where views are drawn cell by cell (`composite`).

A splat goes to each rank that draws a cell which it may reach, as a ghost. Of each tile every cell draws the splats in
a window of depth of its own. The windows of all cells follow one another, in the order in which cells are composited,
and leave no gap. So each splat is drawn once in each tile, and splats are blended by depth, as one rank with all blends
them. What is sent is a layer of splats along the planes between cells. Gradients come back to the owner, who counts
statistics.
"""

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cuda_ext.ops.list_windows import clip_lists
from cuda_ext.ops.row_exchange import route_lines
from cuda_ext.ops.row_spans import row_spans
from ns_multigpu.core.kernels import Arrived, Kernels, Lists
from ns_multigpu.core.pairs import Pairs
from ns_multigpu.core.plan import Plan
from ns_multigpu.core.planned_rows import PlannedRows
from ns_multigpu.core.transport import Transport
from ns_multigpu.core.travelling_rows import RowsTravel, touches
from ns_multigpu.core.types import Splats, View
from ns_multigpu.core.world import World


class Crossing(ABC):
    """Where the cells of space lie in views."""

    @abstractmethod
    def windows(self, plan: Plan, views: Sequence[View], rank: int) -> Tensor:
        """[T, 2] float64: of each tile of the patches that a rank draws, in order, the depths that its cell draws:
        first <= depth < second. Nothing is read back. Of one tile all ranks' windows follow one another bit for bit.

        Raises:
            ValueError: a patch does not begin with a tile of its view.
        """

    @abstractmethod
    def reach(self, view_ids: Tensor, means2d: Tensor, radii: Tensor, depths: Tensor, views: Sequence[View]) -> Tensor:
        """[cells, M] bool, which rows may lie within a window of each cell; perhaps more. Nothing is read back.

        Args:
            view_ids: [M] positions in `views`; those of padding may be anything. means2d: [M, 2], radii: [M, 2]
                pixels. depths: [M].
        """

    def reached_by(self, rows: Any, views: Sequence[View]) -> Tensor:
        """`reach` of rows that have `view_ids`, `means2d`, `radii` and `depths`."""
        return self.reach(rows.view_ids, rows.means2d, rows.radii, rows.depths, views)

    def spans(self, rows: Any, views: Sequence[View], reached: Tensor, count: Tensor | None = None) -> Tensor:
        """What this rank tells of `Learns.SPANS`: of each view and cell `row_spans` of the rows that reach the cell.

        Args:
            rows: of this rank's points. reached: by them, as `reach` says.
            count: [1] int64, how many there are; None for all.
        """
        sizes = [(view.width, view.height) for view in views]
        return row_spans(rows.view_ids, rows.means2d, rows.radii, sizes, count, reached)


class RowsCross(RowsTravel):
    """Rows go to the ranks that draw a cell which they reach, where they touch the rectangle that it is drawn in.

    Args:
        crossing: where cells lie in views.
        told: called with a batch's views and what `Learns.SPANS` is of them, on all ranks alike, where there are
            gradients. Rows then have the room that plans foresee, and go by collectives. None: nothing is counted.
    """

    def __init__(self, crossing: Crossing, told: Callable[[Sequence[View], Sequence[int]], None] | None = None) -> None:
        super().__init__(None if told is None else self, relays=False)
        self._reached: tuple[weakref.ref[Splats], Tensor] | None = None  # of the splats that were asked of last
        self.crossing, self._told, self.planned = crossing, told, told is not None

    def transport(
        self, world: World, kernels: Kernels, rows: int, capacity: int | Pairs, words: int
    ) -> Transport | None:
        return PlannedRows(world, kernels, rows, capacity, words) if self.planned else None

    def count(self, splats: Splats, views: Sequence[View], plan: Plan) -> Tensor:
        """See `RowCounts`."""
        return self.crossing.spans(_Rows.of(splats), views, self._reach(splats, views))

    def told(self, views: Sequence[View], plan: Plan, table: Sequence[Sequence[int]]) -> None:
        """See `RowCounts`."""
        assert self._told is not None, "else nothing was counted"
        self._told(views, [n for row in table for n in row])

    def touched(self, own: Splats, views: Sequence[View], plan: Plan) -> list[Tensor]:
        reach = self._reach(own, views)
        found = [torch.zeros_like(own.hits.view_ids, dtype=torch.bool) for _ in plan.drawn]
        for there, patches in zip(found, plan.drawn, strict=True):
            for patch in patches:
                there |= touches(own, views, [patch]) & reach[patch.cell]
        return found

    def _reach(self, own: Splats, views: Sequence[View]) -> Tensor:
        """[cells, M] which cells each row reaches: asked for where rows go, and again where they are counted."""
        if self._reached is None or self._reached[0]() is not own:
            self._reached = weakref.ref(own), self.crossing.reached_by(_Rows.of(own), views)
        return self._reached[1]


class _Rows(NamedTuple):
    """Where splats are."""

    view_ids: Tensor
    means2d: Tensor
    radii: Tensor
    depths: Tensor

    @staticmethod
    def of(splats: Splats) -> "_Rows":
        rows = splats.rows
        return _Rows(splats.hits.view_ids, rows["means2d"].detach(), rows["radii"], rows["depths"].detach())


def clipped(crossing: Crossing, lists: Lists, arrived: Arrived, plan: Plan, views: Sequence[View], rank: int) -> Lists:
    """The lists of a rank's patches with what its cells draw of them. Nothing is read back."""
    tile_offsets, row_ids, met = lists
    windows = crossing.windows(plan, views, rank).to(arrived.depths.dtype)
    return *clip_lists(tile_offsets, row_ids, arrived.depths, windows), met


def route_crossing(
    reached: Tensor, rows: Any, drawn: Sequence[int], cells: Sequence[int], place: Tensor, counts: Tensor
) -> None:
    """`route_lines` of all lines, for rows that go where they reach a patch's cell. Arguments as there.

    Args:
        reached: by the rows, as `Crossing.reach` says. cells: of each of the patches `drawn`.
    """
    where = rows.view_ids, rows.count, rows.means2d, rows.radii
    route_lines(*where, drawn, 0, len(rows.means2d), place, counts, reached, cells)
