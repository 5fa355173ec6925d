"""Images of a model for whoever asks: an evaluation, a viewer's threads, or nerfstudio's own commands.

An evaluation calls `render` on every rank. A viewer lives on rank 0 alone, in threads of its own: what it asks for
waits until all ranks stand between two steps (see `Guards.may_go_on`) and their main threads render it (`serve`).
nerfstudio's commands know one process; the helpers that it may have (see `launch.helpers`) wait for what it asks them
at any time (`lead_always`).
"""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

import torch
from nerfstudio.cameras.cameras import Cameras
from nerfstudio.cameras.rays import RayBundle
from nerfstudio.data.scene_box import OrientedBox

from ns_multigpu.core.dist.collectives import broadcast_object
from ns_multigpu.core.dist.world import World
from ns_multigpu.core.step.forward import CapacityExceeded
from ns_multigpu.plugin.render.late_outputs import LateOutputs
from ns_multigpu.plugin.render.step_lock import StepLock, untraced
from ns_multigpu.plugin.render.viewer_throttle import ViewerThrottle

T = TypeVar("T")
Outputs = dict[str, Any]
RANK = "rank"
"""The output that shows who owns what is seen: every point in its owner's colour, blended as usual."""


@dataclass(frozen=True)
class RenderRequest:
    """An image to render, or pixels of some rays, as one rank publishes it to the others. On the host.

    Attributes:
        camera: one camera, [1]; None for rays.
        crop: renders what is in this box alone; None for all.
        owners: renders what each rank owns, or draws, in that rank's colour.
        rays: instead of an image, [R], with `nears` and `fars`.
    """

    camera: Cameras | None = None
    crop: OrientedBox | None = None
    owners: bool = False
    rays: RayBundle | None = None

    @staticmethod
    def of(camera: Cameras, crop: OrientedBox | None = None) -> "RenderRequest":
        """Return a request for an image of one camera, moved to the host.

        Raises:
            ValueError: the image has no pixels.
        """
        width, height = int(camera.width.item()), int(camera.height.item())
        if width < 1 or height < 1:
            raise ValueError(f"an image of {width}x{height} pixels cannot be rendered")
        if crop is not None:
            crop = OrientedBox(R=crop.R.cpu(), T=crop.T.cpu(), S=crop.S.cpu())
        return RenderRequest(camera.to("cpu"), crop)

    @property
    def pixels(self) -> int:
        """Pixels of the image, or number of rays."""
        if self.camera is None:
            return 0 if self.rays is None else len(self.rays)
        return int((self.camera.width * self.camera.height).item())


class Drawer(Protocol):
    """Draws images of one kind of model with all ranks: `Pictures` of splats, `FieldPictures` of a radiance field."""

    @property
    def shared(self) -> bool:
        """Whether an image takes all ranks, because each holds a part of the model."""
        ...

    @property
    def shows_owners(self) -> bool:
        """Whether it can draw `RenderRequest.owners`."""
        ...

    @property
    def interruptible(self) -> bool:
        """Whether an exception may end an image of one rank alone at any line, as nerfstudio's viewer has it."""
        ...

    def draw(self, request: RenderRequest, roots: Sequence[int]) -> Outputs | None:
        """Return the image on the ranks `roots`, and None elsewhere. Every rank calls it."""
        ...


