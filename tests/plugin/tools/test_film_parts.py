"""Parts of a film, encoded side by side while others are drawn."""

import errno
import threading
import time
from pathlib import Path
from typing import Any

import imageio.v3 as iio
import numpy as np
import pytest
import torch

from ns_multigpu.plugin.faults.errors import SaveFailed
from ns_multigpu.plugin.tools import film, rendering
from ns_multigpu.plugin.tools.film import FilmParts
from ns_multigpu.plugin.tools.frames import HostFrame


def frame(shade: int, side: int = 4) -> HostFrame:
    return HostFrame(torch.full((side, side, 3), shade, dtype=torch.uint8))


def put_all(parts: FilmParts, count: int) -> None:
    """Put parts of one frame each, whose shade is their number."""
    for number in range(count):
        parts.put(number, frame(number))
        parts.put(number, None)


class Silent:
    """In the place of mediapy's writer: a film without frames."""

    def __init__(self, path: Path, shape: tuple[int, int], fps: float) -> None:
        path.touch()

    def __enter__(self) -> "Silent":
        return self

    def __exit__(self, *_: object) -> None:
        pass


@pytest.mark.parametrize("encoders", [1, 3])
def test_frames_wait_for_their_encoder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, encoders: int) -> None:
    """The queue between drawing and writing has a limit of bytes; a dead encoder is reported."""
    monkeypatch.setattr(film, "_MOST_WAITING", 6 * 16 * 16 * 3)
    rendering.mediapy.set_ffmpeg(film.ffmpeg())
    parts = FilmParts(tmp_path, 10.0, encoders)
    for number in range(5):
        for shade in range(20):
            parts.put(number, frame(10 * shade, 16))
            assert parts._waiting <= film._MOST_WAITING
        parts.put(number, None)
    parts.finish()
    film.put_together([parts.path(number) for number in range(5)], tmp_path / "all.mp4")
    found = iio.imread(tmp_path / "all.mp4")[:, 8, 8, 0].astype(int)
    assert np.abs(found - np.tile(10 * np.arange(20), 5)).max() <= 6
    rendering.mediapy.set_ffmpeg("/bin/false")
    broken = FilmParts(tmp_path / "b", 10.0, encoders)
    with pytest.raises(SaveFailed, match="could not be written"):
        for _ in range(100):
            broken.put(0, frame(0, 16))
    rendering.mediapy.set_ffmpeg(film.ffmpeg())


def test_parts_are_encoded_side_by_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as there are encoders, and no more."""
    together, lock, most, now = threading.Barrier(3, timeout=30), threading.Lock(), [0], [0]

    class Writer(Silent):
        def __enter__(self) -> "Writer":
            with lock:
                now[0] += 1
                most[0] = max(most[0], now[0])
            return self

        def add_image(self, image: np.ndarray[Any, Any]) -> None:
            together.wait()  # until three are at work

        def __exit__(self, *_: object) -> None:
            with lock:
                now[0] -= 1

    monkeypatch.setattr(film.mediapy, "VideoWriter", Writer)
    parts = FilmParts(tmp_path, 10.0, 3)
    put_all(parts, 9)
    parts.finish()
    assert most == [3] and all(parts.path(number).is_file() for number in range(9))


def test_a_slow_part_does_not_hold_up_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing continues while the first part is encoded, which ends after six others."""
    others = threading.Semaphore(0)

    class Writer(Silent):
        def add_image(self, image: np.ndarray[Any, Any]) -> None:
            if image[0, 0, 0] == 0:
                assert all(others.acquire(timeout=30) for _ in range(6)), "the others waited for the first"
            else:
                others.release()

    monkeypatch.setattr(film.mediapy, "VideoWriter", Writer)
    parts = FilmParts(tmp_path, 10.0, 3)
    put_all(parts, 8)
    parts.finish()
    assert all(parts.path(number).is_file() for number in range(8))


def test_complete_parts_are_finished_before_a_failure_is_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = threading.Event()

    class Writer(Silent):
        def add_image(self, image: np.ndarray[Any, Any]) -> None:
            if image[0, 0, 0] == 0:
                failed.wait(30)
                time.sleep(0.2)
            elif image[0, 0, 0] == 1:
                failed.set()
                raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(film.mediapy, "VideoWriter", Writer)
    parts = FilmParts(tmp_path, 10.0, 3)
    put_all(parts, 2)
    with pytest.raises(SaveFailed, match="No space left"):
        for _ in range(1000):
            parts.put(2, frame(2))
            time.sleep(0.01)
    assert [file.name for file in tmp_path.iterdir()] == ["00000.mp4"]


@pytest.mark.parametrize(("cores", "sharing", "expected"), [(2, 1, 1), (16, 1, 4), (16, 2, 2), (64, 1, 4), (8, 4, 1)])
def test_encoders_share_the_cores(monkeypatch: pytest.MonkeyPatch, cores: int, sharing: int, expected: int) -> None:
    monkeypatch.setattr(film, "cores", lambda: cores)
    assert film.encoders(sharing) == expected


# ---- the modes of ns-render ----
