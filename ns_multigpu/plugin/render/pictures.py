"""Pictures of the model, rendered by all ranks and gathered on the root ranks.

The forward half of a step (`core.step.forward`) renders if the primitive has kernels, otherwise its differentiable
operators without gradients. A picture that exceeds the free memory is rendered in several passes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from cuda_ext.dispatch.load import backend
from ns_multigpu.core.assign.plan import Plan
from ns_multigpu.core.dist.collectives import all_gather_ints, exchange_rows
from ns_multigpu.core.dist.world import World
from ns_multigpu.core.schema import POSITION
from ns_multigpu.core.step.forward import CapacityExceeded, Forward
from ns_multigpu.core.strategy import Strategy
from ns_multigpu.core.types import Patch, Pixels, Points, View
from ns_multigpu.plugin.model.cameras import in_box, view_from_camera
from ns_multigpu.plugin.render.palette import rank_colors
from ns_multigpu.plugin.render.service import RANK, Outputs, RenderRequest
from strategies import STRATEGIES

_NO_TRAINING_VIEW = -1
"""Index of views outside the capture, so their work is not recorded as a training view's."""
_INVISIBLE = -30.0
"""Logit of an opacity that renders nothing."""
MOST_PASSES = 16
"""Largest number of passes of a picture."""


