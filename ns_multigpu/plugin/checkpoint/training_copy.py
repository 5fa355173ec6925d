"""A copy of what a checkpoint is written from, so that training need not wait for the disk.

Nothing is gathered: each rank copies what it writes itself. The copy lies on the rank's GPU, where that takes some
milliseconds, or else in the host's memory. It may take a quarter of the memory that a GPU, or a machine, has to spare
for all of its ranks. Where that is too little of both there is none.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ns_multigpu.core.dist.collectives import all_gather_objects, max_int
from ns_multigpu.core.dist.world import World
from ns_multigpu.plugin.checkpoint.held_rows import Rows
from ns_multigpu.plugin.checkpoint.to_host import to_host
from ns_multigpu.plugin.faults.host_memory import available_memory
from ns_multigpu.plugin.faults.memory import free_bytes, where_memory_ran_out

_PART = 4
"""The copies may take one of this many parts of the memory that there is to spare."""


@dataclass(frozen=True)
class Content:
    """What a checkpoint is written from; see `checkpoint.save`."""

    pipeline: Callable[[], Mapping[str, Any]]
    tensors: Mapping[str, Tensor | Rows]
    values: Mapping[str, Any]


Room = tuple[str, int]
"""A memory that ranks may share, by name, and the bytes that it has to spare."""


@dataclass(frozen=True)
class _Load:
    """What one rank has to copy: bytes by name of tensors that others may have as well, bytes of its own, and where it
    could. Without a GPU there is no `gpu`."""

    shared: dict[str, int]
    own: int
    gpu: Room | None
    host: Room


def training_copy(content: Content, world: World) -> Content | None:
    """A copy of what this rank will write: nothing in it is training's. Every rank calls it.

    Of tensors that several ranks hold one of them makes a copy, and writes it.

    Returns:
        on all ranks the copy, all on GPUs or all in the host's memory; or None on all, if one of them has no room.
    """
    # Of these rank 0's are written.
    pipeline, values = (dict(content.pipeline()), content.values) if world.is_main else ({}, {})
    shared = {name: value.nbytes for name, value in content.tensors.items() if isinstance(value, Tensor)}
    rows = sum(value.own.nbytes for value in content.tensors.values() if isinstance(value, Rows))
    model = sum(value.nbytes for value in pipeline.values() if isinstance(value, Tensor))
    loads = all_gather_objects(_Load(shared, rows + model, _gpu(world), _host(world)), world)
    writers = share_out([load.shared for load in loads], [load.own for load in loads])
    for rooms, copied in (([load.gpu for load in loads], _on_its_device), ([load.host for load in loads], to_host)):
        if not _fits(loads, writers, rooms):
            continue
        made: Content | None = None
        try:
            tensors = {
                name: apart(value, copied)
                for name, value in content.tensors.items()
                if isinstance(value, Rows) or writers[name] == world.rank
            }
            model_copy = apart(pipeline, copied)
            made = Content(lambda model_copy=model_copy: model_copy, tensors, apart(values, to_host))
            if world.device.type == "cuda":
                torch.cuda.current_stream(world.device).synchronize()  # who reads it waits for no stream of training's
        except Exception as error:
            if where_memory_ran_out(error) is None:
                raise
        if not max_int(int(made is None), world):
            return made
    return None


def _gpu(world: World) -> Room | None:
    free = free_bytes(world.device)
    return None if free is None else (str(torch.cuda.get_device_properties(world.device).uuid), free)


def _host(world: World) -> Room:
    # As everywhere (see World), the ranks of a machine follow each other.
    return str(world.rank - world.rank % world.host_size), available_memory() or 0


def share_out(holders: Sequence[Mapping[str, int]], own: Sequence[int]) -> dict[str, int]:
    """Which rank writes each tensor that one or more ranks hold: the largest first, by whoever has the least to write.

    Args:
        holders: by rank, bytes by name of what it holds.
        own: by rank, bytes that it writes anyway.
    """
    loads = list(own)
    sizes: dict[str, int] = {}
    for held in holders:
        sizes.update(held)
    writers: dict[str, int] = {}
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        writers[name] = min((r for r, held in enumerate(holders) if name in held), key=lambda r: (loads[r], r))
        loads[writers[name]] += sizes[name]
    return writers


def _fits(loads: Sequence[_Load], writers: Mapping[str, int], rooms: Sequence[Room | None]) -> bool:
    """Whether all ranks' copies may go into `rooms`, by rank: several may share one, and each has seen what it has."""
    known = [room for room in rooms if room is not None]
    if len(known) < len(rooms):
        return False
    needed: dict[str, int] = {}
    for rank, (load, room) in enumerate(zip(loads, known, strict=True)):
        size = load.own + sum(size for name, size in load.shared.items() if writers[name] == rank)
        needed[room[0]] = needed.get(room[0], 0) + size
    return all(_PART * needed[room[0]] <= room[1] for room in known)


def _on_its_device(value: Tensor) -> Tensor:
    return value.detach().clone(memory_format=torch.contiguous_format)


def apart(value: Any, copied: Callable[[Tensor], Tensor]) -> Any:
    """A copy that shares nothing with `value`.

    Args:
        copied: gives the copy of a tensor.
    """
    if isinstance(value, (int, float, str)):  # most of all: what a run knows of its views is many numbers
        return value
    if isinstance(value, Tensor):
        return copied(value)
    if isinstance(value, Rows):
        return replace(value, own=copied(value.own))
    if isinstance(value, Mapping):
        return {key: apart(entry, copied) for key, entry in value.items()}
    if type(value) in (list, tuple):
        return type(value)(apart(entry, copied) for entry in value)
    return copy.deepcopy(value)
