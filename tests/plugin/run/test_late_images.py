"""TensorBoard's images are written by a thread; where they come too fast the newest wins."""

import threading
import time
from pathlib import Path

import nerfstudio.configs.base_config  # noqa: F401 - first: the writer's module and this one import each other
import pytest
import torch
from nerfstudio.utils import writer
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.compat.tensorflow_stub import pywrap_tensorflow
from torch import Tensor
from torchvision.io import decode_image

from ns_multigpu.plugin.run.late_images import LateImages, quick_checksums, write_images_late


class Slow:
    """A writer that begins an image when the test allows it."""

    def __init__(self) -> None:
        self.may = threading.Semaphore(0)
        self.written: list[tuple[str, int, float]] = []
        self.scalars: list[str] = []

    def write_image(self, name: str, image: Tensor, step: int) -> None:
        assert self.may.acquire(timeout=20)
        self.written.append((name, step, float(image.mean())))

    def write_scalar(self, name: str, scalar: float, step: int) -> None:
        self.scalars.append(name)


def test_writing_images_never_blocks_and_keeps_the_newest() -> None:
    slow = Slow()
    late = LateImages(slow)
    began = time.monotonic()
    late.write_image("img", torch.full((2, 2, 3), 1.0), 100)
    while late._waiting:
        time.sleep(0.001)  # until the thread has begun with it
    for step in (200, 300, 400):
        late.write_image("img", torch.full((2, 2, 3), step / 100), step)
        late.write_image("depth", torch.full((2, 2, 3), 0.5), step)
    late.write_scalar("loss", 1.0, 400)
    assert time.monotonic() - began < 15 and slow.written == [] and slow.scalars == ["loss"]
    for _ in range(9):
        slow.may.release()
    late.finish()
    assert slow.written == [("img", 100, 1.0), ("img", 400, 4.0), ("depth", 400, 0.5)]


def test_checksums_are_tensorboards_in_a_fraction_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, data = in_python, bytes(range(256)) * 2000
    monkeypatch.setattr(pywrap_tensorflow, "crc32c", plain)  # whatever an earlier test has made of it
    files, seconds = list[list[int]](), list[float]()
    for quick in (False, True):
        if quick:
            quick_checksums()
            assert pywrap_tensorflow.crc32c is not plain
        began = time.perf_counter()
        files.append([pywrap_tensorflow.masked_crc32c(some) for some in (b"", b"a", data)])
        seconds.append(time.perf_counter() - began)
    assert files[0] == files[1] and len(set(files[0])) == 3
    assert seconds[1] < seconds[0] / 10


def in_python(data: bytes) -> int:
    """TensorBoard's own, which no test replaces."""
    return pywrap_tensorflow.crc_finalize(pywrap_tensorflow.crc_update(pywrap_tensorflow.CRC_INIT, data))


def test_tensorboard_gets_its_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    board = writer.TensorboardWriter(tmp_path)
    others = object()
    monkeypatch.setattr(writer, "EVENT_WRITERS", [others, board])
    late = write_images_late()
    assert [others, late[0]] == writer.EVENT_WRITERS
    view, depth = 1.4 * torch.rand(4, 6, 3) - 0.2, torch.rand(3, 5, 1)
    writer.EVENT_WRITERS[1].write_image("view", view, 7)
    writer.EVENT_WRITERS[1].write_image("depth", depth, 8)
    writer.EVENT_WRITERS[1].write_scalar("loss", 0.5, 7)
    late[0].finish()
    board.tb_writer.flush()
    read = EventAccumulator(str(tmp_path))
    read.Reload()
    for name, step, image in (("view", 7, view), ("depth", 8, depth)):
        (event,) = read.Images(name)
        assert (event.step, event.height, event.width) == (step, *image.shape[:2])
        png = torch.frombuffer(bytearray(event.encoded_image_string), dtype=torch.uint8)
        assert torch.equal(decode_image(png).permute(1, 2, 0), writer.to8b(image))
    assert [event.value for event in read.Scalars("loss")] == [0.5]
