"""Files of a checkpoint: written with a checksum, whole or with an error that says why not."""

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
"""Bytes from which on a piece's checksum is worth a thread."""


class StampedFile:
    """A file being written that knows what it should contain.

    What fails (a full disk) is remembered and raised by `finish`, not at once: torch's writer is C++ underneath and
    would hide it behind an error of its own. A thread takes the checksum of a large piece while it is written.
    """

    def __init__(self, path: Path) -> None:
        self._digest, self._size = Digest(), 0
        # Its numbers, not the error: that would hold on to the frames it went through, and the file is held by C++.
        self._error: tuple[int | None, str, str] | None = None
        self._path = path
        self._file: BinaryIO = BytesIO()  # never read: where the file does not open, `finish` says so
        self._attempt(self._open)
        self._beside = ThreadPoolExecutor(1, "checksum")

    def write(self, data: Any) -> int:
        """Appends `data`; returns its size in bytes."""
        size = memoryview(data).nbytes
        taken = self._beside.submit(self._digest.update, data) if size >= _LARGE else self._digest.update(data)
        self._size += size
        try:
            if self._error is None:
                self._attempt(lambda: write_bytes(self._file, data))
        finally:
            if taken is not None:
                taken.result()  # the piece is its owner's again behind this
        return size

    def tell(self) -> int:
        """Bytes so far."""
        return self._size

    def flush(self) -> None:
        """Nothing: `finish` flushes."""

    def fileno(self) -> int:
        """The descriptor, with everything written handed to it."""
        self._settle()
        return self._file.fileno()

    def close(self) -> None:
        """Nothing: whoever opened it finishes it."""

    def finish(self) -> Stamp:
        """Brings everything to the disk.

        Raises:
            OSError: something could not be written.
        """
        try:
            os.fsync(self.fileno())
        finally:
            self._beside.shutdown()
            with suppress(OSError):
                self._file.close()
        return Stamp(self._size, self._digest.hexdigest())

    def _open(self) -> None:
        self._file = self._path.open("wb")

    def _settle(self) -> None:
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
    """The one place where bytes of a checkpoint go to the disk."""
    file.write(data)


def write_file(path: Path, data: bytes) -> Stamp:
    """Writes a small file and brings it to the disk."""
    file = StampedFile(path)
    file.write(data)
    return file.finish()


def save_file(path: Path, content: Mapping[str, Any]) -> Stamp:
    """`torch.save` to a file, brought to the disk."""
    file = StampedFile(path)
    torch.save(tree_map_only(torch.Tensor, _by_itself, dict(content)), file)  # pyright: ignore[reportArgumentType]
    return file.finish()


def _by_itself(x: torch.Tensor) -> torch.Tensor:
    """`x` in the host's memory, copied if it is a part of a larger storage, as tensors of points may be: torch would
    save all of that."""
    if not x.is_cpu:
        return to_host(x)
    return x.detach().clone() if x.nbytes < x.untyped_storage().nbytes() else x


def sync_folder(folder: Path) -> None:
    """Brings the names in a folder to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
