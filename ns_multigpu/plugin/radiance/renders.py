"""Images for rank 0's viewer while several ranks train, each with its own cells."""

import threading
from collections.abc import Mapping
from typing import Any

import torch
from nerfstudio.cameras.cameras import Cameras
from nerfstudio.data.scene_box import OrientedBox

from ns_multigpu.core.collectives import broadcast_object
from ns_multigpu.core.world import World
from ns_multigpu.plugin.render.lent_lock import LentLock
from ns_multigpu.plugin.render.strides import Strides

Request = tuple[Cameras, OrientedBox | None]


class Renders:
    """Renders one model with all ranks, between two steps. Made on every rank, in its main thread.

    A viewer renders in threads of its own, under `lock`, which is lent to them when all ranks stand between two steps
    (see `Guards.may_go_on`); what such a thread asks the model for, the main threads of all ranks render.

    Args:
        model: a `NerfactoXLModel`.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self.lock = LentLock()
        self.strides = Strides()
        self._main = threading.get_ident()
        model.elsewhere = self

    @property
    def _world(self) -> World:
        return self._model.world

    def serves(self) -> bool:
        """Whether this thread is a viewer's, and asks for an image that takes all ranks."""
        return threading.get_ident() != self._main and self._world.size > 1

    def ask(self, camera: Cameras, crop: OrientedBox | None) -> dict[str, torch.Tensor]:
        """An image, in a viewer's thread.

        Raises:
            SystemExit: training has ended, and nobody will answer.
        """
        if crop is not None:
            crop = OrientedBox(R=crop.R.cpu(), T=crop.T.cpu(), S=crop.S.cpu())
        return self.lock.ask((camera.to("cpu"), crop))

    # ---- what `Guards.may_go_on` asks for ----

    @property
    def waiting(self) -> int:
        """How many of the viewer's threads wait."""
        return self.lock.waiting

    def wait_until_wanted(self, seconds: float) -> None:
        """Returns as soon as one waits, after `seconds` at the latest."""
        self.lock.wait_until_wanted(seconds)

    def serve(self) -> None:
        """Lends the lock to a viewer's thread and renders what it asks for. Every rank calls it."""
        if self._world.is_main:
            try:
                self.lock.lend(self._answer)
            finally:
                broadcast_object(None, 0, self._world)
            return
        while (request := broadcast_object(None, 0, self._world)) is not None:
            self._render(request)

    def close(self) -> None:
        """Nobody is answered any more."""
        self.lock.close()

    def _answer(self, request: Request) -> Mapping[str, torch.Tensor]:
        broadcast_object(request, 0, self._world)
        return self._render(request)

    @torch.no_grad()
    def _render(self, request: Request) -> dict[str, torch.Tensor]:
        camera, crop = request
        model, training = self._model, self._model.training
        model.eval()
        try:
            if crop is not None:
                crop = OrientedBox(R=crop.R.to(model.device), T=crop.T.to(model.device), S=crop.S.to(model.device))
            return model.get_outputs_for_camera(camera.to(model.device), obb_box=crop)
        finally:
            model.train(training)
