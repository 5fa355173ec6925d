"""Splats that reach into other cells are drawn there too, where views are drawn cell by cell (`composite`).

A splat goes to each rank that draws a cell which it may reach, as a ghost. Of each tile every cell draws the splats in
a window of depth of its own. The windows of all cells follow one another, in the order in which cells are composited,
and leave no gap. So each splat is drawn once in each tile, and splats are blended by depth, as one rank with all blends
them. What is sent is a layer of splats along the planes between cells. Gradients come back to the owner, who counts
statistics.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cuda_ext.ops.exchange.row_exchange import route_lines
from cuda_ext.ops.raster.list_windows import clip_lists
from ns_multigpu.core.assign.plan import Plan
from ns_multigpu.core.exchange.exchanged_rows import ExchangedRows, touches
from ns_multigpu.core.exchange.row_operators import RowOperators
from ns_multigpu.core.kernels import Arrived, Lists, Rows
from ns_multigpu.core.types import Patch, Splats, View


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


class BoundaryRows(ExchangedRows):
    """Rows go to the ranks that draw a cell which they reach, where they touch the rectangle that it is drawn in.

    Args:
        crossing: where cells lie in views.
    """

    def __init__(self, crossing: Crossing) -> None:
        super().__init__(relays=False)
        self.crossing = crossing

    def operators(self) -> RowOperators:
        return BoundaryRowOperators(self.crossing)

    def touched(self, own: Splats, views: Sequence[View], plan: Plan) -> list[Tensor]:
        reach = self.crossing.reached_by(_Rows.of(own), views)
        found = [torch.zeros_like(own.hits.view_ids, dtype=torch.bool) for _ in plan.drawn]
        for there, patches in zip(found, plan.drawn, strict=True):
            for patch in patches:
                there |= touches(own, views, [patch]) & reach[patch.cell]
        return found


class BoundaryRowOperators(RowOperators):
    """Rows go to each rank that draws a cell which they reach, where they touch its patch."""

    def __init__(self, crossing: Crossing) -> None:
        self._crossing = crossing

    def _route(
        self, rows: Rows, views: Sequence[View], numbers: list[int], patches: Sequence[Patch], place: Tensor,
        counts: Tensor,
    ) -> None:  # fmt: skip
        reached = self._crossing.reached_by(rows, views)
        where = rows.view_ids, rows.count, rows.means2d, rows.radii
        cells = [patch.cell for patch in patches]
        route_lines(*where, numbers, 0, place.shape[1], place, counts, reached, cells)


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
