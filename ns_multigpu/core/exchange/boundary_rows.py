"""Boundary splats of views that are drawn cell by cell (`composite`): they are also drawn in the other cells they
touch.

A splat is sent to each rank that draws a cell which it may touch. In each tile every cell draws the splats in a depth
window of its own. The windows of all cells are consecutive, in the order of compositing, without gaps. So each splat is
drawn once in each tile, and splats are blended by depth as on one rank. Only splats along the planes between cells are
exchanged. Gradients return to the owner, which counts statistics.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from cuda_ext.ops.raster.list_windows import clip_lists
from ns_multigpu.core.assign.plan import Plan
from ns_multigpu.core.exchange.exchanged_rows import ExchangedRows
from ns_multigpu.core.exchange.row_operators import RowOperators
from ns_multigpu.core.kernels import Lists, Received, Rows
from ns_multigpu.core.types import View


class CellRegions(ABC):
    """Regions of cells in views."""

    @abstractmethod
    def windows(self, plan: Plan, views: Sequence[View], rank: int) -> Tensor:
        """Return the depth window of each tile of a rank's patches, [T, 2] float64: first <= depth < second. Nothing is
        read back. All ranks' windows of one tile are consecutive bit for bit.

        Raises:
            ValueError: a patch does not begin with a tile of its view.
        """

    @abstractmethod
    def overlaps_cells(
        self, view_ids: Tensor, means2d: Tensor, radii: Tensor, depths: Tensor, views: Sequence[View]
    ) -> Tensor:
        """Return the rows that may lie within a window of each cell, [cells, M] bool; perhaps more. Nothing is read
        back.

        Args:
            view_ids: [M] positions in `views`, arbitrary for padding. means2d: [M, 2], radii: [M, 2] pixels. depths:
                [M].
        """

    def reached_by(self, rows: Any, views: Sequence[View]) -> Tensor:
        """Return `overlaps_cells` of rows that have `view_ids`, `means2d`, `radii` and `depths`."""
        return self.overlaps_cells(rows.view_ids, rows.means2d, rows.radii, rows.depths, views)


class BoundaryRows(ExchangedRows):
    """Row leg that sends rows to the ranks whose drawn cells they touch, if they touch the cell's patch.

    Args:
        regions: regions of cells in views.
    """

    def __init__(self, regions: CellRegions) -> None:
        super().__init__(hierarchical=False)
        self.regions = regions

    def operators(self) -> RowOperators:
        return BoundaryRowOperators(self.regions)


class BoundaryRowOperators(RowOperators):
    """Operators that send rows to each rank that draws a cell which they may touch, if they overlap the cell's
    patch."""

    def __init__(self, regions: CellRegions) -> None:
        self._regions = regions

    def _overlaps(self, rows: Rows, views: Sequence[View]) -> Tensor | None:
        return self._regions.reached_by(rows, views)


def clipped(
    regions: CellRegions, lists: Lists, received: Received, plan: Plan, views: Sequence[View], rank: int
) -> Lists:
    """Return the lists of a rank's patches, restricted to its cells' windows. Nothing is read back."""
    tile_offsets, row_ids, met = lists
    windows = regions.windows(plan, views, rank).to(received.depths.dtype)
    return *clip_lists(tile_offsets, row_ids, received.depths, windows), met
