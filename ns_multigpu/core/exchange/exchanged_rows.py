"""Differentiable exchange of splats, from the owners of points to the ranks whose patches they overlap.

Operators, transports and wires are those of fused steps. What differs: rows have any columns (`ColumnRows`), and the
host knows the sizes of all segments beforehand, because autograd reads counts back.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from ns_multigpu.core.assign.plan import Plan, rectangles
from ns_multigpu.core.dist.collectives import all_gather_ints
from ns_multigpu.core.dist.world import World
from ns_multigpu.core.exchange.column_wire import ColumnFormat, ColumnRows
from ns_multigpu.core.exchange.hierarchical_rows import HierarchicalRows
from ns_multigpu.core.exchange.hierarchy import Hierarchy
from ns_multigpu.core.exchange.legs import RowLeg
from ns_multigpu.core.exchange.row_operators import PatchDestinations, RowOperators
from ns_multigpu.core.exchange.transport import RecordTransport, launched
from ns_multigpu.core.exchange.transports import CollectiveRows
from ns_multigpu.core.types import Hits, Patch, Points, Splats, View


class RowCounts(Protocol):
    """Counts of exchanged rows for an assignment: each rank counts its own, and all ranks gather them."""

    def count(self, splats: Splats, views: Sequence[View], plan: Plan) -> Tensor:
        """Return [n] int64 counts of this rank's splats; n is the same on all ranks. Nothing is read back."""
        ...

    def record(self, views: Sequence[View], plan: Plan, table: Sequence[Sequence[int]]) -> None:
        """Record all ranks' counts, [ranks][n], of a batch that was rendered with gradients."""
        ...


class ExchangedRows(RowLeg):
    """All-to-all of splats of points with one owner each; received rows are ordered by (view, owner, row there).

    `point_ids` count the points rank by rank. If owners hold ranges of the whole model's order (`Sharded`), a point's
    number is its place. Splats of equal depth are then blended as on one rank with all points. With another placement
    this holds for the splats of one owner; those of two are ordered by the owners' ranks.

    A row is sent once to each rank that has a patch, halo included, with a pixel centre within the row's `radii`. Rows
    have `means2d` [M, 2] and `radii` [M, 2] in pixels, as `Gaussians.splat` returns them, and any other columns. One
    small all-gather of integers a step exchanges the sizes and the assignment's counts; for it the counts are read back
    once.

    Args:
        counts: counters of exchanged rows; None for none.
        hierarchical: over several machines send a row to each machine once, not to each rank that needs it (`RowLeg`).
    """

    is_exchanged = True

    def __init__(self, counts: RowCounts | None = None, *, hierarchical: bool | None = None) -> None:
        self._counts, self.hierarchical = counts, hierarchical

    def operators(self) -> RowOperators:
        return RowOperators()

    def exchange(self, own: Splats, points: Points, views: Sequence[View], plan: Plan, world: World) -> Splats:
        probe = own.probe if own.probe_rendered else None
        floats = [row for row in own.rows.values() if row.is_floating_point()]
        gradients = floats if probe is None else [probe, *floats]
        exchange = self._prepared(own, len(points), gradients, views, plan, world, learn=torch.is_grad_enabled())
        received_probe, *received = cast(tuple[Tensor, ...], _Exchanged.apply(exchange, probe, *floats))
        columns = dict(zip(exchange.rows.columns, received, strict=True))
        hits = Hits(columns["view_ids"], columns["point_ids"])
        return Splats(hits, {name: columns[name] for name in own.rows}, received_probe, own.probe_rendered)

    @torch.no_grad()
    def route(
        self, own: Splats, views: Sequence[View], drawn: PatchDestinations, destinations: int
    ) -> tuple[Tensor, Tensor]:
        """Return each row's line in the segment of each destination, [destinations, M] int32, -1 for none; and the
        number of rows for each, [destinations] int64. Nothing is read back.

        Args:
            drawn: patches of the plan, each with its destination.
        """
        rows = ColumnRows.of(own)
        place = rows.view_ids.new_empty(destinations, len(own))
        counts = place.new_zeros(destinations, dtype=torch.int64)
        self.operators().route_patches(rows, views, drawn, place, counts)
        return place, counts

    @torch.no_grad()
    def _prepared(
        self, own: Splats, points: int, gradients: Sequence[Tensor], views: Sequence[View], plan: Plan, world: World,
        *, learn: bool,
    ) -> "_Exchange":  # fmt: skip
        """Return the exchange of this rank's splats, once all ranks have gathered its sizes."""
        hierarchy = Hierarchy.of(world) if self.hierarchical else None
        drawn: list[tuple[int, Patch]] = [(rank, patch) for rank, patches in enumerate(plan.drawn) for patch in patches]
        destinations = world.size
        if hierarchy is not None:
            # Those for its own machine have no segment: `counts_of` gives them no capacity.
            drawn += [(world.size + world.machine_of(rank), patch) for rank, patch in drawn]
            destinations += world.machines
        place, counts = self.route(own, views, drawn, destinations)
        demand = [self._counts.count(own, views, plan)] if self._counts is not None else []
        sizes = cast(list[int], torch.cat([counts, *demand]).tolist())
        with world.traffic.measured():
            table = all_gather_ints([points, *sizes], world)
        if learn and self._counts is not None:
            self._counts.record(views, plan, [row[1 + destinations :] for row in table])
        rows = ColumnRows.of(own, first_point=sum(row[0] for row in table[: world.rank]))
        pairs = tuple(tuple(row[1 : 1 + destinations]) for row in table)
        shape, half = (world, ColumnFormat.of(rows.columns, gradients), len(own)), self.half and learn
        if hierarchy is None:
            transport = CollectiveRows(*shape, pairs, 0, half=half)
        else:
            here, pairs = world.ranks_of(world.machine), hierarchy.counts_of(pairs)
            place = torch.cat([place[here.start : here.stop], place[world.size :]])
            counts = counts.new_tensor(pairs[world.rank])
            transport = HierarchicalRows(*shape, pairs, 0, half=half)
        return _Exchange(transport, rows, place, counts, len(views), rectangles(plan, views, range(world.size)))


