"""Writing frames while others are drawn: files that appear whole, and films in parts, so that a render can go on.

A film is written in parts of some frames each, `parts/00003.mp4`, by whichever rank has drawn them, and put together
without encoding anything again. A part, or an image, gets its name when it is whole. So what is there is right, and a
render that was interrupted begins where it was. `.job.json` beside them says of which render they are.
"""

import json
import os
import queue
import shutil
import subprocess
import threading
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, TypeAlias

import mediapy
from PIL import Image

from ns_multigpu.plugin.faults.errors import SaveFailed
from ns_multigpu.plugin.launch.processes import cores
from ns_multigpu.plugin.tools.frames import HostFrame

JOB = ".job.json"
"""The file that says of which render those beside it are."""
_WAITING = 8
"""Images that wait to be written, at most: a large one takes 25 MB."""
_MOST_WAITING = 2**31
"""Bytes of frames that wait to be encoded, at most: two parts of a film of 4K, about."""
_THREADS = 4
"""That encode images, of one rank."""
ImageFormat = Literal["jpeg", "png"]


def ffmpeg() -> str:
    """The program: this machine's, or the one that a package brings."""
    found = shutil.which("ffmpeg")
    if found is not None:
        return found
    import imageio_ffmpeg

    return str(imageio_ffmpeg.get_ffmpeg_exe())


