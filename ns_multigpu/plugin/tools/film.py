"""Concurrent writing of frames: atomic files, and films in parts, so that an interrupted render can resume.

A film is written in parts of some frames each, `parts/00003.mp4`, by the rank that rendered them. The parts are joined
without encoding again. A part or image gets its final name when it is complete. So existing files are valid, and an
interrupted render resumes after them. `.job.json` in the same folder identifies the render.
"""

import json
import queue
import shutil
import subprocess
import threading
from collections import deque
from collections.abc import Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, Literal, TypeAlias

import mediapy
from PIL import Image

from ns_multigpu.plugin.faults.errors import InputError, SaveFailed, whole_file
from ns_multigpu.plugin.launch.processes import cores
from ns_multigpu.plugin.tools.frames import HostFrame

JOB = ".job.json"
"""File that identifies the render of the files in its folder."""
_WAITING = 8
"""Largest number of images in the write queue: a large one takes 25 MB."""
_MOST_WAITING = 2**31
"""Largest number of bytes of frames in the encoding queue: about two parts of a 4K film."""
_THREADS = 4
"""Threads of one rank that encode images."""
ImageFormat = Literal["jpeg", "png"]


def ffmpeg() -> str:
    """Return the path of ffmpeg: the machine's, or the one of imageio_ffmpeg.

    Raises:
        InputError: neither exists.
    """
    found = shutil.which("ffmpeg")
    if found is not None:
        return found
    try:
        import imageio_ffmpeg

        return str(imageio_ffmpeg.get_ffmpeg_exe())
    except (ImportError, RuntimeError) as error:  # not installed, or installed without its binary
        raise InputError(
            "A film needs ffmpeg, which is not installed: pip install imageio-ffmpeg. For images, give --output-path "
            "the name of a folder."
        ) from error


