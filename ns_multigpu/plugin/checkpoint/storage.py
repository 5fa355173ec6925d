"""Files of a checkpoint, written with a checksum: complete, or with an error that gives the reason."""

import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch.utils._pytree import tree_map_only

from ns_multigpu.plugin.checkpoint.to_host import to_host
from ns_multigpu.plugin.checkpoint.verify import Digest, Stamp

_LARGE = 1 << 17
"""Smallest number of bytes whose checksum is computed in a thread."""


class StampedFile:
    """File being written, with the size and checksum of its contents.

    Errors (a full disk) are stored and raised by `finish`, since torch's C++ writer would replace them by its own. The
    checksum of a large write is computed in a thread, concurrently with the write.
    """

    def __init__(self, path: Path) -> None:
        self._digest, self._size = Digest(), 0
        # The error's number only: the error would keep its frames alive, as C++ holds the file.
        self._error: tuple[int | None, str, str] | None = None
        self._path = path
        self._file: BinaryIO = BytesIO()  # never read: `finish` raises if the file does not open
        self._attempt(self._open)
        self._executor = ThreadPoolExecutor(1, "checksum")

    def write(self, data: Any) -> int:
        """Append `data`; return its size in bytes."""
        size = memoryview(data).nbytes
        taken = self._executor.submit(self._digest.update, data) if size >= _LARGE else self._digest.update(data)
        self._size += size
        try:
            if self._error is None:
                self._attempt(lambda: write_bytes(self._file, data))
        finally:
            if taken is not None:
                taken.result()  # the caller may reuse `data` afterwards
        return size

    def tell(self) -> int:
        """Return the number of bytes written."""
        return self._size

    def flush(self) -> None:
        """Do nothing: `finish` flushes."""

    def fileno(self) -> int:
        """Return the file descriptor, after flushing the buffer to it."""
        self._flush()
        return self._file.fileno()

    def close(self) -> None:
        """Do nothing: the opener calls `finish`."""

    def finish(self) -> Stamp:
        """Sync everything to the disk and close the file.

        Raises:
            OSError: something could not be written.
        """
        try:
            os.fsync(self.fileno())
        finally:
            self._executor.shutdown()
            with suppress(OSError):
                self._file.close()
        return Stamp(self._size, self._digest.hexdigest())

    def _open(self) -> None:
        self._file = self._path.open("wb")

    def _flush(self) -> None:
        if self._error is None:
            self._attempt(self._file.flush)
        if self._error is not None:
            raise OSError(*self._error)

    def _attempt(self, work: Callable[[], object]) -> None:
        try:
            work()
        except OSError as error:
            self._error = (error.errno, error.strerror or str(error), str(self._path))


def write_bytes(file: BinaryIO, data: Any) -> None:
    """Write bytes to a checkpoint file; all writes use it."""
    file.write(data)


def write_file(path: Path, data: bytes) -> Stamp:
    """Write a small file and sync it to the disk."""
    file = StampedFile(path)
    file.write(data)
    return file.finish()


def save_file(path: Path, content: Mapping[str, Any]) -> Stamp:
    """Save `content` to a file with `torch.save` and sync it to the disk."""
    file = StampedFile(path)
    torch.save(tree_map_only(torch.Tensor, _by_itself, dict(content)), file)  # pyright: ignore[reportArgumentType]
    return file.finish()


def _by_itself(x: torch.Tensor) -> torch.Tensor:
    """Return `x` in the host's memory. A part of a larger storage is copied, since torch would save the full storage;
    tensors of points may be such parts.
    """
    if not x.is_cpu:
        return to_host(x)
    return x.detach().clone() if x.nbytes < x.untyped_storage().nbytes() else x


def sync_folder(folder: Path) -> None:
    """Sync the names in a folder to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
