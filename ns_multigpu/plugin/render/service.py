"""Images of a model for whoever asks: an evaluation, a viewer's threads, or nerfstudio's own commands.

An evaluation calls `render` on every rank. A viewer lives on rank 0 alone, in threads of its own: what it asks for
waits until all ranks stand between two steps (see `Guards.may_go_on`) and their main threads render it (`serve`).
nerfstudio's commands know one process; the helpers that it may have (see `launch.helpers`) wait for what it asks them
at any time (`lead_always`).
"""

import contextlib
import threading
import time
from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from nerfstudio.cameras.cameras import Cameras
from nerfstudio.data.scene_box import OrientedBox

from ns_multigpu.core.collectives import broadcast_object
from ns_multigpu.core.forward import NoRoom
from ns_multigpu.core.strategy import Strategy
from ns_multigpu.plugin.render.late_outputs import LateOutputs
from ns_multigpu.plugin.render.leading import Leading
from ns_multigpu.plugin.render.lent_lock import untraced
from ns_multigpu.plugin.render.pictures import Outputs, Pictures, RenderRequest

T = TypeVar("T")
RANK = "rank"
"""The output that shows who owns what is seen: every point in its owner's colour, blended as usual."""


class RenderService(Leading):
    """Renders one model with all ranks. Made on every rank, in its main thread.

    Args:
        model: a `SplatModel`.
        strategy: how its points are spread.

    Attributes:
        pictures: draws them, on all ranks. The others: see `Leading`.
    """

    def __init__(self, model: Any, strategy: Strategy) -> None:
        super().__init__()
        self._model, self._strategy, self._world = model, strategy, strategy.world
        self.pictures = Pictures(model, strategy)
        self._leads = False

    @property
    def shared(self) -> bool:
        """Whether an image takes all ranks, for the points are spread over several; or is not the model's own."""
        takes_strategy = not self._strategy.pixels.whole and self._model.sharded
        return not self._strategy.placement.replicated and (self._world.size > 1 or takes_strategy)

    def install(self) -> None:
        """From now on the model's own rendering methods come here first. See `outputs`."""
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

        Raises:
            NoRoom: on all ranks, where even a small part of it does not fit their devices.
        """
        return self._render(RenderRequest.of(camera, crop, self._world.device), roots)

    def _render(self, request: RenderRequest, roots: Sequence[int]) -> Outputs | None:
        return self.pictures.draw(request, roots)

    # ---- on request of rank 0 ----

    def outputs(self, camera: Cameras, crop: OrientedBox | None) -> MutableMapping[str, Any] | None:
        """An image for whoever asks the model for one; None for one that this process can and should make by itself.

        A viewer's thread waits until all ranks come to render it. Within `run_leading`, or after `lead_always`, rank 0
        makes the others help at once. Otherwise, in main threads, every rank must ask for the same, and gets it, where
        the points are spread; where they are not, each makes its own.

        The first two have an output `rank` as well. It takes a rendering of its own, by all ranks, and so it is only
        made when somebody looks at it; in the third case one rank might look alone, and wait for ever.

        Raises:
            NoRoom: the image does not fit the ranks' devices.
            SystemExit: in a viewer's thread, that training has ended.
        """
        viewer = threading.get_ident() != self._main
        if viewer or self._leads or self._always:
            request = RenderRequest.of(camera, crop, self._world.device)
            if self._world.size == 1:
                return self._lead(request)
            owners = replace(request, owners=True)
            # nerfstudio's commands write all outputs that are listed.
            return LateOutputs(self._ask(request), RANK, lambda: self._ask(owners)["rgb"], listed=viewer or self._leads)
        if not self.shared:
            return None
        outputs = self.render(camera, crop, range(self._world.size))
        assert outputs is not None
        return outputs

    def _ask(self, request: RenderRequest) -> Outputs:
        if self._always or (threading.get_ident() == self._main and self._leads):
            return self._lead(request)
        if threading.get_ident() != self._main:
            answer = self.lock.ask(request)
            if isinstance(answer, NoRoom):
                raise answer
            return answer
        raise RuntimeError("an output that takes all ranks was looked at when they did not help any more")

    def serve(self) -> None:
        """Renders what a viewer's thread on rank 0 wants. Every rank calls it, at the same place between two steps."""
        self.run_leading(lambda: self.lock.lend(self._answer))

    def run_leading(self, work: Callable[[], T]) -> T | None:
        """Runs `work` on rank 0, which may ask the model for images, while the others help. Every rank calls it.

        Returns:
            on rank 0 what `work` returns; None elsewhere.
        """
        world = self._world
        if not world.is_main:
            while (request := broadcast_object(None, 0, world)) is not None:
                self.help(request)
            return None
        self._leads = True
        try:
            return work()
        finally:
            self._leads = False
            if not self._failed:  # else they wait elsewhere, and this rank's error ends the run
                broadcast_object(None, 0, world)

    def help(self, request: RenderRequest) -> None:
        """Renders with the others what rank 0 has asked for."""
        with contextlib.suppress(NoRoom):  # which all ranks have met; rank 0 tells
            self._render(request, (0,))

    def _answer(self, request: RenderRequest) -> "Outputs | NoRoom":
        try:
            return self._lead(request)
        except NoRoom as error:  # for whoever asked; training goes on
            return error

    def _lead(self, request: RenderRequest) -> Outputs:
        with untraced(), self._turn:  # nerfstudio interrupts a viewer's rendering: not within this
            began = time.perf_counter()
            self._failed = True
            broadcast_object(request, 0, self._world)
            try:
                outputs = self._render(request, (0,))
            except NoRoom:
                self._failed = False
                raise
            assert outputs is not None
            if self._world.device.type == "cuda":
                torch.cuda.current_stream().synchronize()  # another thread may go on with it, on a stream of its own
            self._failed = False
            seconds = time.perf_counter() - began
            self.rate = request.view.width * request.view.height / max(seconds, 1e-6)
            return outputs

    # ---- a viewer's threads ----

    @property
    def wanted(self) -> bool:
        """Whether a viewer's thread of this rank waits for an image."""
        return self.lock.wanted
