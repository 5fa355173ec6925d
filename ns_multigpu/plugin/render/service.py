"""Images of a model whose points are spread over ranks: rendered by all of them together, gathered where wanted.

An evaluation calls `render` on every rank. A viewer lives on rank 0 alone, in threads of its own: what it asks for
waits until all ranks stand between two steps (see `Guards.may_go_on`) and their main threads render it (`serve`).
"""

import threading
from collections.abc import Callable, MutableMapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from nerfstudio.cameras.cameras import Cameras
from nerfstudio.data.scene_box import OrientedBox
from torch import Tensor

from ns_multigpu.core.collectives import all_gather_ints, broadcast_object, exchange_rows
from ns_multigpu.core.plan import Plan
from ns_multigpu.core.schema import POSITION
from ns_multigpu.core.strategy import Strategy
from ns_multigpu.core.types import Patch, Pixels, Points, Rendering, View
from ns_multigpu.locality.palette import rank_colors
from ns_multigpu.plugin.model.cameras import view_from_camera
from ns_multigpu.plugin.render.late_outputs import LateOutputs
from ns_multigpu.plugin.render.lent_lock import LentLock

T = TypeVar("T")
Outputs = dict[str, Any]
RANK = "rank"
"""The output that shows who owns what is seen: every point in its owner's colour, blended as usual."""
_CHANNELS = 5
"""Of a pixel: colour, opacity, depth."""
_NO_TRAINING_VIEW = -1
"""Index of views that are not the capture's: their work is not what was learned of a training view."""


@dataclass(frozen=True)
class RenderRequest:
    """An image to render, as one rank tells it to the others.

    Attributes:
        view: the camera, its tensors on the host.
        crop: renders the points in this box alone, on the host too; None for all.
        owners: renders every point in the colour of the rank that owns it, instead of its own.
    """

    view: View
    crop: OrientedBox | None = None
    owners: bool = False

    @staticmethod
    def of(camera: Cameras, crop: OrientedBox | None, device: torch.device) -> "RenderRequest":
        """One pinhole camera, its matrices computed on `device`, as everywhere else.

        Raises:
            ValueError: the image has no pixels.
        """
        camera = camera.to(device)
        view = view_from_camera(camera, camera.camera_to_worlds.reshape(-1, 3, 4)[0], _NO_TRAINING_VIEW)
        if view.width < 1 or view.height < 1:
            raise ValueError(f"an image of {view.width}x{view.height} pixels cannot be rendered")
        if crop is not None:
            crop = OrientedBox(R=crop.R.cpu(), T=crop.T.cpu(), S=crop.S.cpu())
        return RenderRequest(replace(view, viewmat=view.viewmat.cpu(), K=view.K.cpu()), crop)


