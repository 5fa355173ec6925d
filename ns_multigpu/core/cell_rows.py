# torch annotates only part of itself:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
"""Splats of a cell on their way to ranks that own the pixels and draw the cell's layer there themselves.

Which layers are drawn by whom is the plan's: a layer of a cell goes as pixels from the cell's rank, or as splats from
there. Either way it is drawn of the same splats in the same order, so that the choice changes nothing but the bytes.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from torch import Tensor

from ns_multigpu.core.cell_layers import CellLayers
from ns_multigpu.core.kernels import Kernels
from ns_multigpu.core.legs import RowLeg
from ns_multigpu.core.pairs import Pairs
from ns_multigpu.core.plan import Plan
from ns_multigpu.core.planned_rows import PlannedRows
from ns_multigpu.core.transport import Transport
from ns_multigpu.core.travelling_rows import RowsTravel
from ns_multigpu.core.types import Hits, Points, Splats, View
from ns_multigpu.core.world import World


class CellRows(RowLeg):
    """All-to-all of splats, by layers instead of views (see `RowsTravel`).

    Args:
        layers: of all ranks.
        told: called with a batch's views and what `Learns.SPANS` is of them, on all ranks alike, where there are
            gradients.
    """

    travels, planned = True, True

    def __init__(self, layers: CellLayers, told: Callable[[Sequence[View], Sequence[int]], None]) -> None:
        self.layers, self._told = layers, told
        self._views: Sequence[View] = ()
        self._travel = RowsTravel(self, relays=False)

    def transport(self, world: World, kernels: Kernels, rows: int, capacity: int | Pairs, words: int) -> Transport:
        return PlannedRows(world, kernels, rows, capacity, words)

    def bring(self, own: Splats, points: Points, views: Sequence[View], plan: Plan, world: World) -> Splats:
        layers, cells = self.layers.global_layers(own.hits.view_ids, own.hits.point_ids), self.layers.count
        own = replace(own, hits=Hits(layers.int(), own.hits.point_ids))
        if self.layers.most > 1:  # rows are to leave by ascending layers, and within one as they were
            own = _in_order(own, layers.argsort(stable=True))
        seen = [view for view in views for _ in range(cells)]
        drawn = tuple(tuple(replace(p, view=self.layers.layer(p)) for p in patches) for patches in plan.drawn)
        self._views = views
        return self._travel.bring(own, points, seen, replace(plan, drawn=drawn), world)

    def count(self, splats: Splats, views: Sequence[View], plan: Plan) -> Tensor:
        """See `RowCounts`."""
        where = splats.rows["means2d"].detach(), splats.rows["radii"]
        return self.layers.spans(splats.hits.view_ids, *where, self._views)

    def told(self, views: Sequence[View], plan: Plan, table: Sequence[Sequence[int]]) -> None:
        """See `RowCounts`."""
        self._told(self._views, [n for row in table for n in row])


def _in_order(splats: Splats, order: Tensor) -> Splats:
    rows = {name: row[order] for name, row in splats.rows.items()}
    hits = Hits(splats.hits.view_ids[order], splats.hits.point_ids[order])
    return Splats(hits, rows, None if splats.probe is None else splats.probe[order], splats.probe_rendered)
