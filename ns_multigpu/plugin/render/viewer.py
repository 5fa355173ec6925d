"""Fixes for hangs of nerfstudio's viewer when a page is closed.

In viser 0.2.7 an error inside `atomic()` never releases its lock. nerfstudio 1.1.5 raises such an error if a page is
closed while its camera moves. Afterwards nothing is sent to any page, and threads that wait for the lock keep the
process alive. The fixes:

- `atomic()` always releases its lock.
- viser's threads are daemons and do not keep the process alive.
- Closed pages are neither queried nor drawn.
- The address shown is the one in use.
- Training continues while a camera moves (nerfstudio pauses it). Redrawing idle pages takes a small fraction of its
time.
- A page opens at the first training view (`initial_camera.py`).
- A moving picture has the largest size that can be drawn 30 times a second. Nerfstudio counts the wait for a step as
drawing time, so its pictures shrink to 30 lines during training.

`mend` installs the fixes for the viewers of training and of `ns-viewer`.
"""

import contextlib
import dataclasses
import queue
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from typing import Any

from nerfstudio.utils.rich_utils import CONSOLE
from nerfstudio.viewer import viewer as stock
from nerfstudio.viewer.render_state_machine import RenderAction, RenderStateMachine
from rich.markup import escape
from viser.infra import _infra  # pyright: ignore[reportAttributeAccessIssue]

from ns_multigpu.plugin.render.initial_camera import handle_new_client
from ns_multigpu.plugin.render.viewer_start import hasten

_BETWEEN_FAILURES = 0.5
"""Seconds between two attempts to draw a page after a failure."""
_BETWEEN_PICTURES = 0.25
"""Least seconds between two pictures of an idle page during training."""
_SHARE = 0.1
"""Fraction of the time that such pictures may take."""
_FEWEST_LINES = 120
"""Least height of a moving picture, lines."""

Viewer: Any = stock.Viewer
_stock_init = Viewer.__init__
_mended = False


def mend() -> None:
    """Install the fixes of this module for this process's viewers. Call it before a viewer is created."""
    global _mended
    if _mended:
        return
    _mended = True
    hasten()
    handler: Any = _infra.WebsockMessageHandler
    handler.atomic, handler.queue_message = _atomic, _queue_message
    _infra.ThreadPoolExecutor = DaemonThreads
    stock.RenderStateMachine = PageRenderer  # type: ignore[misc]
    Viewer.__init__, Viewer.handle_disconnect, Viewer.update_scene = _init, _handle_disconnect, _update_scene
    Viewer.handle_new_client = handle_new_client
    Viewer.render_statemachines = property(lambda self: self._pages, _keep_pages)


# ---- viser ----


class DaemonThreads(Executor):
    """Thread pool that the process does not wait for at exit.

    Args:
        max_workers: number of threads.
    """

    def __init__(self, max_workers: int) -> None:
        self._work: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._run, name=f"viewer {number}", daemon=True) for number in range(max_workers)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Override `Executor.submit`."""
        future: Future[Any] = Future()
        self._work.put((future, lambda: fn(*args, **kwargs)))
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End the threads after the queued work, without waiting."""
        for _ in self._threads:
            self._work.put(None)

    def _run(self) -> None:
        while (task := self._work.get()) is not None:
            future, work = task
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(work())
            except BaseException as error:  # SystemExit also ends only the task
                future.set_exception(error)


@contextlib.contextmanager
def _atomic(self: Any) -> Iterator[None]:
    """Replace viser's `WebsockMessageHandler.atomic`."""
    me = threading.get_ident()
    if self._locked_thread_id == me:  # nested call of the thread that holds the lock
        yield
        return
    with self._atomic_lock:
        self._locked_thread_id = me
        try:
            yield
        finally:
            self._locked_thread_id = -1


def _queue_message(self: Any, message: Any) -> None:
    """Replace viser's `WebsockMessageHandler.queue_message`."""
    if self._record_handle is not None:
        self._record_handle._insert_message(message)
    if self._atomic_lock.acquire(blocking=False):
        try:
            self.unsafe_send_message(message)
        finally:
            self._atomic_lock.release()
        return
    self._queued_messages.put(message)  # sent in order once the lock is free

    def send() -> None:
        with self._atomic_lock:
            self.unsafe_send_message(self._queued_messages.get())

    self._thread_executor.submit(send)


# ---- nerfstudio ----