class RenderService:
    """Renders one model with all ranks. Made on every rank, in its main thread.

    Args:
        model: a `SplatModel`.
        strategy: how its points are spread.

    Attributes:
        lock: what viewers render under; lent between two steps.
    """

    def __init__(self, model: Any, strategy: Strategy) -> None:
        self._model, self._strategy, self._world = model, strategy, strategy.world
        self.lock = LentLock()
        self._main = threading.get_ident()
        self._leads = self._failed = False

    @property
    def shared(self) -> bool:
        """Whether an image takes all ranks, for the points are spread over several; or is not the model's own."""
        takes_strategy = not self._strategy.pixels.whole and self._model.sharded
        return not self._strategy.placement.replicated and (self._world.size > 1 or takes_strategy)

    @property
    def if_shared(self) -> "RenderService | None":
        """Itself, if an image takes all ranks."""
        return self if self.shared else None

    def install(self) -> None:
        """From now on the model's own rendering methods come here, if it takes all ranks. See `outputs`."""
        if self.shared:
            self._model.elsewhere = self.outputs

    # ---- by all ranks together ----

    def render(self, camera: Cameras, crop: OrientedBox | None = None, roots: Sequence[int] = (0,)) -> Outputs | None:
        """Renders an image for evaluation. Every rank calls it, with the same arguments.

        Neither what is drawn at random nor how training views are cut depends on whether it was called.

        Args:
            camera: one pinhole camera.
            crop: renders the points in this box alone.
            roots: the ranks that want it.

        Returns:
            on `roots` what `SplatModel.get_outputs` returns in eval mode; None elsewhere.
        """
        return self._render(RenderRequest.of(camera, crop, self._world.device), roots)

    @torch.no_grad()
    def _render(self, request: RenderRequest, roots: Sequence[int]) -> Outputs | None:
        model, world, strategy = self._model, self._world, self._strategy
        view = replace(request.view, viewmat=request.view.viewmat.to(world.device), K=request.view.K.to(world.device))
        points = Points({name: value.detach() for name, value in model.gauss_params.items()})
        strategy.observe(model.primitive(depth=True, counted=False), points)
        narrowed: AbstractContextManager[None] = nullcontext()
        if request.crop is not None:
            kept = request.crop.within(points.params[POSITION]).reshape(-1)
            points = Points({name: value[kept] for name, value in points.params.items()})
            narrowed = strategy.placement.narrowed(kept)
            if not any(row[0] for row in all_gather_ints([len(points)], world)):
                background = model.background_color.to(world.device)
                return model.get_empty_outputs(view.width, view.height, background) if world.rank in roots else None
        plan = strategy.plan([view]).without_halos()
        primitive = model.primitive(depth=True, counted=False)
        if request.owners:
            colors = rank_colors(world.machines, world.size // world.machines)
            primitive, points = model.in_one_color(primitive, points, colors[world.rank])
        with narrowed:
            pixels = self._gather(strategy.render(primitive, points, [view], plan), view, plan, roots)
        if pixels is None:
            return None
        was_training = model.training
        model.eval()
        try:
            return model.outputs_of(pixels, view)
        finally:
            model.train(was_training)

    def _gather(self, rendering: Rendering, view: View, plan: Plan, roots: Sequence[int]) -> Pixels | None:
        """The whole image on `roots`, from each rank's patches."""
        world = self._world
        counts = [sum((p.x1 - p.x0) * (p.y1 - p.y0) for p in patches) for patches in plan.owned]
        like = next(row for row in rendering.splats.rows.values() if row.is_floating_point())
        parts = [torch.cat([one.color, one.alpha, _depth(one)], -1).flatten(0, 1) for one in rendering.pixels]
        own = torch.cat([like.new_empty(0, _CHANNELS), *parts])
        send = [len(own) if rank in roots else 0 for rank in range(world.size)]
        receive = counts if world.rank in roots else [0] * world.size
        rows = exchange_rows(own.repeat(len(set(roots)), 1), send, receive, world)
        if world.rank not in roots:
            return None
        image = rows.new_empty(view.height, view.width, _CHANNELS)
        start = 0
        for patch in (patch for patches in plan.owned for patch in patches):
            height, width = patch.y1 - patch.y0, patch.x1 - patch.x0
            piece = rows[start : start + height * width]
            image[patch.y0 : patch.y1, patch.x0 : patch.x1] = piece.view(height, width, _CHANNELS)
            start += height * width
        color, alpha, depth = (part.contiguous() for part in image.split([3, 1, 1], dim=-1))
        return Pixels(Patch.whole(0, view), color, alpha, depth)

    # ---- on request of rank 0 ----

    def outputs(self, camera: Cameras, crop: OrientedBox | None) -> MutableMapping[str, Any]:
        """An image for whoever asks the model for one.

        A viewer's thread waits until all ranks come to render it. Within `run_leading` rank 0 makes the others help at
        once. Otherwise, in main threads, every rank must ask for the same, and gets it.

        The first two have an output `rank` as well. It takes a rendering of its own, by all ranks, and so it is only
        made when somebody looks at it; in the third case one rank might look alone, and wait for ever.

        Raises:
            SystemExit: in a viewer's thread, that training has ended.
        """
        if threading.get_ident() != self._main or self._leads:
            request = RenderRequest.of(camera, crop, self._world.device)
            return LateOutputs(self._ask(request), RANK, lambda: self._ask(replace(request, owners=True))["rgb"])
        outputs = self.render(camera, crop, range(self._world.size))
        assert outputs is not None
        return outputs

    def _ask(self, request: RenderRequest) -> Outputs:
        if threading.get_ident() != self._main:
            return self.lock.ask(request)
        if not self._leads:
            raise RuntimeError("an output that takes all ranks was looked at when they did not help any more")
        return self._lead(request)

    def serve(self) -> None:
        """Renders what a viewer's thread on rank 0 wants. Every rank calls it, at the same place between two steps."""
        self.run_leading(lambda: self.lock.lend(self._lead))

    def run_leading(self, work: Callable[[], T]) -> T | None:
        """Runs `work` on rank 0, which may ask the model for images, while the others help. Every rank calls it.

        Returns:
            on rank 0 what `work` returns; None elsewhere.
        """
        world = self._world
        if not world.is_main:
            while (request := broadcast_object(None, 0, world)) is not None:
                self._render(request, (0,))
            return None
        self._leads = True
        try:
            return work()
        finally:
            self._leads = False
            if not self._failed:  # else they wait elsewhere, and this rank's error ends the run
                broadcast_object(None, 0, world)

    def _lead(self, request: RenderRequest) -> Outputs:
        self._failed = True
        broadcast_object(request, 0, self._world)
        outputs = self._render(request, (0,))
        assert outputs is not None
        if self._world.device.type == "cuda":
            torch.cuda.current_stream().synchronize()  # another thread goes on with it, on a stream of its own
        self._failed = False
        return outputs

    @property
    def wanted(self) -> bool:
        """Whether a viewer's thread of this rank waits for an image."""
        return self.lock.wanted

    def wait_until_wanted(self, seconds: float) -> None:
        """Returns as soon as a viewer's thread of this rank wants an image, after `seconds` at the latest."""
        self.lock.wait_until_wanted(seconds)

    def close(self) -> None:
        """Ends all threads that wait for an image, or ask for one later."""
        self.lock.close()


def _depth(pixels: Pixels) -> Tensor:
    assert pixels.depth is not None
    return pixels.depth
