# torch annotates only part of itself:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
"""Splats travel from the ranks that own their points to the ranks whose patches they touch; gradients travel back."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from ns_multigpu.core.collectives import all_gather_ints, exchange_rows
from ns_multigpu.core.legs import RowLeg
from ns_multigpu.core.plan import Plan
from ns_multigpu.core.types import Hits, Patch, Points, Splats, View
from ns_multigpu.core.world import World


class RowCounts(Protocol):
    """What an assignment learns of rows on their way: each rank counts its own, and all are told."""

    def count(self, splats: Splats, views: Sequence[View], plan: Plan) -> Tensor:
        """[n] int64, of this rank's splats; n is the same on all ranks. Nothing is read back."""
        ...

    def told(self, views: Sequence[View], plan: Plan, table: Sequence[Sequence[int]]) -> None:
        """What each rank has counted, [ranks][n], of a batch that was rendered with gradients."""
        ...


class RowsTravel(RowLeg):
    """All-to-all of splats, for points that each have one owner: what arrives is ordered by (view, owner, row there).

    Their `point_ids` count the points rank by rank. Where owners hold ranges of the whole model's order (`Sharded`) a
    point's number is its place there, so that splats of equal depth are blended as one rank with all points blends
    them. With another placement that is so for the splats of one owner; those of two go by the owners' ranks.

    A splat's row goes once to each rank that has a patch, halo included, with a pixel centre within the row's `radii`.
    Rows carry `means2d` [M, 2] and `radii` [M, 2] in pixels, as `Gaussians.splat` has them, and whatever else they
    have. One small all-gather of integers a step tells who sends how much, and what the assignment learns; for it
    the counts are read back once.

    Args:
        counts: what is counted on the way; None for nothing.
        relays: over several machines rows cross to each once (`Relays`); else to each rank that needs them.
    """

    travels = True

    def __init__(self, counts: RowCounts | None = None, *, relays: bool = True) -> None:
        self._counts, self.relays = counts, relays

    def bring(self, own: Splats, points: Points, views: Sequence[View], plan: Plan, world: World) -> Splats:
        route = self._route(own, len(points), views, plan, world, learn=torch.is_grad_enabled())
        floats = {name: row for name, row in own.rows.items() if row.is_floating_point()}
        integers = {name: row for name, row in own.rows.items() if not row.is_floating_point()}
        probe, *arrived = cast(
            tuple[Tensor, ...],
            _Travel.apply(route, world, own.probe if own.probe_rendered else None, *floats.values()),
        )
        ids, *others = route.carry([own.hits.point_ids + route.first_id, *integers.values()], world)
        rows = {**dict(zip(floats, arrived, strict=True)), **dict(zip(integers, others, strict=True))}
        per_view = torch.tensor([sum(column) for column in zip(*route.arriving, strict=True)], dtype=torch.int64)
        view_ids = torch.arange(len(views), dtype=torch.int32).repeat_interleave(per_view).to(ids.device)
        return Splats(Hits(view_ids, ids), {name: rows[name] for name in own.rows}, probe, own.probe_rendered)

    @torch.no_grad()
    def _route(
        self, own: Splats, points: int, views: Sequence[View], plan: Plan, world: World, learn: bool
    ) -> "_Route":
        place = own.hits.view_ids.long()
        running: list[Tensor] = []
        counts: list[Tensor] = []
        for patches in plan.drawn:
            touch = touches(own, views, patches)
            running.append(touch.cumsum(0))
            counts.append(torch.zeros(len(views), dtype=torch.int64, device=place.device))
            counts[-1].index_add_(0, place, touch.long())
        more = [self._counts.count(own, views, plan)] if self._counts is not None else []
        told = cast(list[int], torch.cat([*counts, *more]).tolist())
        with world.traffic.measured():
            table = all_gather_ints([points, *told], world)
        cells = world.size * len(views)
        if learn and self._counts is not None:
            self._counts.told(views, plan, [row[1 + cells :] for row in table])
        sent = [[row[1 + to * len(views) : 1 + (to + 1) * len(views)] for to in range(world.size)] for row in table]
        # The k-th row that touches is where the running count comes to k: no second wait for the device to count.
        chosen = [
            torch.searchsorted(count, torch.arange(1, sum(amounts) + 1, device=count.device))
            for count, amounts in zip(running, sent[world.rank], strict=True)
        ]
        return _Route(chosen, [row[world.rank] for row in sent], sum(row[0] for row in table[: world.rank]))


