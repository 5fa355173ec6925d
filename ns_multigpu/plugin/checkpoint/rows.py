"""Tensors sharded by rows: each rank writes its own rows, and any number of ranks read any rows.

torch.distributed.checkpoint treats them as chunks of one tensor. A rank's rows are cut into blocks, each a chunk. Torch
copies one chunk at a time to and from the host. So the host's memory must hold a block, not all rows of a rank.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from ns_multigpu.plugin.checkpoint.held_rows import Rows
from ns_multigpu.plugin.checkpoint.to_host import to_host

BLOCK = 1 << 18
"""Rows per block, 47 MB of a Gaussian's largest tensor. A thread that writes holds three to four blocks in host
memory."""


class RowsPlanner(dcp.DefaultSavePlanner):
    """Save planner of a state and of sharded `rows`, with copies from the GPU to the host.

    No rows are sent: ranks gather the list of blocks, and each writes its own.
    """

    def __init__(self, rows: Mapping[str, Rows]) -> None:
        super().__init__()
        self._rows = rows

    def create_local_plan(self) -> SavePlan:
        """Return the plan with the state's items and this rank's blocks."""
        plan = super().create_local_plan()
        blocks = [item for name, rows in self._rows.items() for item in _blocks(name, rows, self.is_coordinator)]
        self.plan = dataclasses.replace(plan, items=[*plan.items, *blocks])
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Any:
        """Return the object to be written under `index`."""
        rows = self._rows.get(index.fqn)
        if rows is None:
            return super().lookup_object(index)
        if math.prod(rows.shape) == 0:
            return rows.own.new_empty(rows.shape)
        assert index.offset is not None
        begin = index.offset[0] - rows.first
        return rows.own[begin : begin + BLOCK]

    def resolve_data(self, write_item: WriteItem) -> Any:
        """Return an item's data in the host's memory."""
        found = super().resolve_data(write_item)
        return to_host(found) if isinstance(found, Tensor) and not found.is_cpu else found


def _blocks(name: str, rows: Rows, is_coordinator: bool) -> Iterator[WriteItem]:
    if math.prod(rows.shape) == 0:  # only the shape is saved: one rank writes it
        if is_coordinator:
            yield _item(name, rows, 0, rows.total)
        return
    for begin in range(0, len(rows.own), BLOCK):
        yield _item(name, rows, rows.first + begin, min(BLOCK, len(rows.own) - begin))


def _item(name: str, rows: Rows, first: int, count: int) -> WriteItem:
    chunk = _chunk(first, count, rows.own.shape)
    properties = TensorProperties.create_from_tensor(rows.own.detach())
    data = TensorWriteData(chunk=chunk, properties=properties, size=rows.shape)
    return WriteItem(index=MetadataIndex(name, chunk.offsets), type=WriteItemType.SHARD, tensor_data=data)


def _chunk(first: int, count: int, shape: torch.Size) -> ChunkStorageMetadata:
    offsets = torch.Size((first, *(0 for _ in shape[1:])))
    return ChunkStorageMetadata(offsets=offsets, sizes=torch.Size((count, *shape[1:])))


class _Into(dcp.DefaultLoadPlanner):
    """Load planner with the destination tensors, by name."""

    def __init__(self, into: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._into = into

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return self._into[index.fqn]


def read_rows(
    reader: dcp.FileSystemReader, listed: Mapping[str, TensorStorageMetadata], into: Mapping[str, Tensor], first: int
) -> None:
    """Read rows of saved tensors, a block at a time, straight into tensors on any device, without communication.

    Args:
        reader: of the folder, with its metadata set.
        listed: metadata of the saved tensors, by name.
        into: [n, ...] by name: rows `first` to `first + n` of the full tensor, converted to its dtype.

    Raises:
        ValueError: the requested rows were not saved.
    """
    items: list[Any] = []
    for name, tensor in into.items():
        size = listed[name].size
        if first < 0 or first + len(tensor) > size[0] or tensor.shape[1:] != size[1:]:
            wanted = f"rows {first} to {first + len(tensor)} of shape {list(tensor.shape[1:])}"
            raise ValueError(f"{name} was saved with shape {list(size)}: {wanted} are not in it")
        if tensor.numel():
            items += create_read_items_for_chunk_list(name, listed[name], [_chunk(first, len(tensor), tensor.shape)])
    reader.read_data(LoadPlan(items), _Into(into)).wait()
