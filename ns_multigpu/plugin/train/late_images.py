"""TensorBoard's images, written while training goes on.

nerfstudio hands its writers three full-size images at each look at a held-out view, every 100 steps by default. To make
PNG files of them takes two seconds at 1062 x 1894, twenty times as long as the 100 steps do.
"""

import threading
from typing import Any

from nerfstudio.utils import writer
from torch import Tensor


class LateImages:
    """Stands in for a writer: its images are written by a thread, all else at once.

    Where images come faster than they can be written, older ones of the same name give way: the newest is always
    written.

    Args:
        inner: the writer.
    """

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self._waiting: dict[str, tuple[Tensor, int]] = {}
        self._changed = threading.Condition()
        self._ended = False
        self._thread = threading.Thread(target=self._write, name="images for TensorBoard", daemon=True)
        self._thread.start()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def write_image(self, name: str, image: Tensor, step: int) -> None:
        """See nerfstudio's `Writer.write_image`; it returns at once.

        Args:
            image: [H, W, C], on the host.
        """
        with self._changed:
            self._waiting[name] = image, step
            self._changed.notify_all()

    def finish(self) -> None:
        """Waits until the newest images are written, and ends the thread."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()
        self._thread.join()

    def _write(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._ended)
                if not self._waiting:
                    return
                name = next(iter(self._waiting))
                image, step = self._waiting.pop(name)
            self._inner.write_image(name, image, step)


def write_images_late() -> list[LateImages]:
    """From now on this process's TensorBoard gets its images late; returns what to `finish` before it ends."""
    late: list[LateImages] = []
    for place, one in enumerate(writer.EVENT_WRITERS):
        if isinstance(one, writer.TensorboardWriter):
            late.append(LateImages(one))
            writer.EVENT_WRITERS[place] = late[-1]  # type: ignore[call-overload]
    return late
