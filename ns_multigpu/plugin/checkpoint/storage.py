"""Files of a checkpoint: written through torch.distributed.checkpoint with a checksum, read without trusting them."""

import os
import pickle
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.utils._pytree import tree_map_only

from ns_multigpu.core.world import World
from ns_multigpu.plugin.checkpoint import rows as blocks
from ns_multigpu.plugin.checkpoint.rows import Rows, RowsPlanner, read_rows
from ns_multigpu.plugin.checkpoint.verify import Stamp, new_digest
from ns_multigpu.plugin.faults.host_memory import available_memory
from ns_multigpu.plugin.launch.launcher import cores

_LARGE = 1 << 17
"""Bytes from which on a piece's checksum is worth a thread."""
_PART = 64 << 20
"""Bytes of a rank that are worth a file of their own, written beside its others."""
_PARTS = 4
"""Files of a rank at most."""


class StampedFile:
    """A file being written that knows what it should contain.

    What fails (a full disk) is remembered and raised by `finish`, not at once: torch's writer is C++ underneath and
    would hide it behind an error of its own. A thread takes the checksum of a large piece while it is written.
    """

    def __init__(self, path: Path) -> None:
        self._digest, self._size = new_digest(), 0
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
    """`x`, copied if it is a part of a larger storage, as tensors of points may be: torch would save all of that."""
    return x.detach().clone() if x.nbytes < x.untyped_storage().nbytes() else x


def sync_folder(folder: Path) -> None:
    """Brings the names in a folder to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class _StampingFiles(FileSystem):
    """torch's access to files, through `StampedFile`.

    Attributes:
        stamps: of the files that are whole, by name.
        errors: of those that are not, and that torch's further threads wrote: it would let them pass.
    """

    def __init__(self) -> None:
        self.stamps: dict[str, Stamp] = {}
        self.errors: list[OSError] = []
        self._thread = threading.get_ident()

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        if mode != "wb":
            with super().create_stream(path, mode) as stream:
                yield stream
            return
        file = StampedFile(Path(path))
        yield file
        try:
            self.stamps[Path(path).name] = file.finish()
        except OSError as error:
            if threading.get_ident() == self._thread:
                raise
            self.errors.append(error)

    def rename(self, path: Any, new_path: Any) -> None:
        super().rename(path, new_path)
        self.stamps[Path(new_path).name] = self.stamps.pop(Path(path).name)


def save_tensors(
    folder: Path, tensors: Mapping[str, Tensor | Rows], world: World, *, at_once: bool = True
) -> dict[str, Stamp]:
    """Writes tensors; those that several ranks name are the same on each and are written by one of them.

    Every rank calls it.

    Args:
        folder: an empty folder that all ranks see.
        tensors: by name; of one that the ranks hold together each writes its rows.
        at_once: a rank may write several files, each in a thread.

    Returns:
        what this rank has written.

    Raises:
        CheckpointException: it failed, here or on another rank (torch tells all of them).
        OSError: it failed here, and the others do not know.
    """
    threads = files_at_once(tensors, world.host_size) if at_once else 1
    writer = dcp.FileSystemWriter(folder, sync_files=False, thread_count=threads)  # `StampedFile` syncs them
    writer.fs = files = _StampingFiles()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
        dcp.save(
            {name: value for name, value in tensors.items() if isinstance(value, Tensor)},
            storage_writer=writer,
            planner=RowsPlanner({name: value for name, value in tensors.items() if isinstance(value, Rows)}),
            process_group=world.control,
            no_dist=world.control is None,
        )
    if files.errors:
        raise files.errors[0]
    return files.stamps


def files_at_once(tensors: Mapping[str, Tensor | Rows], local_ranks: int) -> int:
    """Files in which a rank writes tensors, each in a thread.

    They are at most 4, one for 64 MiB, and one for a core of this rank's share. Each holds a copy of what it takes from
    a GPU: together these have half of the rank's share of the host's memory.
    """
    size = copy = 0
    for value in tensors.values():
        own = value.own if isinstance(value, Rows) else value
        size += own.nbytes
        if not own.is_cpu:
            copy = max(copy, (own[: blocks.BLOCK] if isinstance(value, Rows) else own).nbytes)
    most = min(_PARTS, size // _PART, cores() // local_ranks)
    if copy and (room := available_memory()) is not None:
        most = min(most, room // (2 * local_ranks * copy))
    return max(1, most)


class _Reader(dcp.FileSystemReader):
    """Reads the list of tensors with an unpickler that makes nothing but such a list."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        with (Path(self.path) / ".metadata").open("rb") as file:
            metadata = _MetadataUnpickler(file).load()
        if getattr(metadata, "storage_meta", None) is None:
            metadata.storage_meta = StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class _MetadataUnpickler(pickle.Unpickler):
    _MODULES = ("torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem")
    _NAMES = frozenset(
        {
            ("torch", "Size"),
            ("torch", "device"),
            ("torch.serialization", "_get_layout"),
            ("collections", "OrderedDict"),
            ("pathlib", "PosixPath"),
            ("pathlib", "Path"),
            ("pathlib._local", "PosixPath"),
        }
    )

    def find_class(self, module_name: str, global_name: str) -> Any:
        known = (module_name, global_name) in self._NAMES
        if module_name in self._MODULES and "." not in global_name:
            found = super().find_class(module_name, global_name)
            known = isinstance(found, type) and found.__module__ == module_name
        elif module_name == "torch" and isinstance(getattr(torch, global_name, None), torch.dtype):
            known = True
        if not known:
            raise pickle.UnpicklingError(f"a list of tensors has no place for {module_name}.{global_name}")
        return super().find_class(module_name, global_name)