class RenderService:
    """Renders one model with all ranks. Made on every rank, in its main thread.

    Args:
        model: asks the service before it renders, from now on (`elsewhere`).
        pictures: draws on all ranks.
        world: the ranks.

    Attributes:
        pictures: see above.
        lock: what viewers render under while a model is trained; lent between two steps.
        rate: pixels a second of the last image that somebody waited for; None before there was one.
        strides: how many steps to take while somebody looks.
    """

    def __init__(self, model: Any, pictures: Any, world: World) -> None:
        self.pictures, self._world = pictures, world
        self.lock = StepLock()
        self.rate: float | None = None
        self.strides = ViewerThrottle()
        self._main = threading.get_ident()
        self._drawing: int | None = None  # the thread that draws an image now
        self._leads = self._always = self._failed = False
        self._turn = threading.RLock()  # one image at a time
        model.elsewhere = self

    @property
    def shared(self) -> bool:
        """Whether an image takes all ranks."""
        return self.pictures.shared

    # ---- by all ranks together ----

    def render(self, camera: Cameras, crop: OrientedBox | None = None, roots: Sequence[int] = (0,)) -> Outputs | None:
        """Renders an image for evaluation. Every rank calls it, with the same arguments.

        Neither what is drawn at random nor how training views are cut depends on whether it was called.

        Args:
            camera: one camera.
            crop: renders what is in this box alone.
            roots: the ranks that want it.

        Returns:
            on `roots` what the model's `get_outputs` returns in eval mode; None elsewhere.

        Raises:
            CapacityExceeded: on all ranks, where even a small part of it does not fit their devices.
        """
        return self._render(RenderRequest.of(camera, crop), roots)

    def _render(self, request: RenderRequest, roots: Sequence[int]) -> Outputs | None:
        before, self._drawing = self._drawing, threading.get_ident()
        try:
            return self.pictures.draw(request, roots)
        finally:
            self._drawing = before

    # ---- on request of rank 0 ----

    def outputs(self, camera: Cameras, crop: OrientedBox | None) -> MutableMapping[str, Any] | None:
        """An image for whoever asks the model for one; None for one that this process can and should make by itself.

        A viewer's thread waits until all ranks come to render it. Within `run_leading`, or after `lead_always`, rank 0
        makes the others help at once. Otherwise, in main threads, every rank must ask for the same, and gets it, where
        the model is spread; where it is not, each makes its own.

        The first two have an output `rank` as well, if `pictures` can draw it. It takes a rendering of its own, by all
        ranks, and so it is only made when somebody looks at it; in the third case one rank might look alone, and wait
        for ever.

        Raises:
            CapacityExceeded: the image does not fit the ranks' devices.
            RuntimeError: an earlier image failed half way, and the ranks are not together any more.
            SystemExit: in a viewer's thread, that training has ended.
        """
        thread = threading.get_ident()
        if self._drawing == thread:
            return None
        viewer = thread != self._main
        if viewer or self._leads or self._always:
            request = RenderRequest.of(camera, crop)
            if self._world.size == 1:
                return self._lead(request)
            outputs = self._ask(request)
            if not self.pictures.shows_owners:
                return outputs
            owners = replace(request, owners=True)
            # nerfstudio's commands write all outputs that are listed.
            return LateOutputs(outputs, RANK, lambda: self._ask(owners)["rgb"], listed=viewer or self._leads)
        if not self.shared:
            return None
        outputs = self.render(camera, crop, range(self._world.size))
        assert outputs is not None
        return outputs

    def outputs_of_rays(self, rays: RayBundle) -> Outputs | None:
        """Pixels of rays [R], of whoever asks the model for them directly on a rank 0 that has helpers; None where all
        ranks ask, or are drawing them.

        Raises:
            RuntimeError: as `outputs`.
        """
        if not self._always or self._world.size == 1 or self._drawing == threading.get_ident():
            return None
        return self._lead(RenderRequest(rays=rays.to("cpu")))

    def _ask(self, request: RenderRequest) -> Outputs:
        if self._always or (threading.get_ident() == self._main and self._leads):
            return self._lead(request)
        if threading.get_ident() != self._main:
            answer = self.lock.ask(request)
            if isinstance(answer, CapacityExceeded):
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
        with contextlib.suppress(CapacityExceeded):  # which all ranks have met; rank 0 tells
            self._render(request, (0,))

    def _answer(self, request: RenderRequest) -> "Outputs | CapacityExceeded":
        try:
            return self._lead(request)
        except CapacityExceeded as error:  # for whoever asked; training goes on
            return error

    def _lead(self, request: RenderRequest) -> Outputs:
        alone = self._world.size == 1
        # nerfstudio interrupts a viewer's rendering: not where others take part.
        with contextlib.nullcontext() if alone and self.pictures.interruptible else untraced(), self._turn:
            if self._failed:
                raise RuntimeError("an earlier image failed half way, and the others may wait there. Start again.")
            began = time.perf_counter()
            self._failed = not alone
            broadcast_object(request, 0, self._world)
            try:
                outputs = self._render(request, (0,))
            except CapacityExceeded:
                self._failed = False
                raise
            assert outputs is not None
            if self._world.device.type == "cuda":
                torch.cuda.current_stream().synchronize()  # another thread may go on with it, on a stream of its own
            self._failed = False
            if request.camera is not None:
                self.rate = request.pixels / max(time.perf_counter() - began, 1e-6)
            return outputs

    # ---- one process with helpers ----

    def lead_always(self) -> None:
        """On rank 0: from now on the others, if any, wait for what it asks for, whenever that is, in any thread."""
        self._always = True

    @property
    def leads_always(self) -> bool:
        """Whether that is so now."""
        return self._always

    @contextlib.contextmanager
    def side_by_side(self) -> Iterator[None]:
        """Within, all ranks call the same again, as if nobody led."""
        with self._turn:
            before, self._always = self._always, False
            try:
                yield
            finally:
                self._always = before

    # ---- a viewer's threads ----

    @property
    def waiting(self) -> int:
        """How many of the viewer's threads wait for an image."""
        return self.lock.waiting

    def wait_until_wanted(self, seconds: float) -> None:
        """Returns as soon as a viewer's thread of this rank wants an image, after `seconds` at the latest."""
        self.lock.wait_until_wanted(seconds)

    def close(self) -> None:
        """Ends all threads that wait for an image, or ask for one later."""
        self.lock.close()
