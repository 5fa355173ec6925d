"""Images of a field that several ranks hold, for whoever asks on rank 0: a viewer's threads, or nerfstudio's commands.

While a field is trained, a viewer's threads wait until all ranks stand between two steps (see `Guards.may_go_on`).
nerfstudio's commands know one process; the helpers that it may have (see `launch.helpers`) wait for what it asks them
at any time (`lead_always`). Either way there is one image at a time: samplers have a state.
"""

import contextlib
import threading
import time
from dataclasses import dataclass
from typing import Any

import torch
from nerfstudio.cameras.cameras import Cameras
from nerfstudio.cameras.rays import RayBundle
from nerfstudio.data.scene_box import OrientedBox
from torch import Tensor

from ns_multigpu.core.collectives import broadcast_object
from ns_multigpu.core.world import World
from ns_multigpu.plugin.render.leading import Leading
from ns_multigpu.plugin.render.lent_lock import untraced


@dataclass(frozen=True)
class Request:
    """What rank 0 asks for: an image, or pixels of some rays. On the host.

    Attributes:
        camera: of the image, [1]. crop: what of the scene it shows; None for all.
        rays: instead of an image, with `nears` and `fars`.
    """

    camera: Cameras | None = None
    crop: OrientedBox | None = None
    rays: RayBundle | None = None


class Renders(Leading):
    """Renders one model with all ranks. Made on every rank, in its main thread.

    A viewer renders in threads of its own, under `lock`, which is lent to them when all ranks stand between two steps;
    what such a thread asks the model for, the main threads of all ranks render.

    Args:
        model: a `NerfactoXLModel`.

    Attributes: see `Leading`.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self._model = model
        self._leading: int | None = None  # the thread that does so now
        model.elsewhere = self

    @property
    def _world(self) -> World:
        return self._model.world

    def serves(self) -> bool:
        """Whether what this thread wants of the model takes all ranks, and they are to be asked."""
        if self._always:
            return self._leading != threading.get_ident()
        return threading.get_ident() != self._main and self._world.size > 1

    def ask(self, camera: Cameras, crop: OrientedBox | None) -> dict[str, Tensor]:
        """An image, where this thread `serves`.

        Raises:
            SystemExit: in a viewer's thread, that training has ended, and nobody will answer.
            RuntimeError: an earlier image failed half way, and the ranks are not together any more.
        """
        if crop is not None:
            crop = OrientedBox(R=crop.R.cpu(), T=crop.T.cpu(), S=crop.S.cpu())
        request = Request(camera.to("cpu"), crop)
        return self._lead(request) if self._always else self.lock.ask(request)

    def ask_rays(self, rays: RayBundle) -> dict[str, Tensor] | None:
        """Pixels of rays, of whoever asks the model for them directly; None where all ranks do so, or are doing it.

        Raises:
            RuntimeError: as `ask`.
        """
        asks = self._always and self._world.size > 1 and self.serves()
        return self._lead(Request(rays=rays.to("cpu"))) if asks else None

    # ---- what `Guards.may_go_on` asks for ----

    def serve(self) -> None:
        """Lends the lock to a viewer's thread and renders what it asks for. Every rank calls it."""
        if self._world.is_main:
            try:
                self.lock.lend(self._lead)
            finally:
                broadcast_object(None, 0, self._world)
            return
        while (request := broadcast_object(None, 0, self._world)) is not None:
            self._render(request)

    # ---- one process with helpers ----

    def help(self, request: Request) -> None:
        """Renders with the others what rank 0 has asked for."""
        self._render(request)

    def _lead(self, request: Request) -> dict[str, Tensor]:
        alone = self._world.size == 1
        # nerfstudio interrupts a viewer's rendering: not where others take part.
        with contextlib.nullcontext() if alone else untraced(), self._turn:
            if self._failed:
                raise RuntimeError("an earlier image failed half way, and the others may wait there. Start again.")
            self._failed, self._leading, began = not alone, threading.get_ident(), time.perf_counter()
            try:
                broadcast_object(request, 0, self._world)
                outputs = self._render(request)
            finally:
                self._leading = None
            if self._world.device.type == "cuda":
                torch.cuda.current_stream().synchronize()  # another thread may go on with it, on a stream of its own
            self._failed = False
            if request.camera is not None:
                pixels = int((request.camera.width * request.camera.height).item())
                self.rate = pixels / max(time.perf_counter() - began, 1e-6)
            return outputs

    @torch.no_grad()
    def _render(self, request: Request) -> dict[str, Tensor]:
        model, training, crop = self._model, self._model.training, request.crop
        model.eval()
        try:
            if request.camera is None:
                assert request.rays is not None
                return model.get_outputs(request.rays.to(model.device))
            if crop is not None:
                crop = OrientedBox(R=crop.R.to(model.device), T=crop.T.to(model.device), S=crop.S.to(model.device))
            return model.get_outputs_for_camera(request.camera.to(model.device), obb_box=crop)
        finally:
            model.train(training)
