"""Exchange of splats from the owners of points to the ranks whose patches they touch, and of gradients back."""

from collections.abc import Sequence
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from ns_multigpu.core.assign.plan import Plan
from ns_multigpu.core.dist.collectives import all_gather_ints
from ns_multigpu.core.dist.world import World
from ns_multigpu.core.exchange.fp16_rows import HalfGradients, HalfRows
from ns_multigpu.core.exchange.hierarchy import Relays
from ns_multigpu.core.exchange.legs import RowLeg
from ns_multigpu.core.exchange.row_operators import RowOperators
from ns_multigpu.core.exchange.row_routes import (
    DirectRoute,
    RelayedRoute,
    Route,
    chosen_rows,
    cross,
    packed,
    unpacked,
)
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
    carry `means2d` [M, 2] and `radii` [M, 2] in pixels, as `Gaussians.splat` returns them, and any other columns. One
    small all-gather of integers a step exchanges the sizes and the assignment's counts; for it the counts are read back
    once.

    Args:
        counts: counters of exchanged rows; None for none.
        relays: over several machines, send rows to each machine once (`Relays`), or to each rank that needs them; see
            `RowLeg`.
        half: if there are gradients, round to float16 what is sent off a rank, or with `relays` off its machine
            (`HalfRows`).
    """

    travels = True

    def __init__(self, counts: RowCounts | None = None, *, relays: bool | None = None, half: bool = False) -> None:
        self._counts, self.relays, self.half = counts, relays, half

    def operators(self) -> RowOperators:
        return RowOperators()

    def bring(self, own: Splats, points: Points, views: Sequence[View], plan: Plan, world: World) -> Splats:
        learn = torch.is_grad_enabled()
        route = self._route(own, len(points), views, plan, world, learn=learn)
        floats = {name: row for name, row in own.rows.items() if row.is_floating_point()}
        integers = {name: row for name, row in own.rows.items() if not row.is_floating_point()}
        probe = own.probe if own.probe_rendered else None
        split_rule = list(floats) if self.half and learn else None
        exchanged = _ExchangedRows.apply(route, world, split_rule, probe, *floats.values())
        arrived_probe, *arrived = cast(tuple[Tensor, ...], exchanged)
        ids = [own.hits.point_ids + route.first_id, *integers.values()]
        numbers, *rest = unpacked(route.there(packed(ids), world), [row.shape[1:] for row in ids])
        rows = {**dict(zip(floats, arrived, strict=True)), **dict(zip(integers, rest, strict=True))}
        per_view = torch.tensor([sum(of) for of in zip(*route.arriving, strict=True)], dtype=torch.int64)
        view_ids = torch.arange(len(views), dtype=torch.int32).repeat_interleave(per_view).to(numbers.device)
        named = {name: rows[name] for name in own.rows}
        return Splats(Hits(view_ids, numbers), named, arrived_probe, own.probe_rendered)

    @torch.no_grad()
    def _route(self, own: Splats, points: int, views: Sequence[View], plan: Plan, world: World, learn: bool) -> Route:
        """Return the rows' route."""
        relays = Relays.of(world) if self.relays else None
        place = own.hits.view_ids.long()
        touch = self.touched(own, views, plan)
        ways = [*touch, *(_by_machine(touch, world) if relays else [])]
        counts = [torch.zeros(len(views), dtype=torch.int64, device=place.device) for _ in ways]
        for count, taken in zip(counts, ways, strict=True):
            count.index_add_(0, place, taken.long())
        more = [self._counts.count(own, views, plan)] if self._counts is not None else []
        record = cast(list[int], torch.cat([*counts, *more]).tolist())
        with world.traffic.measured():
            table = all_gather_ints([points, *record], world)
        cells = len(ways) * len(views)
        if learn and self._counts is not None:
            self._counts.record(views, plan, [row[1 + cells :] for row in table])
        sent = [[row[1 + way * len(views) : 1 + (way + 1) * len(views)] for way in range(len(ways))] for row in table]
        first = sum(row[0] for row in table[: world.rank])
        chosen = [chosen_rows(taken, sum(of)) for taken, of in zip(ways, sent[world.rank], strict=True)]
        if relays is not None:
            return self._relayed(first, chosen, touch, sent, world)
        return DirectRoute([row[world.rank] for row in sent], first, chosen)

    def touched(self, own: Splats, views: Sequence[View], plan: Plan) -> list[Tensor]:
        """Return by rank the rows that it needs, [M] bool each."""
        return [touches(own, views, patches) for patches in plan.drawn]

    def _relayed(
        self, first: int, chosen: list[Tensor], touch: list[Tensor], sent: list[list[list[int]]], world: World
    ) -> RelayedRoute:
        """Return the route over relays, after sending each relay the flags of the ranks that need its rows."""
        here, machines = world.ranks_of(world.machine), range(world.machines)
        across = chosen[world.size :]
        needed = [
            torch.stack([touch[rank][rows] for rank in world.ranks_of(k)], dim=1) for k, rows in enumerate(across)
        ]
        counterparts = [k * world.local_size + world.local_rank for k in machines]
        meeting = [sum(sent[rank][world.size + world.machine]) for rank in counterparts]
        record = cross([_bits(one) for one in needed], meeting, world, None)
        handed = [
            [chosen_rows(_bit(one, local), sum(sent[rank][taker])) for local, taker in enumerate(here)]
            for rank, one in zip(counterparts, record, strict=True)
        ]
        handed[world.machine] = [across[world.machine]] * world.local_size
        inside = chosen[here.start : here.stop]
        return RelayedRoute([row[world.rank] for row in sent], first, inside, across, handed, meeting)