class PageRenderer(RenderStateMachine):
    """Renderer of one page, as nerfstudio's, until the page is closed."""

    _reported = False

    def action(self, action: RenderAction) -> None:
        """Override nerfstudio's method; ignore pages that are closed."""
        if not self.running:
            return
        if _is_there(self.client):
            super().action(action)
        else:  # closed before viser registered it
            forget(self.viewer, self.client)

    def run(self) -> None:
        """Override nerfstudio's method: a failed image does not end the thread."""
        while self.running:
            try:
                super().run()
            except Exception as error:
                if self.running and _is_there(self.client):
                    self._report(error)
                    time.sleep(_BETWEEN_FAILURES)
                else:
                    forget(self.viewer, self.client)

    def _calculate_image_res(self, aspect_ratio: float) -> tuple[int, int]:
        """Override nerfstudio's method: return height and width in pixels."""
        rate = _rate(self.viewer)
        if self.state == "high" or rate is None:
            return super()._calculate_image_res(aspect_ratio)
        most = self.viewer.control_panel.max_res
        height = (rate / self.target_fps / aspect_ratio) ** 0.5
        height = min(max(height, _FEWEST_LINES), most, most / aspect_ratio)
        return max(1, int(height)), max(1, int(height * aspect_ratio))

    def _report(self, error: Exception) -> None:
        if not self._reported:
            self._reported = True
            text = f"The viewer could not draw an image ({type(error).__name__}: {error}). Training is not affected."
            CONSOLE.print(f"[bold yellow]{escape(text)}[/bold yellow]")


class _NoPage:
    """Placeholder for the renderer of a page that is closed or unknown."""

    def action(self, action: RenderAction) -> None:
        """Do nothing."""


class _Pages(dict[int, Any]):
    """Pages of a viewer by viser's number; a missing page gives a `_NoPage`."""

    def __missing__(self, client_id: int) -> _NoPage:
        return _NoPage()


def _keep_pages(self: Any, pages: dict[int, Any]) -> None:
    self._pages = _Pages(pages)


def _handle_disconnect(self: Any, client: Any) -> None:
    forget(self, client)


def forget(viewer: Any, client: Any) -> None:
    """Remove a closed page.

    Args:
        viewer: nerfstudio's.
        client: viser's `ClientHandle` of the page.
    """
    page = viewer.render_statemachines.pop(client.client_id, None)
    if page is not None:
        page.running = False
    # viser calls this after removing the page itself, if it had registered it.
    viewer.viser_server._connected_clients.pop(client.client_id, None)


def _update_scene(self: Any, step: int, num_rays_per_batch: int | None = None) -> None:
    """Replace nerfstudio's method, called between steps. It does not wait, and redraws idle pages so rarely that this
    takes a tenth of the time at most.
    """
    self.step = step
    if not self.render_statemachines or self.trainer is None or self.trainer.training_state != "training":
        return
    now, rate = time.monotonic(), _rate(self)
    seconds = len(self.render_statemachines) * self.control_panel.max_res**2 / rate if rate else 0.0
    if now < getattr(self, "_drawn_at", 0.0) + max(_BETWEEN_PICTURES, seconds / _SHARE):
        return
    self._drawn_at = now
    for number, client in self.viser_server.get_clients().items():
        with contextlib.suppress(AttributeError):  # a page that has not sent its camera yet
            self.render_statemachines[number].action(RenderAction("step", self.get_camera_state(client)))
    self.update_camera_poses()
    self.update_step(step)


def _rate(viewer: Any) -> float | None:
    """Return the measured rate of the viewer's model, pixels per second; None if unknown."""
    return getattr(getattr(viewer.pipeline, "renders", None), "rate", None)


def _is_there(client: Any) -> bool:
    """Return True if a page's connection is open."""
    return client.client_id in client._viser_server._websock_server._client_state_from_id


def _init(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
    """Create a viewer on the requested port, or the next free one, and print a note if it differs."""
    asked = config.websocket_port or config.websocket_port_default
    _stock_init(self, dataclasses.replace(config, websocket_port=asked), *args, **kwargs)
    self.config = config
    port = self.viser_server.get_port()
    if port != asked:
        self.viewer_info = [line.replace(f":{asked}", f":{port}") for line in self.viewer_info]
        CONSOLE.print(
            f"[bold yellow]Port {asked} is in use. The viewer is at http://localhost:{port} "
            "(--viewer.websocket-port N chooses another).[/bold yellow]"
        )
