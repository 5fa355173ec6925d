"""Tensors of a checkpoint: written through torch.distributed.checkpoint, read without trusting what is there.

That library is the larger part of what a start would import of ours, and nothing needs it before the first save: who
writes or reads tensors imports this module, and `rows`, when it does.
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
"""Bytes of a rank that are worth a file of their own, written beside its others."""
_PARTS = 4
"""Files of a rank at most."""


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