def part_length(frames: int) -> int:
    """Return the number of frames per part: few enough to balance the ranks, many enough to encode well."""
    return max(8, min(32, frames // 16))


class Failed(SaveFailed):
    """Failure to write frames; frames that were written remain."""

    def __init__(self, place: Path, error: Exception) -> None:
        reason = getattr(error, "strerror", None) or str(error).strip().splitlines()[-1:] or type(error).__name__
        text = reason if isinstance(reason, str) else reason[0]
        super().__init__(
            f"{place} could not be written: {text}. Finished frames are kept. Free space or name another --output-path "
            "and give the same command again: it goes on from there."
        )


def begin(folder: Path, job: Mapping[str, Any]) -> int:
    """Create the folder of a render's files and write the job file.

    Args:
        job: all that the files depend on.

    Returns:
        start of that render, in nanoseconds: older files belong to another render (see `is_done`).

    Raises:
        Failed: the folder or file cannot be written.
    """
    job_text = json.dumps(job, sort_keys=True, indent=1)
    file = folder / JOB
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not file.is_file() or file.read_text("utf8") != job_text:
            with whole_file(file) as part:
                part.write_text(job_text, "utf8")
        return file.stat().st_mtime_ns
    except OSError as error:
        raise Failed(folder, error) from error


def is_done(path: Path, began: int) -> bool:
    """Return True if a file exists and is not older than the start `began` of the render."""
    try:
        return path.stat().st_mtime_ns >= began
    except OSError:
        return False


class Images:
    """Writer of image files, with several threads.

    Args:
        folder: to write to.
        kind: format of the files.
        quality: of JPEG, 1 to 100.
    """

    def __init__(self, folder: Path, kind: ImageFormat, quality: int) -> None:
        self._folder, self._kind, self._quality = folder, kind, quality
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="images")
        self._slots = threading.BoundedSemaphore(_WAITING)
        self._tasks: list[Future[None]] = []

    def path(self, name: str) -> Path:
        """Return the path of a frame."""
        return self._folder / f"{name}.{'jpg' if self._kind == 'jpeg' else 'png'}"

    def put(self, name: str, frame: HostFrame) -> None:
        """Queue a frame for writing. Wait while the queue is full.

        Raises:
            Failed: an earlier one could not be written.
        """
        self._look()
        self._slots.acquire()
        self._tasks.append(self._pool.submit(self._write, self.path(name), frame))

    def finish(self) -> None:
        """Wait until all frames are written.

        Raises:
            Failed: one could not be written.
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
            self._pool.shutdown(cancel_futures=True)  # waits for running writes
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
            self._slots.release()


class _BrokenOff(Exception):
    """Premature end of a part of a film."""


_Frames: TypeAlias = "queue.SimpleQueue[HostFrame | _BrokenOff | None]"


class FilmParts:
    """Encoder of film parts: several at once, concurrently with rendering.

    A part is shorter than the encoder's lookahead. Encoding parts one by one would leave most cores idle.

    Args:
        folder: of the parts.
        rate: frames per second.
        encoders: largest number of parts encoded at once.
    """

    def __init__(self, folder: Path, rate: float, encoders: int) -> None:
        self._folder, self._rate, self._encoders = folder, rate, encoders
        self._parts: deque[Future[None]] = deque()
        self._free = threading.Semaphore(encoders)
        self._frames: _Frames = queue.SimpleQueue()
        self._number: int | None = None  # of the part that receives frames
        self._queued = threading.Condition()
        self._waiting, self._failed = 0, False  # bytes in the queue

    def path(self, number: int) -> Path:
        """Return the path of a part."""
        return self._folder / f"{number:05d}.mp4"

    def put(self, number: int, frame: HostFrame | None) -> None:
        """Add a frame to a part; None ends the part. Parts follow each other. Wait while the queue is full.

        Raises:
            Failed: an earlier part could not be encoded or written. Complete parts are finished first.
        """
        self._look()
        if self._number is None:
            assert frame is not None, "a part has a frame at least"
            while len(self._parts) > self._encoders:  # one part may wait for an encoder; any may end first
                for part in wait(self._parts, return_when=FIRST_COMPLETED).done:
                    self._parts.remove(part)
                    self._result(part)
            self._frames, self._number = queue.SimpleQueue(), number
            self._parts.append(Future())
            # A daemon: an interrupted render ends no part, and its process must not wait for one.
            task = (self._parts[-1], number, self._frames)
            threading.Thread(target=self._run, args=task, name=f"film {number}", daemon=True).start()
        assert number == self._number, "parts follow each other"
        if frame is None:
            self._number = None
        else:
            self._wait_for_capacity(frame.bytes)
        self._frames.put(frame)

    def finish(self) -> None:
        """Wait until all parts are written.

        Raises:
            Failed: one could not be written. The others are finished first.
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
            if self._number is not None:  # its remaining frames will not come
                self._frames.put(_BrokenOff())
                self._number = None
            wait(self._parts)  # complete parts are kept: finish them before raising
            raise Failed(self._folder, error) from error

    def _wait_for_capacity(self, size: int) -> None:
        with self._queued:
            self._queued.wait_for(lambda: self._failed or not self._waiting or self._waiting + size <= _MOST_WAITING)
            self._waiting += size

    def _run(self, part: "Future[None]", number: int, frames: "_Frames") -> None:
        try:
            with self._free:
                self._part(number, frames)
        except BaseException as error:  # the rendering thread raises it
            part.set_exception(error)
            with self._queued:  # accept no more frames
                self._failed = True
                self._queued.notify_all()
        else:  # released after an encoder is free: at most one part waits for an encoder
            part.set_result(None)

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
        with self._queued:
            self._waiting -= frame.bytes
            self._queued.notify_all()


def encoders(sharing: int) -> int:
    """Return the number of film parts to encode at once per process, if `sharing` processes share the cores.

    One encoder keeps about four cores busy.
    """
    return max(1, min(4, cores() // (4 * sharing)))


def put_together(parts: list[Path], output: Path) -> None:
    """Join the parts of a film in order, without encoding again.

    Raises:
        Failed: the film could not be written.
    """
    list_file = parts[0].with_name("list.txt")
    try:
        list_file.write_text("".join(f"file '{part.name}'\n" for part in parts), "utf8")
        with whole_file(output) as path:
            command = [ffmpeg(), "-v", "error", "-y", "-f", "concat", "-safe", "0", "-i", str(list_file), "-c", "copy"]
            subprocess.run([*command, str(path)], check=True, capture_output=True, text=True)
    except subprocess.CalledProcessError as error:
        raise Failed(output, OSError(0, str(error.stderr).strip() or "ffmpeg failed")) from error
    except OSError as error:
        raise Failed(output, error) from error
