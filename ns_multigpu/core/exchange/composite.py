"""Pixel leg of views that are drawn cell by cell (Splaxel, section 4.2): pixels are exchanged instead of rows.

Each rank draws its cells of a view one by one: a colour, an alpha and perhaps a depth per pixel. Fragments of these are
sent to the ranks that own their pixels. An owner composites them in the view's order of cells, computes the loss, and
returns the gradients of colour and alpha. (The paper gathers all pixels on all ranks and then needs no gradient
exchange. Direct send is fewer bytes from three ranks on, and composites each pixel once.)

Drawing of a cell stops before the splat that would reduce its own transmittance to 1/10000, as for a whole view.
Everything behind is then occluded: the pixel's alpha is sent with a minus sign, which costs no byte
(`composite_fragments`). The result does not depend on which rank draws which cell: N ranks equal one rank with the same
cells.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from cuda_ext.ops.exchange.fragments import (
    composite_fragments,
    composite_fragments_backward,
    gather_fragments,
    live_boxes,
    scatter_fragments,
)
from ns_multigpu.core.assign.plan import Plan
from ns_multigpu.core.dist.collectives import all_gather_ints, all_to_all_parts, exchange_rows
from ns_multigpu.core.dist.world import World
from ns_multigpu.core.exchange.boundary_rows import CellRegions, clipped
from ns_multigpu.core.exchange.fragments import BANDS, Routes, routes_of
from ns_multigpu.core.exchange.legs import PixelLeg
from ns_multigpu.core.exchange.peer_pixels import PeerPixels
from ns_multigpu.core.exchange.pixel_operators import OwnedPixels, PixelOperators
from ns_multigpu.core.exchange.transport import Collective, Parts
from ns_multigpu.core.kernels import Drawn, Lists, Received, Rows
from ns_multigpu.core.primitive import Primitive
from ns_multigpu.core.types import Patch, Pixels, Rendering, Splats, View


class LocalCells:
    """Cells of this rank's points.

    Attributes:
        first: this rank's first cell. count: number of its cells, which are consecutive.
        of_points: [N] int32, each point's cell counted from `first`; None if there is one cell at most.
    """

    def __init__(self, first: int, count: int) -> None:
        self.first, self.count = first, count
        self.of_points: Tensor | None = None

    def put(self, cells: Tensor) -> None:
        """Set `of_points`. The tensor is reused if its shape fits, so that captured graphs stay valid."""
        old = self.of_points
        if old is not None and old.shape == cells.shape and old.device == cells.device:
            old.copy_(cells)
        else:
            self.of_points = cells.to(torch.int32)

    def layer(self, patch: Patch) -> int:
        """Return the index of the patch's cell image: its view and cell as one number."""
        return patch.view * self.count + patch.cell - self.first if self.count > 1 else patch.view

    def layers(self, view_ids: Tensor, point_ids: Tensor) -> Tensor:
        """Return the cell image indices of rows [M] int32 of this rank's points. Rows of no point have an arbitrary
        index."""
        if self.count <= 1:
            return view_ids
        cells = self.of_points
        if cells is None or len(cells) == 0:
            return view_ids * self.count
        return view_ids * self.count + cells[point_ids.clamp(0, len(cells) - 1).long()]

    def layered(self, received: Any, point_ids: Tensor) -> Any:
        """Replace the views of a fused step's local rows by their cell images; `point_ids` [M] are the rows' points."""
        return received._replace(view_ids=self.layers(received.view_ids, point_ids)) if self.count > 1 else received


