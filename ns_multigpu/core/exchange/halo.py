"""Exchange of halo pixels' gradients, summed at the rank whose patch has the pixel.

A patch's halo is rendered by two ranks, and the loss's windows on both sides overlap the border. So each rank has a
part of such a pixel's gradient. Linear uses sum the parts at the points. A densifier that sums magnitudes (AbsGS) needs
the sum before the magnitude.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ns_multigpu.core.assign.image_part import Rectangle, area, overlap
from ns_multigpu.core.assign.plan import Plan
from ns_multigpu.core.dist.collectives import exchange_rows
from ns_multigpu.core.dist.world import World
from ns_multigpu.core.types import Patch, View


@dataclass(frozen=True)
class Strip:
    """The part of one patch's halo that is in another patch.

    Attributes:
        source, target: (rank, position among the rank's patches) of the patch with the halo, and of the other.
        rectangle: x0, y0, x1, y1, pixels of the view.
    """

    source: tuple[int, int]
    target: tuple[int, int]
    rectangle: Rectangle

    @property
    def pixels(self) -> int:
        """Number of its pixels."""
        return area(self.rectangle)


def find_strips(plan: Plan, views: Sequence[View]) -> list[Strip]:
    """Return all strips of a plan, by source, then by target: the same list on every rank."""
    places = [((rank, k), patch) for rank, patches in enumerate(plan.drawn) for k, patch in enumerate(patches)]
    strips: list[Strip] = []
    for source, halo in places:
        wide = halo.rendered(views[halo.view])
        for target, patch in places:
            if source == target or halo.view != patch.view:
                continue
            both = overlap(wide, (patch.x0, patch.y0, patch.x1, patch.y1))
            if both is not None:
                strips.append(Strip(source, target, both))
    return strips


@dataclass(frozen=True)
class Halos:
    """Geometry that `join_gradients` needs of a plan.

    Attributes:
        strips: `find_strips`'.
        patches: this rank's.
        corners: [patch] (x0, y0) of the rendered rectangles.
        inner: [patch] the patches' rectangles in the rendered ones' coordinates.
    """

    strips: Sequence[Strip]
    patches: Sequence[Patch]
    corners: Sequence[tuple[int, int]]
    inner: Sequence[Rectangle]

    @staticmethod
    def of(plan: Plan, views: Sequence[View], rank: int) -> "Halos":
        """Return the halos of a plan for a rank."""
        own = plan.drawn[rank]
        return Halos(
            find_strips(plan, views),
            own,
            [patch.rendered(views[patch.view])[:2] for patch in own],
            [patch.inner(views[patch.view]) for patch in own],
        )

    def slices(self, position: int, rectangle: Rectangle) -> tuple[slice, slice]:
        """Return the rows and columns of a view's rectangle in the rendered patch at `position`."""
        left, top = self.corners[position]
        x0, y0, x1, y1 = rectangle
        return slice(y0 - top, y1 - top), slice(x0 - left, x1 - left)


def join_gradients(grads: Sequence[Tensor], halos: Halos, like: Tensor, world: World) -> list[Tensor]:
    """Send the gradients of halo pixels to the patches that the pixels are in, and add them there.

    Every rank calls it. Routes follow from the plan; without halo overlaps nothing is sent.

    Args:
        grads: [h, w, C] of each of this rank's rendered patches.
        halos: the plan's.
        like: tensor with the gradients' type and device, for a rank that has none.
        world: the ranks.

    Returns:
        [h, w, C] each: zero in the halo, complete inside.
    """
    joined: list[Tensor] = []
    for grad, (x0, y0, x1, y1) in zip(grads, halos.inner, strict=True):
        whole = torch.zeros_like(grad)
        whole[y0:y1, x0:x1] = grad[y0:y1, x0:x1]
        joined.append(whole)
    if not halos.strips:
        return joined
    # Strips are sorted by source; each rank receives them in the order in which their sources list them.
    out = sorted((s for s in halos.strips if s.source[0] == world.rank), key=lambda s: s.target[0])
    into = [s for s in halos.strips if s.target[0] == world.rank]
    send, receive = [0] * world.size, [0] * world.size
    for strip in out:
        send[strip.target[0]] += strip.pixels
    for strip in into:
        receive[strip.source[0]] += strip.pixels
    channels = grads[0].shape[-1] if grads else 0
    parts = [grads[s.source[1]][halos.slices(s.source[1], s.rectangle)].reshape(-1, channels) for s in out]
    rows = torch.cat(parts) if parts else like.new_empty(0, channels)
    with world.traffic.measured():
        received = exchange_rows(rows, send, receive, world)
    start = 0
    for strip in into:
        piece = received[start : start + strip.pixels]
        start += strip.pixels
        target = joined[strip.target[1]][halos.slices(strip.target[1], strip.rectangle)]
        target += piece.view_as(target)
    return joined


class WholeGradients(torch.autograd.Function):
    """The identity on rendered pixels and on this rank's splats; backward joins the gradients of halo pixels.

    Each rank's graph contains it exactly once, through its pixels or, on a rank without pixels, through its splats. So
    all ranks enter its backward, and then that of the row exchange (`anchor`).
    """

    @staticmethod
    def forward(
        ctx: Any, halos: Halos, channels: Sequence[int], world: World, anchor: Tensor, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        """Return `tensors` unchanged: for each patch [h, w, c] for each c in `channels`, then columns of this rank's
        splats.

        `channels` is the same on every rank that has patches.
        """
        ctx.halos, ctx.channels, ctx.world = halos, list(channels), world
        ctx.shapes = [tensor.shape for tensor in tensors]
        ctx.save_for_backward(anchor)
        ctx.set_materialize_grads(False)
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        (anchor,) = ctx.saved_tensors
        halos, widths = ctx.halos, ctx.channels
        count = len(widths) * len(halos.patches)
        filled = [
            anchor.new_zeros(shape) if grad is None else grad
            for grad, shape in zip(grads[:count], ctx.shapes[:count], strict=True)
        ]
        outputs = len(widths)
        stacked = [torch.cat(filled[k * outputs : (k + 1) * outputs], dim=-1) for k in range(len(halos.patches))]
        joined = join_gradients(stacked, halos, anchor, ctx.world)
        back = [piece for whole in joined for piece in whole.split(widths, dim=-1)]
        # The anchor needs a gradient only on a rank without pixels.
        return None, None, None, None if back else torch.zeros_like(anchor), *back, *grads[count:]