class SavedTensors:
    """The tensors in a state folder, by name; each process reads what it needs, on its own."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._metadata = _Reader(folder).read_metadata()
        listed = self._metadata.state_dict_metadata
        self._listed = {k: entry for k, entry in listed.items() if isinstance(entry, TensorStorageMetadata)}

    @property
    def names(self) -> list[str]:
        """The names, sorted."""
        return sorted(self._listed)

    def read(self, names: list[str]) -> dict[str, Tensor]:
        """Tensors on the CPU, as they were saved."""
        wanted: dict[str, Any] = {
            name: torch.empty(self._listed[name].size, dtype=self._listed[name].properties.dtype) for name in names
        }
        if wanted:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
                dcp.load(wanted, storage_reader=_Reader(self._folder), no_dist=True)
        return wanted

    def shape(self, name: str) -> tuple[int, ...]:
        """Of the whole tensor."""
        return tuple(self._listed[name].size)

    def dtype(self, name: str) -> torch.dtype:
        """As it was saved."""
        return self._listed[name].properties.dtype

    def read_rows(self, into: Mapping[str, Tensor], first: int) -> None:
        """Rows from `first` on into tensors that lie where they are wanted; see `checkpoint.rows.read_rows`."""
        reader = _Reader(self._folder)
        reader.set_up_storage_reader(self._metadata, is_coordinator=True)
        read_rows(reader, self._listed, into, first)

    def rows_of(
        self, name: str, rows: range | Tensor, device: torch.device | str = "cpu", dtype: torch.dtype | None = None
    ) -> Tensor:
        """Some rows of one tensor, on `device`.

        Args:
            rows: a range, or [n] int64 in any order: these are picked out of the blocks that they lie in.
            dtype: to convert to.
        """
        dtype, shape = dtype or self.dtype(name), self.shape(name)
        value = torch.empty((len(rows), *shape[1:]), dtype=dtype, device=device)
        if isinstance(rows, range):
            self.read_rows({name: value}, rows.start)
            return value
        found, to = torch.sort(rows.cpu())
        for begin in range(0, shape[0], blocks.BLOCK):
            first, end = torch.searchsorted(found, torch.tensor([begin, begin + blocks.BLOCK])).tolist()
            if first < end:
                part = torch.empty((int(found[end - 1]) + 1 - int(found[first]), *shape[1:]), dtype=dtype)
                self.read_rows({name: part}, int(found[first]))
                value[to[first:end].to(device)] = part[found[first:end] - found[first]].to(device)
        return value