@dataclass(frozen=True)
class PixelWire:
    """Format of pixels on the wire.

    Attributes:
        half: True for float16; else the pixels' own type.
        scale: power of two by which float16 gradients are multiplied. Gradients of a mean over all numbers of a batch
            would lose digits otherwise. Larger values are clamped.
    """

    half: bool
    scale: float

    @staticmethod
    def of(views: Sequence[View], *, half: bool) -> "PixelWire":
        """Return the format of a batch."""
        numbers = 3 * sum(view.width * view.height for view in views)
        return PixelWire(half, float(2 ** (max(numbers, 1).bit_length() - 1)))

    def pack(self, pixels: Tensor) -> Tensor:
        """Return pixels [N, C] in the wire format."""
        return (pixels.half() if self.half else pixels).contiguous()

    def unpack(self, received: Tensor, like: Tensor) -> Tensor:
        """Return the pixels that `pack` encoded, in their own type."""
        return received.to(like.dtype)

    def pack_gradients(self, gradients: Tensor) -> Tensor:
        """Return gradients [N, C] in the wire format."""
        if not self.half:
            return gradients.contiguous()
        return (gradients * self.scale).clamp(-_MOST_HALF, _MOST_HALF).half()

    def unpack_gradients(self, received: Tensor, like: Tensor) -> Tensor:
        """Return the gradients that `pack_gradients` encoded, in their own type."""
        return received.to(like.dtype) / self.scale if self.half else received


_MOST_HALF = 65504.0


class CompositePixels(PixelLeg):
    """Compositing pixel leg: see the module.

    Args:
        cells: of this rank's points; maintained by the placement.
        half: pixels, and their gradients, are float16 on the wire.

    Attributes:
        regions: cell regions of boundary splats; None to draw each splat with its own cell only.
        feedback: called with a batch's views and its `Feedback.LIVE` counts, the same on all ranks; None for no call.
        peers: memory that fused steps exchange pixels through; None for collectives.
    """

    can_cancel = False

    def __init__(self, cells: LocalCells, *, half: bool = False, regions: CellRegions | None = None) -> None:
        self.cells, self.half, self.regions = cells, half, regions
        self.feedback: Callable[[Sequence[View], Sequence[int]], None] | None = None
        self.peers: PeerPixels | None = None
        self.pixel_bytes = 0  # of a pixel that was exchanged last
        self._deep = False  # whether what is drawn has depth: of a rank that draws nothing, too

    @property
    def whole(self) -> bool:
        return False

    def operators(self, world: World) -> "CompositeOperators":
        return CompositeOperators(self, world)

    def prepare(self, pixels: int, world: World) -> None:
        numbers = pixels * MOST_NUMBERS
        if numbers == 0 or world.size == 1:
            self.peers = None
        elif self.peers is None or self.peers.numbers != numbers:
            self.peers = None  # free its memory first
            self.peers = PeerPixels(world, numbers)

    def written_bytes(self, plan: Plan, views: Sequence[View], world: World) -> int:
        if self.peers is None:
            return 0
        routes = routes_of(plan, views, world.rank)
        return self.pixel_bytes * (sum(routes.send) + sum(routes.send_back))

    def draw(
        self, primitive: Primitive, splats: Splats, views: Sequence[View], plan: Plan, world: World
    ) -> list[Pixels]:
        cells, drawn = self.cells, plan.drawn[world.rank]
        self._deep = primitive.depth
        if channels := getattr(primitive, "channels", ()):
            raise ValueError(
                f"pixels that are composited of cells' layers have colour, alpha and depth; {', '.join(channels)} "
                "cannot be put together so. Use another strategy than pixel for them."
            )
        if self.regions is not None:
            windows = self.regions.windows(plan, views, world.rank)
            return primitive.render(splats, drawn, views, stops=True, windows=windows)
        hits = splats.hits
        layered = replace(splats, hits=replace(hits, view_ids=cells.layers(hits.view_ids, hits.point_ids)))
        patches = [replace(patch, view=cells.layer(patch)) for patch in drawn]
        seen = [view for view in views for _ in range(max(cells.count, 1))]
        rendered = primitive.render(layered, patches, seen, stops=True)
        return [replace(pixels, patch=patch) for pixels, patch in zip(rendered, drawn, strict=True)]

    def exchange(
        self, rendering: Rendering, splats: Splats, views: Sequence[View], plan: Plan, world: World
    ) -> Rendering:
        own, routes = rendering.splats, routes_of(plan, views, world.rank)
        named = [name for name, row in own.rows.items() if row.is_floating_point()]
        anchor = own.rows[named[0]]
        deep = self._deep
        flat = [_flat(pixels) for pixels in rendering.pixels]
        empty = anchor.new_empty(0, 4 + deep)
        if splats is not own:  # who draws nothing takes part in their way back, too
            empty = splats.rows[named[0]][:0].reshape(0, 4 + deep)
        drawn = torch.cat([empty, *flat])
        wire = PixelWire.of(views, half=self.half)
        tied: Any = _ExchangedPixels.apply(routes, wire, world, drawn, *(own.rows[name] for name in named))
        received = torch.cat([tied[0], anchor.new_zeros(routes.dark, 4 + deep)])
        out, alpha, before = composite_fragments(received, routes.layers, routes.sizes)
        if self.feedback is not None and torch.is_grad_enabled():
            mine = live_numbers(received[:, -1].detach(), before.detach(), routes, plan).tolist()
            self.feedback(views, [n for row in all_gather_ints(mine, world) for n in row])
        owned: list[Pixels] = []
        start = 0
        for patch in plan.owned[world.rank]:
            x0, y0, x1, y1 = patch.rendered(views[patch.view])
            piece = slice(start, start + (y1 - y0) * (x1 - x0))
            start = piece.stop
            image, opacity = out[piece].view(y1 - y0, x1 - x0, -1), alpha[piece].view(y1 - y0, x1 - x0, 1)
            depth = image[..., 3:] / opacity.clamp(min=_LEAST) if deep else None
            owned.append(Pixels(patch, image[..., :3], opacity, depth))
        return Rendering(owned, replace(own, rows={**own.rows, **dict(zip(named, tied[1:], strict=True))}))