def touches(splats: Splats, views: Sequence[View], patches: Sequence[Patch]) -> Tensor:
    """Which rows reach a pixel centre of the patches, halo included: [M] bool. The test of `cuda_ext.intersect`."""
    means, radii = splats.rows["means2d"].detach(), splats.rows["radii"]
    touch = torch.zeros(len(splats), dtype=torch.bool, device=means.device)
    for patch in patches:
        x0, y0, x1, y1 = patch.rendered(views[patch.view])
        corner, size = means.new_tensor([x0, y0]), means.new_tensor([x1 - x0, y1 - y0])
        zero = torch.zeros_like(size)
        first = torch.ceil(means - radii - corner - 0.5).clamp(zero, size)
        end = torch.floor(means + radii - corner + 0.5).clamp(zero, size)
        touch |= (first < end).all(-1) & (splats.hits.view_ids == patch.view)
    return touch & (radii > 0).all(-1)


@dataclass(frozen=True)
class _Route:
    """Which rows go where.

    Attributes:
        chosen: [rank] the rows of this rank that go to each, ascending.
        arriving: [rank][view] how many rows come from each, of each view.
        first_id: the global id of this rank's first point.
    """

    chosen: Sequence[Tensor]
    arriving: Sequence[Sequence[int]]
    first_id: int

    @property
    def send(self) -> list[int]:
        """Rows for each rank."""
        return [len(rows) for rows in self.chosen]

    @property
    def receive(self) -> list[int]:
        """Rows from each rank."""
        return [sum(counts) for counts in self.arriving]

    def carry(self, columns: Sequence[Tensor], world: World) -> list[Tensor]:
        """[M, ...] tensors of one type -> [K, ...] what arrives of them, in the order of (view, owner, row there)."""
        packed = torch.cat([_flat(column) for column in columns], dim=1)
        chosen = packed[torch.cat(list(self.chosen))]
        with world.traffic.measured():
            arrived = exchange_rows(chosen, self.send, self.receive, world)
        pieces = arrived.split([count for counts in self.arriving for count in counts])
        views = len(self.arriving[0])
        # Sources own ascending ranges, and send each view's rows ascending: no keys need to be compared.
        ordered = torch.cat([arrived[:0], *(piece for view in range(views) for piece in pieces[view::views])])
        return _like(ordered, columns)

    def return_sums(self, grads: Sequence[Tensor], rows: int, world: World) -> list[Tensor]:
        """[K, ...] gradients of what arrived -> [rows, ...] their sums where it came from."""
        packed = torch.cat([_flat(grad) for grad in grads], dim=1)
        views, sources = len(self.arriving[0]), len(self.arriving)
        pieces = packed.split([self.arriving[source][view] for view in range(views) for source in range(sources)])
        by_source = torch.cat([packed[:0], *(piece for source in range(sources) for piece in pieces[source::sources])])
        with world.traffic.measured():
            back = exchange_rows(by_source, self.receive, self.send, world)
        total = back.new_zeros(rows, back.shape[1])
        # A rank after the other, each row at most once: the same bits on every run, also on a GPU.
        for chosen, piece in zip(self.chosen, back.split(self.send), strict=True):
            total.index_add_(0, chosen, piece)
        return _like(total, grads)


class _Travel(torch.autograd.Function):
    """Carries a probe and differentiable rows there, and their gradients back: one exchange each way."""

    @staticmethod
    def forward(ctx: Any, route: _Route, world: World, probe: Tensor | None, *rows: Tensor) -> tuple[Any, ...]:
        ctx.route, ctx.world, ctx.count, ctx.probed = route, world, rows[0].shape[0], probe is not None
        arrived = route.carry(rows, world)
        # A probe is zero everywhere: only its gradient has to travel.
        return (None if probe is None else arrived[0].new_zeros(arrived[0].shape[0], probe.shape[1])), *arrived

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        back = ctx.route.return_sums(grads if ctx.probed else grads[1:], ctx.count, ctx.world)
        return None, None, *(back if ctx.probed else [None, *back])


def _flat(column: Tensor) -> Tensor:
    """[M, ...] -> [M, columns]."""
    return column.unsqueeze(1) if column.dim() == 1 else column.flatten(1)


def _like(packed: Tensor, columns: Sequence[Tensor]) -> list[Tensor]:
    """[K, all columns] -> what `_flat` made [M, ...] columns into, taken apart: [K, ...] each, contiguous."""
    pieces = packed.split([_flat(column).shape[1] for column in columns], dim=1)
    return [
        piece.reshape(len(packed), *column.shape[1:]).contiguous()
        for piece, column in zip(pieces, columns, strict=True)
    ]
