"""First half of a step: project -> route -> exchange rows -> tile lists -> draw -> exchange pixels.

`Step` adds loss, backward and update; `Forward` renders pictures with it. Only collectives read counts back.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch

from ns_multigpu.core.assign.plan import Plan, rectangles
from ns_multigpu.core.exchange.transport import Parts, Transport
from ns_multigpu.core.kernels import Cameras, Drawn, Kernels, Lists, Model, Received, Rows
from ns_multigpu.core.step.tile_lists import TileLists
from ns_multigpu.core.strategy import Strategy
from ns_multigpu.core.types import TILE, View


class Gathered(NamedTuple):
    """Rows and lists from which a rank draws its patches.

    Attributes:
        received: rows that the rank draws. lists: of its patches' tiles.
    """

    received: Received
    lists: Lists


class ForwardPass:
    """Forward pass of one rank for batches of views.

    Args:
        strategy: its legs provide the operators.
        kernels: the primitive's.
        transport: of rows. lists: finds each tile's rows.
        capacity: rows of this rank's own points.
        measure: called with a part's name (project, send, sort, raster, pixels), gives a context to run it in.

    Attributes:
        pixels: operators of the pixel leg.
        place: [destinations, capacity] int32, each row's line in the segment of each destination; -1 for none.
        counts: [numbers] int64, rows sent to each destination, then the transport's other counts.
    """

    def __init__(
        self,
        strategy: Strategy,
        kernels: Kernels,
        transport: Transport,
        lists: TileLists,
        capacity: int,
        measure: Callable[[str], AbstractContextManager[Any]] = lambda _: nullcontext(),
    ) -> None:
        self._kernels, self._transport, self._lists = kernels, transport, lists
        self._world, self._capacity, self._measure = strategy.world, capacity, measure
        self._rows, self.pixels = strategy.rows.operators(), strategy.pixels.operators(strategy.world)
        device, shape = strategy.world.device, (transport.num_destinations, capacity if transport.is_exchanged else 0)
        self.place = torch.empty(shape, dtype=torch.int32, device=device)
        self.counts = torch.zeros(len(transport.capacities), dtype=torch.int64, device=device)

    def project(self, model: Model, cameras: Cameras, views: Sequence[View]) -> Rows:
        """Return the rows of this rank's points.

        Args:
            model: of the points. cameras: of the views that they are projected into. views: the batch.
        """
        with self._measure("project"):
            rows = self._kernels.project(model, cameras, self._capacity)
        with self._measure("sort"):
            self._lists.begin(rows, views)
        return rows

    def gather(self, rows: Rows, views: Sequence[View], plan: Plan, projected: range) -> Parts[Gathered]:
        """Exchange rows and list those of each tile of this rank's patches.

        Args:
            rows: of `project`. views: the batch. plan: the same on all ranks.
            projected: positions in the batch of the views that the rows are of.
        """
        transport, patches = self._transport, self._patches(plan, views, projected.start)
        with self._measure("send"):
            if transport.is_exchanged:
                sent = self.counts[: transport.num_destinations]
                self._rows.route(rows, views, plan, transport.destinations, self.place, sent)
                transport.send(rows, self.place)
            everyones = rectangles(plan, views, range(self._world.size))
            received = yield from transport.receive(rows, self.counts, len(projected), everyones)
            received = self.pixels.layered(received, rows)
        with self._measure("sort"):
            lists = self._lists.finish(received, patches, plan, views)
            return Gathered(received, self.pixels.clipped(lists, received, plan, views))

    def draw(
        self, gathered: Gathered, plan: Plan, views: Sequence[View], first_view: int = 0, first_tile: int = 0
    ) -> tuple[Drawn, int]:
        """Draw this rank's patches of a plan, which follow each other in the lists; return the tile behind them.

        Args:
            first_view: position in the batch of the first view of the rows. first_tile: the first patch's in the lists.
        """
        patches, (offsets, row_ids, met) = self._patches(plan, views, first_view), gathered.lists
        tiles = sum(
            -(-(x1 - x0) // TILE) * -(-(y1 - y0) // TILE)
            for x0, y0, x1, y1 in (patches[k : k + 4] for k in range(1, len(patches), 5))
        )
        end = first_tile + tiles
        with self._measure("raster"):
            lists = offsets[first_tile : end + 1], row_ids, met
            return self._kernels.draw(gathered.received, lists, patches, self.pixels.marks_stops), end

    def _patches(self, plan: Plan, views: Sequence[View], first_view: int) -> list[int]:
        """Return 5 ints for each patch that this rank draws: see `Kernels.intersect`."""
        layers = [(self.pixels.layer(patch, first_view), patch) for patch in plan.drawn[self._world.rank]]
        return [n for layer, patch in layers for n in (layer, *patch.rendered(views[patch.view]))]


def rows_by_group(
    strategy: Strategy, kernels: Kernels, model: Model, views: Sequence[View], plan: Plan, capacity: int,
    groups: Sequence[Sequence[int]],
) -> tuple[int, list[int]]:  # fmt: skip
    """Return how many rows this rank's points have, and how many of them each group of ranks needs.

    Waits for the device. Rows beyond `capacity` are not looked at.

    Args:
        plan: of the views, with halos. groups: ranks that are counted together.
    """
    device = strategy.world.device
    viewmats, Ks = (torch.stack(of).to(device) for of in zip(*((v.viewmat, v.K) for v in views), strict=True))
    sizes = [side for view in views for side in (view.width, view.height)]
    times = viewmats.new_tensor([view.time for view in views], dtype=torch.float32)
    rows = kernels.project(model, Cameras(viewmats.float(), Ks.float(), sizes, times), capacity)
    drawn = [(k, patch) for k, ranks in enumerate(groups) for rank in ranks for patch in plan.drawn[rank]]
    counts = strategy.rows.operators().count(rows, views, drawn, len(groups))
    return int(rows.count), counts.tolist()