MOST_NUMBERS = 5
"""Numbers of an exchanged pixel at most: colour, depth and alpha."""

LIVE = 1e-3
"""Minimum contribution of a cell image's pixel, transmittance in front of it times alpha, for the image to be drawn."""


def live_numbers(alpha: Tensor, before: Tensor, routes: Routes, plan: Plan) -> Tensor:
    """Return this rank's `Feedback.LIVE` numbers: [views * cells * BANDS * 5] int64.

    Args:
        alpha: [N] of each cell image's pixel, negative where drawing stopped; 0 for pixels that no rank draws, which
            are last.
        before: [N] transmittance in front of it (see `composite_fragments`).
    """
    slots = len(plan.order) * len(plan.order[0]) * BANDS
    boxes = live_boxes(before * alpha.abs(), routes.watched, slots, LIVE)
    dark = [n for k in range(0, len(routes.watched), 6) for n in routes.watched[k : k + 6]
            if routes.watched[k + 1] >= routes.received]  # fmt: skip
    boxes[:, 4] = live_boxes(before, dark, slots, LIVE)[:, 4] if dark else 0
    return boxes.view(-1)


_LEAST = 1e-10
"""Alpha below which a pixel has no depth."""


def _flat(pixels: Pixels) -> Tensor:
    """Return [h w, 4 or 5]: colour, depth times alpha if there is one, alpha (negative where drawing stopped)."""
    alpha = pixels.alpha if pixels.stops is None else torch.where(pixels.stops, -pixels.alpha, pixels.alpha)
    parts = [pixels.color, alpha]
    if pixels.depth is not None:
        parts.insert(1, pixels.depth * pixels.alpha.clamp(min=_LEAST))
    return torch.cat(parts, -1).flatten(0, 1)