@dataclass
class _Exchange:
    """Exchange of one step's rows.

    Attributes:
        transport: for exactly these rows.
        rows: this rank's. place, counts, views, patches: see `Transport`.
        order: [K] int64, the transport's line of each received row.
    """

    transport: RecordTransport
    rows: ColumnRows
    place: Tensor
    counts: Tensor
    views: int
    patches: Sequence[int]
    order: Tensor | None = None

    def columns(self) -> Mapping[str, Tensor]:
        """Exchange the rows; return the columns of those received, by (view, owner, row there)."""
        transport = self.transport
        transport.send(self.rows, self.place)
        parts = transport.receive(self.rows, self.counts, self.views, self.patches)
        received: ColumnRows = launched(parts, transport.world.traffic.measured)
        self.order = received.view_ids.argsort(stable=True)
        return {name: column[self.order] for name, column in received.columns.items()}

    def sums(self, gradients: Tensor) -> Tensor:
        """Return received rows' gradients [K, numbers] to their owners; return the sums of this rank's [M, numbers]."""
        transport = self.transport
        assert self.order is not None, "rows are exchanged before their gradients"
        transport.records = torch.empty_like(gradients).index_copy_(0, self.order, gradients)
        nothing = self.counts.new_empty(0)
        parts = transport.return_gradients(self.rows, self.place, nothing, range(self.views))
        return launched(parts, transport.world.traffic.measured).records


class _Exchanged(torch.autograd.Function):
    """Exchange of a probe and of rows; backward returns the gradients of both to the rows' owners."""

    @staticmethod
    def forward(ctx: Any, exchange: _Exchange, probe: Tensor | None, *floats: Tensor) -> tuple[Any, ...]:
        columns = list(exchange.columns().values())
        ctx.mark_non_differentiable(*(column for column in columns if not column.is_floating_point()))
        ctx.exchange, ctx.probed = exchange, probe is not None
        ctx.shapes = [like.shape for like in (probe, *floats) if like is not None]
        # A probe is zero everywhere: only its gradient is exchanged.
        return None if probe is None else probe.new_zeros(len(columns[0]), probe.shape[1]), *columns

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        exchange: _Exchange = ctx.exchange
        layout: ColumnFormat = exchange.transport.kernels
        columns = zip(exchange.rows.columns.values(), grads[1:], strict=True)
        given = [*grads[: ctx.probed], *(grad for column, grad in columns if column.is_floating_point())]
        widths = list(layout.gradients)
        flat = [cast(Tensor, grad).reshape(-1, width) for grad, width in zip(given, widths, strict=True)]
        sums = exchange.sums(torch.cat(flat, dim=1).to(layout.dtype)).split(widths, dim=1)
        # Each with memory of its own, from an aligned address on.
        alone = (some.clone(memory_format=torch.contiguous_format) for some in sums)
        back = [some.view(shape) for some, shape in zip(alone, ctx.shapes, strict=True)]
        return None, *(back if ctx.probed else [None, *back])
