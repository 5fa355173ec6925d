# torch annotates only part of itself:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
"""Splats that reach into other cells are drawn there too, where views are drawn cell by cell (`composite`).

A splat goes to each rank that has a cell which it may reach, as a ghost. Of each tile every cell draws the splats in a
window of depth of its own. The windows of all cells follow one another, in the order in which cells are composited, and
leave no gap. So each splat is drawn once in each tile, and splats are blended by depth, as one rank with all blends
them. What is sent is a layer of splats along the planes between cells. Gradients come back to the owner, who counts
statistics.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from cuda_ext.ops.list_windows import clip_lists
from cuda_ext.ops.row_exchange import route_lines
from ns_multigpu.core.kernels import Arrived, Lists
from ns_multigpu.core.plan import Plan
from ns_multigpu.core.travelling_rows import RowsTravel, touches
from ns_multigpu.core.types import Splats, View


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
    def reach(
        self, view_ids: Tensor, means2d: Tensor, radii: Tensor, depths: Tensor, views: Sequence[View], ranks: int
    ) -> Tensor:
        """[ranks, M] bool, which rows may lie within a window of each rank's cells; perhaps more. Nothing is read back.

        Args:
            view_ids: [M] positions in `views`. means2d: [M, 2], radii: [M, 2] pixels. depths: [M].
        """


class RowsCross(RowsTravel):
    """Rows go to the ranks that draw a cell which they reach, within the rectangle that it is drawn in."""

    def __init__(self, crossing: Crossing) -> None:
        super().__init__(relays=False)
        self.crossing = crossing

    def _touched(self, own: Splats, views: Sequence[View], plan: Plan) -> list[Tensor]:
        rows = own.rows
        reach = self.crossing.reach(
            own.hits.view_ids, rows["means2d"].detach(), rows["radii"], rows["depths"].detach(), views, len(plan.drawn)
        )
        return [touches(own, views, patches) & there for patches, there in zip(plan.drawn, reach, strict=True)]


def clipped(crossing: Crossing, lists: Lists, arrived: Arrived, plan: Plan, views: Sequence[View], rank: int) -> Lists:
    """The lists of a rank's patches with what its cells draw of them. Nothing is read back."""
    tile_offsets, row_ids, met = lists
    windows = crossing.windows(plan, views, rank).to(arrived.depths.dtype)
    return *clip_lists(tile_offsets, row_ids, arrived.depths, windows), met


def route_crossing(
    crossing: Crossing, rows: Arrived, views: Sequence[View], drawn: Sequence[int], place: Tensor, counts: Tensor,
) -> None:  # fmt: skip
    """`route_lines` of all lines, for rows that go where they reach a cell. Arguments as there."""
    lines, ranks = len(rows.means2d), len(counts)
    route_lines(rows.view_ids, rows.count, rows.means2d, rows.radii, drawn, 0, lines, place, counts)
    # Lines behind the last row hold anything.
    view_ids = rows.view_ids.clamp(0, len(views) - 1)
    goes = (place >= 0) & crossing.reach(view_ids, rows.means2d, rows.radii, rows.depths, views, ranks)
    place.copy_(torch.where(goes, goes.cumsum(1) - 1, -1))
    counts.copy_(goes.sum(1))