def part_length(frames: int) -> int:
    """Frames of a part of a film: so few that ranks have equally many parts, about, and so many that coding pays."""
    return max(8, min(32, frames // 16))


class Failed(SaveFailed):
    """Frames could not be written; those that were stay."""

    def __init__(self, place: Path, error: Exception) -> None:
        reason = getattr(error, "strerror", None) or str(error).strip().splitlines()[-1:] or type(error).__name__
        text = reason if isinstance(reason, str) else reason[0]
        super().__init__(
            f"{place} could not be written: {text}. What is finished stays. Make room, or choose another --output-path "
            "and give the same command again: it goes on from there."
        )


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """A path to write to, which becomes `path` when what is enclosed has succeeded, and is gone when it has not."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.stem}.{os.getpid()}.part{path.suffix}")
    try:
        yield part
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def begin(folder: Path, job: Mapping[str, Any]) -> int:
    """Makes the folder of a render's files, and says in it which render they are of.

    Args:
        job: what the files depend on.

    Returns:
        when that render began, in nanoseconds: files that are older are another's (see `is_done`).

    Raises:
        Failed: it cannot be made.
    """
    told = json.dumps(job, sort_keys=True, indent=1)
    file = folder / JOB
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not file.is_file() or file.read_text("utf8") != told:
            with whole_file(file) as part:
                part.write_text(told, "utf8")
        return file.stat().st_mtime_ns
    except OSError as error:
        raise Failed(folder, error) from error


def is_done(path: Path, began: int) -> bool:
    """Whether a render that began then has written a file."""
    try:
        return path.stat().st_mtime_ns >= began
    except OSError:
        return False


class Images:
    """Writes pictures as files, several at once.

    Args:
        folder: to write to. kind: of the files. quality: of JPEG, 1 to 100.
    """

    def __init__(self, folder: Path, kind: ImageFormat, quality: int) -> None:
        self._folder, self._kind, self._quality = folder, kind, quality
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="images")
        self._room = threading.BoundedSemaphore(_WAITING)
        self._tasks: list[Future[None]] = []

    def path(self, name: str) -> Path:
        """The file of a frame."""
        return self._folder / f"{name}.{'jpg' if self._kind == 'jpeg' else 'png'}"

    def put(self, name: str, frame: HostFrame) -> None:
        """Writes a frame, soon. Waits while too many wait.

        Raises:
            Failed: an earlier one could not be written.
        """
        self._look()
        self._room.acquire()
        self._tasks.append(self._pool.submit(self._write, self.path(name), frame))

    def finish(self) -> None:
        """Waits until all are written.

        Raises:
            Failed: one could not be.
        """
        for task in self._tasks:
            self._result(task)
        self._pool.shutdown()

    def _look(self) -> None:
        while self._tasks and self._tasks[0].done():
            self._result(self._tasks.pop(0))

    def _result(self, task: "Future[None]") -> None:
        try:
            task.result()
        except OSError as error:
            self._pool.shutdown(cancel_futures=True)  # and waits for those that are being written
            raise Failed(self._folder, error) from error

    def _write(self, path: Path, frame: HostFrame) -> None:
        try:
            image = Image.fromarray(frame.array())
            with whole_file(path) as part:
                if self._kind == "jpeg":
                    image.convert("RGB").save(part, "jpeg", quality=self._quality)
                else:
                    image.save(part, "png", compress_level=3)
        finally:
            self._room.release()


class _BrokenOff(Exception):
    """A part of a film ends before its frames do."""


_Frames: TypeAlias = "queue.SimpleQueue[HostFrame | _BrokenOff | None]"


class Parts:
    """Encodes parts of a film, several at once, while the next frames are drawn.

    A part is short, and an encoder looks ahead further than that: one after the other they would leave most of the
    processor idle.

    Args:
        folder: of the parts. rate: frames a second.
        encoders: how many parts are encoded at once, at most.
    """

    def __init__(self, folder: Path, rate: float, encoders: int) -> None:
        self._folder, self._rate, self._encoders = folder, rate, encoders
        self._parts: deque[Future[None]] = deque()
        self._free = threading.Semaphore(encoders)
        self._frames: _Frames = queue.SimpleQueue()
        self._number: int | None = None  # of the part that is being put
        self._room = threading.Condition()
        self._waiting, self._failed = 0, False  # bytes

    def path(self, number: int) -> Path:
        """The file of a part."""
        return self._folder / f"{number:05d}.mp4"

    def put(self, number: int, frame: HostFrame | None) -> None:
        """Adds a frame to a part, or with None ends it: parts follow each other. Waits while too much waits.

        Raises:
            Failed: an earlier one could not be encoded or written. Those that have all their frames are finished first.
        """
        self._look()
        if self._number is None:
            assert frame is not None, "a part has a frame at least"
            while len(self._parts) > self._encoders:  # one may wait for an encoder, and any may end first
                for part in wait(self._parts, return_when=FIRST_COMPLETED).done:
                    self._parts.remove(part)
                    self._result(part)
            self._frames, self._number = queue.SimpleQueue(), number
            self._parts.append(Future())
            # A daemon: a render that is broken off ends no part, and its process must not wait for one.
            task = (self._parts[-1], number, self._frames)
            threading.Thread(target=self._run, args=task, name=f"film {number}", daemon=True).start()
        assert number == self._number, "parts follow each other"
        if frame is None:
            self._number = None
        else:
            self._wait_for_room(frame.bytes)
        self._frames.put(frame)

    def finish(self) -> None:
        """Waits until all parts are written.

        Raises:
            Failed: one could not be. The others are finished first.
        """
        assert self._number is None, "the last part has been ended"
        while self._parts:
            self._result(self._parts.popleft())

    def _look(self) -> None:
        for part in self._parts:
            if part.done() and part.exception() is not None:
                self._result(part)

    def _result(self, part: "Future[None]") -> None:
        try:
            part.result()
        except Exception as error:
            if self._number is not None:  # nobody puts its other frames any more
                self._frames.put(_BrokenOff())
                self._number = None
            wait(self._parts)  # what is whole is kept: whoever is told of this finds what will be there
            raise Failed(self._folder, error) from error

    def _wait_for_room(self, size: int) -> None:
        with self._room:
            self._room.wait_for(lambda: self._failed or not self._waiting or self._waiting + size <= _MOST_WAITING)
            self._waiting += size

    def _run(self, told: "Future[None]", number: int, frames: "_Frames") -> None:
        try:
            with self._free:
                self._part(number, frames)
        except BaseException as error:  # the thread that draws tells
            told.set_exception(error)
            with self._room:  # it takes no frames any more
                self._failed = True
                self._room.notify_all()
        else:  # after an encoder is free again: so one part at most waits for one
            told.set_result(None)

    def _part(self, number: int, frames: "_Frames") -> None:
        frame = self._next(frames)
        assert frame is not None
        height, width, _ = frame.array().shape
        with (
            whole_file(self.path(number)) as path,
            mediapy.VideoWriter(path, (height, width), fps=self._rate) as writer,
        ):
            while frame is not None:
                writer.add_image(frame.array()[..., :3])
                self._taken(frame)
                frame = self._next(frames)

    @staticmethod
    def _next(frames: "_Frames") -> HostFrame | None:
        frame = frames.get()
        if isinstance(frame, _BrokenOff):
            raise frame
        return frame

    def _taken(self, frame: HostFrame) -> None:
        with self._room:
            self._waiting -= frame.bytes
            self._room.notify_all()


def encoders(sharing: int) -> int:
    """How many films' parts to encode at once on a machine whose cores so many processes share.

    One encoder keeps about four cores busy.
    """
    return max(1, min(4, cores() // (4 * sharing)))


def put_together(parts: list[Path], output: Path) -> None:
    """Makes one film of parts, in order; nothing is encoded again.

    Raises:
        Failed: it could not be written.
    """
    listing = parts[0].with_name("list.txt")
    try:
        listing.write_text("".join(f"file '{part.name}'\n" for part in parts), "utf8")
        with whole_file(output) as path:
            command = [ffmpeg(), "-v", "error", "-y", "-f", "concat", "-safe", "0", "-i", str(listing), "-c", "copy"]
            subprocess.run([*command, str(path)], check=True, capture_output=True, text=True)
    except subprocess.CalledProcessError as error:
        raise Failed(output, OSError(0, str(error.stderr).strip() or "ffmpeg failed")) from error
    except OSError as error:
        raise Failed(output, error) from error
