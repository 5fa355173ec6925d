"""Operators of the row legs in a step that reads nothing back: which rows go where. Transports carry them."""

from collections.abc import Sequence

from torch import Tensor

from cuda_ext.ops.exchange.row_exchange import route_lines
from ns_multigpu.core.assign.plan import Plan
from ns_multigpu.core.kernels import Rows
from ns_multigpu.core.types import Patch, View


class RowOperators:
    """Rows go to each rank that draws a patch which they touch."""

    def route(
        self, rows: Rows, views: Sequence[View], plan: Plan, ways: Sequence[int | None], place: Tensor, counts: Tensor
    ) -> None:
        """Write which rows go which way, and how many.

        Args:
            rows: of this rank's points. views: the batch. plan: who draws what.
            ways: by rank, the way that rows take to it; ranks may share one. None: nothing is sent there.
            place: [ways, rows] int32, written: each row's line in the way's segment, or -1.
            counts: [ways] int64, written.
        """
        drawn = [(way, p) for way, of_rank in zip(ways, plan.drawn, strict=True) if way is not None for p in of_rank]
        patches = [n for way, p in drawn for n in (way, p.view, *p.rendered(views[p.view]))]
        self._route(rows, views, patches, [p for _, p in drawn], place, counts)

    def _route(
        self, rows: Rows, views: Sequence[View], numbers: list[int], patches: Sequence[Patch], place: Tensor,
        counts: Tensor,
    ) -> None:  # fmt: skip
        where = rows.view_ids, rows.count, rows.means2d, rows.radii
        route_lines(*where, numbers, 0, place.shape[1], place, counts)