class _ExchangedPixels(torch.autograd.Function):
    """Exchange from pixels that this rank drew to those that it composites; backward sums the gradients of pixels sent
    to two patches. It is once in the graph of each rank's loss, through the splats' rows if the rank owns no pixels.
    So all ranks take part in its backward."""

    @staticmethod
    def forward(
        ctx: Any, routes: Routes, wire: "PixelWire", world: World, drawn: Tensor, *rows: Tensor
    ) -> tuple[Tensor, ...]:
        index = _rows_of(routes, drawn.device)
        ctx.routes, ctx.wire, ctx.world = routes, wire, world
        ctx.save_for_backward(index, drawn.new_empty(0))
        ctx.shape = drawn.shape
        ctx.set_materialize_grads(False)
        sent = drawn.detach()[index]
        here = sum(routes.send)
        with world.traffic.measured():
            received = exchange_rows(wire.pack(sent[:here]), routes.send, routes.receive, world)
        return torch.cat([wire.unpack(received, drawn), sent[here:]]), *(row.view_as(row) for row in rows)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        index, like = ctx.saved_tensors
        routes, wire, world = ctx.routes, ctx.wire, ctx.world
        got = grads[0]
        if got is None:
            got = like.new_zeros(routes.received, ctx.shape[1])
        there = sum(routes.receive)
        with world.traffic.measured():
            returned = exchange_rows(wire.pack_gradients(got[:there]), routes.receive, routes.send, world)
            returned = wire.unpack_gradients(returned, like)
        back = like.new_zeros(ctx.shape)
        # A pixel between two patches is in two fragments; a sum of two does not depend on their order.
        back.index_add_(0, index, torch.cat([returned, got[there:]]))
        return None, None, None, back, *grads[1:]


def _rows_of(routes: Routes, device: torch.device) -> Tensor:
    """Return the drawn pixels in the order of sending, then the local ones, [N] int64."""
    numbers = (*routes.sent_fragments, *routes.local_fragments)
    found = [torch.empty(0, dtype=torch.int64, device=device)]
    for k in range(0, len(numbers), 6):
        corner, stride, width, height = numbers[k : k + 4]
        lines = torch.arange(height, device=device)[:, None] * stride
        found.append((corner + lines + torch.arange(width, device=device)).flatten())
    return torch.cat(found)


