"""TensorBoard's images, written while training goes on.

nerfstudio hands its writers three full-size images at each look at a held-out view, every 100 steps by default. To make
PNG files of them takes two seconds at 1062 x 1894, twenty times as long as the 100 steps do. And TensorBoard takes
checksums in Python, for which the thread that trains waits: 0.3 s an image.
"""

import importlib.util
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import torchvision
from nerfstudio.utils import writer
from tensorboard.compat.proto import summary_pb2
from tensorboard.compat.tensorflow_stub import pywrap_tensorflow
from torch import Tensor

_COMPRESSION = 1
"""Of PNG files, of 9: the least takes a fifth of the time that TensorBoard's takes."""


class LateImages:
    """Stands in for a writer: its images are written by a thread, all else at once.

    Where images come faster than they can be written, older ones of the same name give way: the newest is always
    written.

    Args:
        inner: the writer.
        write: what writes an image in the place of the writer's `write_image`: its name, itself and its step.
    """

    def __init__(self, inner: Any, write: Callable[[str, Tensor, int], None] | None = None) -> None:
        self._inner = inner
        self._write_image = write or inner.write_image
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
            self._write_image(name, image, step)


def write_png(board: writer.TensorboardWriter, name: str, image: Tensor, step: int) -> None:
    """As `write_image` of nerfstudio's writer does, in less time.

    Args:
        image: [H, W, 1 or 3], from 0 to 1, on the host.
    """
    height, width, channels = image.shape
    png = torchvision.io.encode_png(writer.to8b(image).permute(2, 0, 1).contiguous(), _COMPRESSION).numpy().tobytes()
    summary: Any = summary_pb2.Summary  # pyright: ignore[reportAttributeAccessIssue]
    shown = summary.Image(height=height, width=width, colorspace=channels, encoded_image_string=png)
    file: Any = board.tb_writer.file_writer
    file.add_summary(summary(value=[summary.Value(tag=name, image=shown)]), step)


def quick_checksums() -> None:
    """Has TensorBoard take the checksums of what it writes in C: a microsecond a kilobyte at most, instead of 90.

    Where `google-crc32c` is not installed they stay as they are: files are the same.
    """
    if importlib.util.find_spec("google_crc32c") is not None:
        from google_crc32c import value

        pywrap_tensorflow.crc32c = value


def write_images_late() -> list[LateImages]:
    """From now on this process's TensorBoard gets its images late; returns what to `finish` before it ends."""
    late: list[LateImages] = []
    quick_checksums()
    for place, one in enumerate(writer.EVENT_WRITERS):
        if isinstance(one, writer.TensorboardWriter):
            late.append(LateImages(one, partial(write_png, one)))
            writer.EVENT_WRITERS[place] = late[-1]  # type: ignore[call-overload]
    return late
