"""Image service of a model, for evaluation, the viewer's threads, and nerfstudio's commands.

An evaluation calls `render` on every rank. The viewer runs in threads of rank 0 only. Its requests wait until all ranks
are between two steps (see `Guards.may_go_on`); their main threads then render them (`serve`). nerfstudio's commands
have one process. Its helpers, if any (see `launch.helpers`), wait for requests at any time (`lead_always`).
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
"""Output that shows ownership: every point in its owner's colour, blended as usual."""


@dataclass(frozen=True)
class RenderRequest:
    """Request for an image or for pixels of some rays, as rank 0 publishes it. On the host.

    Attributes:
        camera: one camera, [1]; None for rays.
        crop: render only points in this box; None for all.
        owners: render each point or pixel in the colour of its rank.
        rays: [R] with `nears` and `fars`, instead of an image.
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
        """Number of pixels of the image, or of rays."""
        if self.camera is None:
            return 0 if self.rays is None else len(self.rays)
        return int((self.camera.width * self.camera.height).item())


class Drawer(Protocol):
    """Renderer of one kind of model on all ranks: `Pictures` of splats, `FieldPictures` of a radiance field."""

    @property
    def shared(self) -> bool:
        """True if an image takes all ranks, because each holds a shard of the model."""
        ...

    @property
    def shows_owners(self) -> bool:
        """True if it can render `RenderRequest.owners`."""
        ...

    @property
    def interruptible(self) -> bool:
        """True if an exception may interrupt an image of one rank at any line, as nerfstudio's viewer requires."""
        ...

    def draw(self, request: RenderRequest, roots: Sequence[int]) -> Outputs | None:
        """Return the image on the ranks `roots`, and None on others. Every rank calls it."""
        ...


class RenderService:
    """Image service of one model on all ranks. Every rank creates one, in its main thread.

    Args:
        model: from now on it asks the service before it renders (`render_override`).
        pictures: renders on all ranks.
        world: the ranks.

    Attributes:
        pictures: see above.
        lock: step lock that viewer threads acquire between two steps of training.
        rate: pixels per second of the last image that a thread waited for; None before the first.
        strides: limit on block length while a viewer is connected.
    """

    def __init__(self, model: Any, pictures: Drawer, world: World) -> None:
        self.pictures, self._world = pictures, world
        self.lock = StepLock()
        self.rate: float | None = None
        self.strides = ViewerThrottle()
        self._main = threading.get_ident()
        self._drawing: int | None = None  # thread that renders an image now
        self._leads = self._always = self._failed = False
        self._turn = threading.RLock()  # serializes images
        model.render_override = self

    @property
    def shared(self) -> bool:
        """True if an image takes all ranks."""
        return self.pictures.shared

    # ---- by all ranks together ----

    def render(self, camera: Cameras, crop: OrientedBox | None = None, roots: Sequence[int] = (0,)) -> Outputs | None:
        """Render an image for evaluation. Every rank calls it, with the same arguments.

        The call changes neither random numbers nor the partition of training views.

        Args:
            camera: one camera.
            crop: render only points in this box.
            roots: ranks that receive the image.

        Returns:
            on `roots`, the model's `get_outputs` in eval mode; None on other ranks.

        Raises:
            CapacityExceeded: on all ranks, if even the smallest pass does not fit their devices.
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
        """Return an image for a caller of the model; None if this process must render it alone.

        A viewer's thread waits until all ranks render it. Within `run_leading`, or after `lead_always`, rank 0 requests
        it from the others at once. Otherwise, in main threads, every rank must request the same image if the model is
        sharded. If it is not, each rank renders its own.

        In the first two cases an output `rank` is added if `pictures` supports it. All ranks render it in a pass of its
        own, on first access only. In the third case a single rank might access it and wait forever.

        Raises:
            CapacityExceeded: the image does not fit the ranks' devices.
            RuntimeError: an earlier image failed midway, so the ranks are out of step.
            SystemExit: in a viewer's thread, if training has ended.
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
            # nerfstudio's commands write all listed outputs.
            return LateOutputs(outputs, RANK, lambda: self._ask(owners)["rgb"], listed=viewer or self._leads)
        if not self.shared:
            return None
        outputs = self.render(camera, crop, range(self._world.size))
        assert outputs is not None
        return outputs

    def outputs_of_rays(self, rays: RayBundle) -> Outputs | None:
        """Return pixels of rays [R] that rank 0 requests with its helpers.

        It returns None if all ranks request them, or are rendering them already.

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
        """Render the requests of rank 0's viewer threads. Every rank calls it, at the same place between two steps."""
        self.run_leading(lambda: self.lock.pass_on(self._answer))

    def run_leading(self, work: Callable[[], T]) -> T | None:
        """Run `work` on rank 0, which may request images; the other ranks render them. Every rank calls it.

        Returns:
            on rank 0 the result of `work`; None on other ranks.
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
            if not self._failed:  # after a failure the others are not in this loop; rank 0's error ends the run
                broadcast_object(None, 0, world)

    def help(self, request: RenderRequest) -> None:
        """Render rank 0's request together with the other ranks."""
        with contextlib.suppress(CapacityExceeded):  # raised on all ranks; rank 0 reports it
            self._render(request, (0,))

    def _answer(self, request: RenderRequest) -> "Outputs | CapacityExceeded":
        try:
            return self._lead(request)
        except CapacityExceeded as error:  # return it to the requester; training continues
            return error

    def _lead(self, request: RenderRequest) -> Outputs:
        alone = self._world.size == 1
        # nerfstudio's viewer interrupts its rendering; prevent that if other ranks take part.
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
                torch.cuda.current_stream().synchronize()  # another thread may use it on another stream
            self._failed = False
            if request.camera is not None:
                self.rate = request.pixels / max(time.perf_counter() - began, 1e-6)
            return outputs

    # ---- one process with helpers ----

    def lead_always(self) -> None:
        """Put rank 0 in charge: from now on the other ranks wait for its requests, from any thread."""
        self._always = True

    @property
    def leads_always(self) -> bool:
        """True after `lead_always`, outside of `side_by_side`."""
        return self._always

    @contextlib.contextmanager
    def side_by_side(self) -> Iterator[None]:
        """Let all ranks make the same calls within the context, as without `lead_always`."""
        with self._turn:
            before, self._always = self._always, False
            try:
                yield
            finally:
                self._always = before

    # ---- a viewer's threads ----

    @property
    def waiting(self) -> int:
        """Number of viewer threads that wait for an image."""
        return self.lock.waiting

    def wait_until_wanted(self, seconds: float) -> None:
        """Wait until a viewer thread of this rank requests an image, for at most `seconds`."""
        self.lock.wait_until_wanted(seconds)

    def close(self) -> None:
        """End all threads that wait for an image, or request one later."""
        self.lock.close()