class CompositeOperators(PixelOperators):
    """Operators that send cell images to their pixels' owners, and return the gradients. Sizes follow from the plan.

    Over slow links a batch is exchanged in halves, one during the other's drawing, loss or gradients (Splaxel, section
    4.4). Where ranks access each other's memory that would cost more launches than it hides.
    """

    exchanged = True
    marks_stops = True

    def __init__(self, leg: "CompositePixels", world: World) -> None:
        self._cells, self._half, self._regions, self._world = leg.cells, leg.half, leg.regions, world
        self._leg, self._overlaps, self._views = leg, False, 0
        self._now: tuple[Plan, Sequence[View], PixelWire, Tensor, Tensor, Tensor] | None = None
        self._live = list[Tensor]()
        self._watches = leg.feedback is not None

    def split(self, plan: Plan) -> Sequence[Plan]:
        self._live, self._views = [], len(plan.order)
        self._overlaps = self._views > 1 and self._world.size > 1 and not self._leg.fast_links
        return in_two(plan) if self._overlaps else [plan]

    def layered(self, received: Received, rows: Rows) -> Received:
        return received if self._regions is not None else self._cells.layered(received, rows.point_ids)

    def layer(self, patch: Patch, first_view: int) -> int:
        assert first_view == 0, "all of the batch's views are splatted"
        return patch.view if self._regions is not None else self._cells.layer(patch)

    def clipped(self, lists: Lists, received: Received, plan: Plan, views: Sequence[View]) -> Lists:
        if self._regions is None:
            return lists
        return clipped(self._regions, lists, received, plan, views, self._world.rank)

    def exchange(self, drawn: Drawn, plan: Plan, views: Sequence[View]) -> Parts[OwnedPixels]:
        routes, color = routes_of(plan, views, self._world.rank), drawn.color
        wire = PixelWire.of(views, half=self._half)
        width = color.shape[1] + 1
        out = color.new_empty(sum(routes.send), width)
        received = color.new_empty(routes.received + routes.dark, width)
        received[routes.received :].zero_()
        others = received[: sum(routes.receive)]
        gather_fragments(color, drawn.alpha, routes.sent_fragments, out)
        gather_fragments(color, drawn.alpha, routes.local_fragments, received[len(others) : routes.received])
        into = torch.empty_like(others, dtype=torch.float16) if self._half else others
        theirs = yield from self._exchange(wire.pack(out), into, plan, views, back=False)
        if theirs is not others:
            others.copy_(theirs)
        blended, alpha, before = composite_fragments(received, routes.layers, routes.sizes)
        self._now = plan, views, wire, received, before, drawn.alpha
        if self._watches:
            self._live.append(live_numbers(received[:, -1], before, routes, plan))
        return OwnedPixels(blended, alpha, None)

    def live(self) -> Tensor:
        if len(self._live) == 1:
            return self._live[0]
        (first, second), views = self._live, self._views
        of_first = _first_half(views) * (len(first) // views)  # each has numbers of all views
        return torch.cat([first[:of_first], second[of_first:]])

    def return_gradients(self, v_color: Tensor, v_alpha: Tensor) -> Parts[tuple[Tensor, Tensor]]:
        assert self._now is not None
        plan, views, wire, received, before, alpha = self._now
        self._now = None
        routes = routes_of(plan, views, self._world.rank)
        gradients = composite_fragments_backward(
            received, before, v_color, v_alpha, routes.layers, routes.sizes, routes.returned
        )
        del received, before
        others = sum(routes.send_back)
        sent = wire.pack_gradients(gradients[:others])
        into = sent.new_empty(0 if self._leg.peers else sum(routes.receive_back), sent.shape[1])
        theirs = yield from self._exchange(sent, into, plan, views, back=True)
        back = wire.unpack_gradients(theirs, gradients)
        # Owned patches cover their views, so each drawn pixel is in one piece that has gradients.
        v_drawn = v_color.new_empty(routes.drawn, v_color.shape[1]), v_alpha.new_empty(routes.drawn)
        scatter_fragments(back, routes.sent_fragments, *v_drawn)
        scatter_fragments(gradients[others:], routes.local_fragments, *v_drawn)
        # A negative sign only marks stopped pixels: the gradient is by the absolute value.
        return v_drawn[0], torch.where(alpha < 0, -v_drawn[1], v_drawn[1])

    def _exchange(self, out: Tensor, into: Tensor, plan: Plan, views: Sequence[View], *, back: bool) -> Parts[Tensor]:
        """Exchange pixels [N, C] with every other rank, or with `back` their gradients; return those received.

        Each rank's are contiguous, in the ranks' order. Collectives write them to `into`.
        """
        world, peers, width = self._world, self._leg.peers, out.shape[1]
        if world.size == 1:
            return into
        if peers is not None:
            everyones = [routes_of(plan, views, rank) for rank in range(world.size)]
            sizes = [[width * n for n in (one.send_back if back else one.send)] for one in everyones]
            self._leg.pixel_bytes = width * out.itemsize
            return (yield from peers.exchange(out, sizes, int(back))).view(-1, width)
        routes = routes_of(plan, views, world.rank)
        of_ranks = (routes.receive_back, routes.send_back) if back else (routes.receive, routes.send)
        receive, send = ([width * pixels for pixels in of] for of in of_ranks)
        flat, sent = into.view(-1), out.view(-1)

        def launch(async_op: bool) -> Any:
            return all_to_all_parts(flat, sent, receive, send, world, async_op=async_op)

        if not self._overlaps:
            yield Collective(lambda: launch(False))
            return into
        work = deque[Any]()  # both are launched again in each replay of captured steps
        yield Collective(lambda: work.append(launch(True)))
        yield Collective(lambda: work.popleft().wait())
        return into


def _first_half(views: int) -> int:
    return -(-views // 2)


@lru_cache(maxsize=64)
def in_two(plan: Plan) -> tuple[Plan, Plan]:
    """Return the plans of the first and the second half of a batch."""
    views = len(plan.order)
    return plan.of_views(range(_first_half(views))), plan.of_views(range(_first_half(views), views))
