"""Tensors of a checkpoint: written through torch.distributed.checkpoint, read without trusting the files.

That library dominates the import time of this package and is not needed before the first save. So this module and
`rows` are imported only where tensors are written or read.
"""

import pickle
import threading
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata

from ns_multigpu.core.dist.world import World
from ns_multigpu.plugin.checkpoint import rows as blocks
from ns_multigpu.plugin.checkpoint.held_rows import Rows
from ns_multigpu.plugin.checkpoint.rows import RowsPlanner, read_rows
from ns_multigpu.plugin.checkpoint.storage import StampedFile
from ns_multigpu.plugin.checkpoint.verify import Stamp
from ns_multigpu.plugin.faults.host_memory import available_memory
from ns_multigpu.plugin.launch.processes import cores

_PART = 64 << 20
"""Smallest number of bytes of a rank for which an additional file is written."""
_PARTS = 4
"""Largest number of files of a rank."""


class _StampingFiles(FileSystem):
    """File system of torch's writer that opens files as `StampedFile`.

    Attributes:
        stamps: of the complete files, by name.
        errors: of files that torch's additional threads failed to write, since torch ignores those.
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
    """Write tensors. A tensor of several ranks is the same on each, and one of them writes it. Every rank calls it.

    Args:
        folder: an empty folder on a file system that all ranks share.
        tensors: by name; each rank writes its rows of a sharded one.
        at_once: True to write several files per rank, each in a thread.

    Returns:
        the stamps of the files that this rank has written.

    Raises:
        CheckpointException: writing failed on any rank; torch raises it on all.
        OSError: writing failed on this rank only, unknown to the others.
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
    """Return the number of files in which a rank writes tensors, each in a thread.

    The number is at most 4, one per 64 MiB, and one per core of this rank. Each thread holds host copies of up to
    four GPU blocks. All copies together take at most half of the rank's part of the free host memory.
    """
    size = copy = 0
    for value in tensors.values():
        own = value.own if isinstance(value, Rows) else value
        size += own.nbytes
        if not own.is_cpu:
            copy = max(copy, (own[: 4 * blocks.BLOCK] if isinstance(value, Rows) else own).nbytes)
    most = min(_PARTS, size // _PART, cores() // local_ranks)
    if copy and (available := available_memory()) is not None:
        most = min(most, available // (2 * local_ranks * copy))
    return max(1, most)


class _Reader(dcp.FileSystemReader):
    """Reader of the tensor metadata, with an unpickler restricted to the metadata's types."""

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
    """Tensors in a state folder, by name. Each process reads independently."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._metadata = _Reader(folder).read_metadata()
        listed = self._metadata.state_dict_metadata
        self._listed = {k: entry for k, entry in listed.items() if isinstance(entry, TensorStorageMetadata)}

    @property
    def names(self) -> list[str]:
        """Names, sorted."""
        return sorted(self._listed)

    def read(self, names: list[str]) -> dict[str, Tensor]:
        """Return tensors on the CPU, as they were saved."""
        wanted: dict[str, Any] = {
            name: torch.empty(self._listed[name].size, dtype=self._listed[name].properties.dtype) for name in names
        }
        if wanted:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
                dcp.load(wanted, storage_reader=_Reader(self._folder), no_dist=True)
        return wanted

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of the full tensor."""
        return tuple(self._listed[name].size)

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype in the file."""
        return self._listed[name].properties.dtype

    def read_rows(self, into: Mapping[str, Tensor], first: int) -> None:
        """Read rows from `first` on into existing tensors; see `checkpoint.rows.read_rows`."""
        reader = _Reader(self._folder)
        reader.set_up_storage_reader(self._metadata, is_coordinator=True)
        read_rows(reader, self._listed, into, first)

    def rows_of(
        self, name: str, rows: range | Tensor, device: torch.device | str = "cpu", dtype: torch.dtype | None = None
    ) -> Tensor:
        """Return some rows of one tensor, on `device`.

        Args:
            rows: a range, or [n] int64 in any order, which is read block by block.
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