class _ExchangedRows(torch.autograd.Function):
    """Exchange of a probe and differentiable rows to the ranks that draw them; backward returns gradients to the
    owners."""

    @staticmethod
    def forward(
        ctx: Any, route: Route, world: World, split_rule: Sequence[str] | None, probe: Tensor | None, *rows: Tensor
    ) -> tuple[Any, ...]:
        ctx.route, ctx.world, ctx.split_rule, ctx.count = route, world, split_rule, len(rows[0])
        ctx.shapes = [row.shape[1:] for row in ([] if probe is None else [probe]) + list(rows)]
        ctx.probed = probe is not None
        shapes = [row.shape[1:] for row in rows]
        code = None if split_rule is None else HalfRows(split_rule, [shape.numel() for shape in shapes])
        arrived = unpacked(route.there(packed(rows), world, code), shapes)
        # A probe is zero everywhere: only its gradient is exchanged.
        return None if probe is None else arrived[0].new_zeros(len(arrived[0]), probe.shape[1]), *arrived

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        columns = packed(grads if ctx.probed else grads[1:])
        total = columns.new_zeros(ctx.count, columns.shape[1])
        code = None if ctx.split_rule is None else HalfGradients([shape.numel() for shape in ctx.shapes])
        ctx.route.back(columns, total, ctx.world, code)
        back = unpacked(total, ctx.shapes)
        return None, None, None, *(back if ctx.probed else [None, *back])


def touches(splats: Splats, views: Sequence[View], patches: Sequence[Patch]) -> Tensor:
    """Return the rows that touch a pixel centre of the patches, halo included: [M] bool. The test of
    `cuda_ext.intersect`."""
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


def _by_machine(touch: Sequence[Tensor], world: World) -> list[Tensor]:
    """Return by machine the rows that any rank of another machine needs; none for this machine."""
    none = torch.zeros_like(touch[0])
    return [
        none if k == world.machine else torch.stack([touch[rank] for rank in world.ranks_of(k)]).any(0)
        for k in range(world.machines)
    ]


def _bits(flags: Tensor) -> Tensor:
    """Pack [M, n] bool into [M, bytes] uint8, eight flags per byte."""
    packed = -(-flags.shape[1] // 8)
    padded = torch.nn.functional.pad(flags.to(torch.uint8), (0, -flags.shape[1] % 8)).view(len(flags), packed, 8)
    weights = torch.tensor([1 << k for k in range(8)], dtype=torch.uint8, device=flags.device)
    return (padded * weights).sum(2, dtype=torch.uint8)


def _bit(bits: Tensor, k: int) -> Tensor:
    """Return [M] bool, the k-th flag that `_bits` packed."""
    return (bits[:, k // 8] >> (k % 8)) & 1 > 0
