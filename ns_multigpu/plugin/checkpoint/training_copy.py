"""Copy of a checkpoint's content, so that training does not wait for the disk.

Nothing is gathered: each rank copies its own part. The copy is on the rank's GPU, which takes some milliseconds, or
else in the host's memory. It may take a quarter of the free memory of a GPU, or of a machine for all of its ranks. If
neither suffices, no copy is made.
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
"""Divisor of the free memory: the copies may take 1 / _PART of it."""


@dataclass(frozen=True)
class Content:
    """Content of a checkpoint; see `checkpoint.save`."""

    pipeline: Callable[[], Mapping[str, Any]]
    tensors: Mapping[str, Tensor | Rows]
    values: Mapping[str, Any]


Memory = tuple[str, int]
"""Memory that ranks may share, by name, with its free bytes."""


@dataclass(frozen=True)
class _Load:
    """Demand of one rank: bytes by name of tensors that other ranks may hold too, own bytes, and the possible memories.
    Without a GPU, `gpu` is None.
    """

    shared: dict[str, int]
    own: int
    gpu: Memory | None
    host: Memory


def training_copy(content: Content, world: World) -> Content | None:
    """Copy this rank's part of the checkpoint, independent of training's memory. Every rank calls it.

    One rank copies and writes each tensor that several ranks hold.

    Returns:
        on all ranks the copy, all on GPUs or all in the host's memory; None on all ranks if the memory of one is too
            small.
    """
    # Pipeline and values are written by rank 0 alone.
    pipeline, values = (dict(content.pipeline()), content.values) if world.is_main else ({}, {})
    shared = {name: value.nbytes for name, value in content.tensors.items() if isinstance(value, Tensor)}
    rows = sum(value.own.nbytes for value in content.tensors.values() if isinstance(value, Rows))
    model = sum(value.nbytes for value in pipeline.values() if isinstance(value, Tensor))
    loads = all_gather_objects(_Load(shared, rows + model, _gpu(world), _host(world)), world)
    writers = share_out([load.shared for load in loads], [load.own for load in loads])
    for places, copied in (([load.gpu for load in loads], _on_its_device), ([load.host for load in loads], to_host)):
        if not _fits(loads, writers, places):
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
                torch.cuda.current_stream(world.device).synchronize()  # the writing thread uses another stream
        except Exception as error:
            if where_memory_ran_out(error) is None:
                raise
        if not max_int(int(made is None), world):
            return made
    return None


def _gpu(world: World) -> Memory | None:
    free = free_bytes(world.device) if world.device.type == "cuda" else None
    return None if free is None else (str(torch.cuda.get_device_properties(world.device).uuid), free)


def _host(world: World) -> Memory:
    # The ranks of a machine are consecutive (see World).
    return str(world.rank - world.rank % world.host_size), available_memory() or 0


def share_out(holders: Sequence[Mapping[str, int]], own: Sequence[int]) -> dict[str, int]:
    """Return the rank that writes each replicated tensor: largest first, by the holder with the least to write.

    Args:
        holders: by rank, bytes by name of the tensors it holds.
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


def _fits(loads: Sequence[_Load], writers: Mapping[str, int], places: Sequence[Memory | None]) -> bool:
    """Return True if the copies of all ranks fit the memories `places`, by rank; several ranks may share one."""
    known = [place for place in places if place is not None]
    if len(known) < len(places):
        return False
    needed: dict[str, int] = {}
    for rank, (load, place) in enumerate(zip(loads, known, strict=True)):
        size = load.own + sum(size for name, size in load.shared.items() if writers[name] == rank)
        needed[place[0]] = needed.get(place[0], 0) + size
    return all(_PART * needed[place[0]] <= place[1] for place in known)


def _on_its_device(value: Tensor) -> Tensor:
    return value.detach().clone(memory_format=torch.contiguous_format)


def apart(value: Any, copied: Callable[[Tensor], Tensor]) -> Any:
    """Return a copy that shares nothing with `value`.

    Args:
        copied: returns the copy of a tensor.
    """
    if isinstance(value, (int, float, str)):  # the most frequent case: a run's statistics of views
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
