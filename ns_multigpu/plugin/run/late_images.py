"""TensorBoard's images, written in the background of training.

nerfstudio passes three full-size images to its writers at each evaluation of a held-out view, every 100 steps by
default. Encoding them as PNG takes two seconds at 1062 x 1894, twenty times as long as the 100 steps. TensorBoard also
computes checksums in Python, which blocks the training thread for 0.3 s an image.
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
"""Compression level of PNG files, of 9: the lowest takes a fifth of TensorBoard's time."""


class LateImages:
    """Proxy of a writer that writes images in a thread and forwards all other calls.

    If images come faster than they can be written, newer ones replace older ones of the same name.

    Args:
        inner: the writer.
        write: writes an image instead of the writer's `write_image`; gets its name, pixels and step.
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
        """Queue an image and return at once; see nerfstudio's `Writer.write_image`.

        Args:
            image: [H, W, C], on the host.
        """
        with self._changed:
            self._waiting[name] = image, step
            self._changed.notify_all()

    def finish(self) -> None:
        """Wait until the newest images are written, and end the thread."""
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
    """Write an image as `write_image` of nerfstudio's writer does, in less time.

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
    """Make TensorBoard compute checksums in C: at most a microsecond a kilobyte instead of 90.

    Without `google-crc32c` they stay in Python; files are the same.
    """
    if importlib.util.find_spec("google_crc32c") is not None:
        from google_crc32c import value

        pywrap_tensorflow.crc32c = value


def write_images_late() -> list[LateImages]:
    """Make this process's TensorBoard writers write images in the background; return them, to `finish` before
    it ends."""
    late: list[LateImages] = []
    quick_checksums()
    for place, one in enumerate(writer.EVENT_WRITERS):
        if isinstance(one, writer.TensorboardWriter):
            late.append(LateImages(one, partial(write_png, one)))
            writer.EVENT_WRITERS[place] = late[-1]  # type: ignore[call-overload]
    return late