class Pictures:
    """Renderer of one model on all ranks. Every rank creates one.

    Args:
        model: a `SplatModel`.
        strategy: its sharding strategy.
    """

    shows_owners = True
    interruptible = False
    draws_panoramas = False

    def __init__(self, model: Any, strategy: Strategy) -> None:
        self._model, self._strategy, self._world = model, strategy, strategy.world
        whole_device = self._world.device.type == "multigpu"  # its members split the differentiable operators
        self._forward = Forward(strategy) if Forward.serves(strategy) and not whole_device else None
        self._passes: dict[tuple[int, int], int] = {}

    @property
    def shared(self) -> bool:
        """True if an image takes all ranks, because points are sharded, or if the strategy must compose its pixels."""
        takes_strategy = not self._strategy.pixels.whole and self._model.sharded
        return not self._strategy.placement.replicated and (self._world.size > 1 or takes_strategy)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the available outputs."""
        own = self._model.shown if self._strategy.pixels.whole else ()
        return ("rgb", "rgba", "depth", "accumulation", "background", *own, *((RANK,) if self.shared else ()))

    def alone(self) -> "Pictures":
        """Return a drawer for this rank alone, which has all points."""
        return Pictures(self._model, STRATEGIES["single"](World.single(self._world.device)))

    def view_of(self, request: RenderRequest) -> View:
        """Return the view of a request, its matrices on this rank's device."""
        assert request.camera is not None, "points are drawn as images, not along rays"
        camera = request.camera.to(self._world.device)
        return view_from_camera(camera, camera.camera_to_worlds.reshape(-1, 3, 4)[0], _NO_TRAINING_VIEW)

    @torch.no_grad()
    def draw(self, request: RenderRequest, roots: Sequence[int]) -> Outputs | None:
        """Return the picture on `roots`, as `SplatModel.get_outputs` in eval mode; None on other ranks. Every rank
        calls it.

        Raises:
            CapacityExceeded: on all ranks, if even the smallest pass does not fit.
        """
        model, world = self._model, self._world
        view, points = self._asked(request)
        primitive = model.primitive(depth=True, counted=False)
        self._strategy.observe(primitive, points)  # before cropping: its statistics concern all points
        if request.crop is not None:
            opacities = points.params["opacities"]
            kept = in_box(request.crop, points.params[POSITION]).reshape(opacities.shape)
            if not any(row[0] for row in all_gather_ints([int(kept.any())], world)):
                background = model.background_color.to(world.device)
                return model.get_empty_outputs(view.width, view.height, background) if world.rank in roots else None
            points = Points({**points.params, "opacities": opacities.masked_fill(~kept, _INVISIBLE)})
        if request.owners:
            colors = rank_colors(world.machines, world.size // world.machines)
            primitive, points = model.in_one_color(primitive, points, colors[world.rank])
        shown: dict[str, int] = {}
        if self._strategy.pixels.whole:
            primitive, shown = primitive.showing(), dict(primitive.shown)
        pixels = self._gather(*self._drawn(primitive, points, view), view, roots, shown)
        if pixels is None:
            return None
        was_training = model.training
        model.eval()
        try:
            return model.outputs_of(pixels, view)
        finally:
            model.train(was_training)

    @torch.no_grad()
    def surface(self, request: RenderRequest, roots: Sequence[int], *, median: bool) -> Pixels | None:
        """Return colour, alpha and depth of a picture on `roots`, without background; None on other ranks. Every rank
        calls it.

        Args:
            request: of all points in their own colours.
            median: True for the depth at which alpha passes one half, instead of the expected depth. The primitive must
                support it (`Primitive.median`).

        Raises:
            CapacityExceeded: see `draw`.
        """
        view, points = self._asked(request)
        primitive = self._model.primitive(depth=True, counted=False)
        self._strategy.observe(primitive, points)
        if not median:
            return self._gather(*self._drawn(primitive, points, view), view, roots, {})
        # No fused kernel renders it.
        drawn = self._through_functions(primitive.with_median(), points, view)
        pixels = self._gather(*drawn, view, roots, {"median": 1})
        return None if pixels is None else replace(pixels, depth=pixels.extra["median"])

    def _asked(self, request: RenderRequest) -> tuple[View, Points]:
        """Return the view on this rank's device, and this rank's points."""
        points = Points({name: value.detach() for name, value in self._model.gauss_params.items()})
        return self.view_of(request), points

    def _through_functions(self, primitive: Any, points: Points, view: View) -> tuple[Plan, list[Pixels]]:
        """Return the same as `_drawn`, through the primitive's differentiable operators."""
        # Without a loss no halos are needed: other ranks render those pixels.
        plan = self._strategy.plan([view]).without_halos()
        return plan, list(self._strategy.render(primitive, points, [view], plan).pixels)

    def _drawn(self, primitive: Any, points: Points, view: View) -> tuple[Plan, list[Pixels]]:
        """Return the plan of the picture, and this rank's pixels."""
        single = all(value.dtype == torch.float32 for value in points.params.values())
        compiled = backend(self._world.device.type) != "reference"  # rendering has no reference operator
        kernels = primitive.kernels(depth=True) if self._forward is not None and single and compiled else None
        if self._forward is None or kernels is None:
            return self._through_functions(primitive, points, view)
        size = (view.width, view.height)
        passes = self._passes.get(size, 1)
        while True:
            try:
                drawn = self._forward.draw(kernels, points, view, passes)
            except CapacityExceeded:
                if passes >= MOST_PASSES:
                    raise
                passes *= 2
                if self._world.device.type == "cuda":
                    torch.cuda.empty_cache()
                continue
            self._passes = {size: passes}
            return drawn

    def _gather(
        self, plan: Plan, own: Sequence[Pixels], view: View, roots: Sequence[int], shown: Mapping[str, int]
    ) -> Pixels | None:
        """Return the complete image on `roots`, gathered from each rank's patches, with the extra channels `shown`."""
        world, widths = self._world, [3, 1, 1, *shown.values()]
        channels = sum(widths)
        counts = [sum((p.x1 - p.x0) * (p.y1 - p.y0) for p in patches) for patches in plan.owned]
        parts = [
            torch.cat([one.color, one.alpha, _depth(one), *(one.extra[name] for name in shown)], -1).flatten(0, 1)
            for one in own
        ]
        single = all(value.dtype == torch.float32 for value in self._model.gauss_params.values())
        dtype = parts[0].dtype if parts else torch.float32 if single else view.viewmat.dtype
        mine = torch.cat([torch.empty(0, channels, dtype=dtype, device=world.device), *parts])
        send = [len(mine) if rank in roots else 0 for rank in range(world.size)]
        receive = counts if world.rank in roots else [0] * world.size
        rows = exchange_rows(mine.repeat(len(set(roots)), 1), send, receive, world)
        if world.rank not in roots:
            return None
        image = rows.new_empty(view.height, view.width, channels)
        start = 0
        for patch in (patch for patches in plan.owned for patch in patches):
            height, width = patch.y1 - patch.y0, patch.x1 - patch.x0
            piece = rows[start : start + height * width]
            image[patch.y0 : patch.y1, patch.x0 : patch.x1] = piece.view(height, width, channels)
            start += height * width
        color, alpha, depth, *rest = (part.contiguous() for part in image.split(widths, dim=-1))
        return Pixels(Patch.whole(0, view), color, alpha, depth, extra=dict(zip(shown, rest, strict=True)))


def _depth(pixels: Pixels) -> Tensor:
    assert pixels.depth is not None
    return pixels.depth
