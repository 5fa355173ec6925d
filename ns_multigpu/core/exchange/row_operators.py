"""Operators of the row legs: they decide which rows are sent to which ranks, without readback. Transports send them."""

from collections.abc import Iterator, Sequence

from torch import Tensor

from cuda_ext.ops.exchange.row_exchange import MOST_RANKS, route_lines
from ns_multigpu.core.assign.plan import Plan
from ns_multigpu.core.kernels import Rows
from ns_multigpu.core.types import Patch, View

PatchDestinations = Sequence[tuple[int, Patch]]
"""Patches, each with the index of the destination to which its rows are sent."""


class RowOperators:
    """Operators that send rows to each rank that draws a patch which they overlap."""

    def route(
        self, rows: Rows, views: Sequence[View], plan: Plan, destinations: Sequence[int], place: Tensor, counts: Tensor
    ) -> None:
        """Write which rows are sent to which destination, and how many. See `route_patches`.

        Args:
            plan: the same on all ranks.
            destinations: by rank, the index of its destination; ranks may share one.
        """
        ranks = zip(destinations, plan.drawn, strict=True)
        self.route_patches(rows, views, [(to, patch) for to, patches in ranks for patch in patches], place, counts)

    def route_patches(
        self, rows: Rows, views: Sequence[View], drawn: PatchDestinations, place: Tensor, counts: Tensor
    ) -> None:
        """Write which rows are sent to which destination, and how many. Nothing is read back.

        Args:
            rows: of this rank's points. views: the batch.
            place: [destinations, rows] int32, written: each row's line in the destination's segment, or -1.
            counts: [destinations] int64, written.
        """
        where = rows.view_ids, rows.count, rows.means2d, rows.radii
        overlaps = self._overlaps(rows, views)
        for first, some in _by_bits(drawn, len(place)):
            numbers = [n for to, patch in some for n in (to, patch.view, *patch.rendered(views[patch.view]))]
            cells = [] if overlaps is None else [patch.cell for _, patch in some]
            lines, sums = place[first : first + MOST_RANKS], counts[first : first + MOST_RANKS]
            route_lines(*where, numbers, lines, sums, overlaps, cells)

    def count(self, rows: Rows, views: Sequence[View], drawn: PatchDestinations, destinations: int) -> Tensor:
        """Return how many rows are sent to each destination, [destinations] int64. Nothing is read back."""
        counts = rows.count.new_zeros(destinations)
        place = rows.view_ids.new_empty(min(destinations, MOST_RANKS), len(rows.view_ids))
        for first, some in _by_bits(drawn, destinations):
            sums = counts[first : first + MOST_RANKS]
            self.route_patches(rows, views, some, place[: len(sums)], sums)
        return counts

    def _overlaps(self, rows: Rows, views: Sequence[View]) -> Tensor | None:
        """Return the rows that may be drawn in each cell, [cells, M] bool; None if all of them may be."""
        return None


def _by_bits(drawn: PatchDestinations, destinations: int) -> Iterator[tuple[int, PatchDestinations]]:
    """Split destinations into runs that one call routes to; yield the first of each, and its patches counted from
    there."""
    for first in range(0, destinations, MOST_RANKS):
        yield first, [(to - first, patch) for to, patch in drawn if first <= to < first + MOST_RANKS]
