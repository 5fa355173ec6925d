"""A copy of what a checkpoint is written from, in the host's memory, so that training need not wait for the disk.

Nothing is gathered: each rank copies what it writes itself. There is a copy only where those of a machine's ranks
together take no more than a quarter of the memory that it has to spare.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from ns_multigpu.core.collectives import all_gather_objects, max_int
from ns_multigpu.core.world import World
from ns_multigpu.plugin.checkpoint.held_rows import Rows
from ns_multigpu.plugin.faults.host_memory import available_memory
from ns_multigpu.plugin.faults.memory import where_memory_ran_out

_PART = 4
"""The copies may take one of this many parts of the memory that a machine has to spare."""


@dataclass(frozen=True)
class Content:
    """What a checkpoint is written from; see `checkpoint.save`."""

    pipeline: Callable[[], Mapping[str, Any]]
    tensors: Mapping[str, Tensor | Rows]
    values: Mapping[str, Any]


@dataclass(frozen=True)
class _Load:
    """What one rank has to copy: bytes by name of tensors that others may have as well, bytes of its own, and which
    machine it is on with how many bytes to spare."""

    shared: dict[str, int]
    own: int
    machine: int
    spare: int


def host_copy(content: Content, world: World) -> Content | None:
    """A copy, in the host's memory, of what this rank will write: nothing in it is training's. Every rank calls it.

    Of tensors that several ranks hold one of them makes a copy, and writes it.

    Returns:
        on all ranks the copy; or None on all, if one of them has no room for it.
    """
    # Of these rank 0's are written.
    pipeline, values = (dict(content.pipeline()), content.values) if world.is_main else ({}, {})
    shared = {name: value.nbytes for name, value in content.tensors.items() if isinstance(value, Tensor)}
    rows = sum(value.own.nbytes for value in content.tensors.values() if isinstance(value, Rows))
    model = sum(value.nbytes for value in pipeline.values() if isinstance(value, Tensor))
    # As everywhere (see World), the ranks of a machine follow each other.
    mine = _Load(shared, rows + model, world.rank - world.rank % world.host_size, available_memory() or 0)
    loads = all_gather_objects(mine, world)
    writers = share_out([load.shared for load in loads], [load.own for load in loads])
    if not _fits(loads, writers):
        return None
    copied: Content | None = None
    try:
        tensors = {
            name: apart(value)
            for name, value in content.tensors.items()
            if isinstance(value, Rows) or writers[name] == world.rank
        }
        model_copy = apart(pipeline)
        copied = Content(lambda: model_copy, tensors, apart(values))
    except Exception as error:
        if where_memory_ran_out(error) is None:
            raise
    return None if max_int(int(copied is None), world) else copied


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


def _fits(loads: Sequence[_Load], writers: Mapping[str, int]) -> bool:
    needed: dict[int, int] = {}
    for rank, load in enumerate(loads):
        size = load.own + sum(size for name, size in load.shared.items() if writers[name] == rank)
        needed[load.machine] = needed.get(load.machine, 0) + size
    return all(_PART * needed[load.machine] <= load.spare for load in loads)


def apart(value: Any) -> Any:
    """A copy that shares nothing with `value`, its tensors in the host's memory."""
    if isinstance(value, (int, float, str)):  # most of all: what a run knows of its views is many numbers
        return value
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, Rows):
        return replace(value, own=apart(value.own))
    if isinstance(value, Mapping):
        return {key: apart(entry) for key, entry in value.items()}
    if type(value) in (list, tuple):
        return type(value)(apart(entry) for entry in value)
    return copy.deepcopy(value)
