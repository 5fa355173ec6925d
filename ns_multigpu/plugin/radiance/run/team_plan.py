"""Number of processes that render a radiance field: each has its own cells, so at most as many as cells."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ns_multigpu.plugin.faults.errors import InputError
from ns_multigpu.plugin.radiance.run.saved import MODEL, SavedField, cells_folder
from ns_multigpu.plugin.render.team import RENDER_MEMORY, RENDER_RANKS, Devices, TeamPlan
from ns_multigpu.radiance.exchange import cells_of


def plan_for_field(state: Mapping[str, Any], checkpoint: Path, devices: Devices) -> TeamPlan:
    """Plan the rendering of a field; see `team.begin`.

    Raises:
        InputError: it is of another method, or does not fit the devices.
    """
    saved = SavedField.from_state(state)
    shared = sum(value.nbytes for value in saved.shared.values())
    ranks = ranks_for(_cell_bytes(state, saved.partition.cells, checkpoint), shared, devices)
    if saved.spread == "ddp":
        return TeamPlan(
            ranks, f"One field on {devices.named(ranks)}: each holds all of it, and takes its share of rays."
        )
    held = [_named(cells_of(rank, saved.partition.cells, ranks)) for rank in range(ranks)]
    return TeamPlan(ranks, f"{saved.partition.cells} cells on {devices.named(ranks)}: {'; '.join(held)}.")


def ranks_for(cells: Sequence[int], shared: int, devices: Devices) -> int:
    """Return the number of processes for a field: all GPUs that can have a cell; one on CPUs unless more are requested.

    Args:
        cells: bytes of each cell. shared: bytes that every process needs. devices: the available ones.

    Raises:
        InputError: the field does not fit the devices.
    """
    count, memory = len(cells), devices.memory

    def most_held(ranks: int) -> int:
        """Return the largest number of bytes of one of so many processes."""
        return shared + max(sum(cells[cell] for cell in cells_of(rank, count, ranks)) for rank in range(ranks))

    wanted = devices.asked or (devices.count if devices.kind == "cuda" else 1)
    ranks = devices.limited(min(wanted, count))
    if memory is not None and most_held(ranks) > memory:
        least = next((more for more in range(ranks, count + 1) if most_held(more) <= memory), None)
        remedy = (
            f"{least} are needed. Take more: {RENDER_RANKS}; CUDA_VISIBLE_DEVICES may hide some."
            if least is not None
            else "more would not, either. Take larger ones, or train with more cells (--pipeline.model.cells)."
        )
        raise InputError(
            f"The field takes {(shared + sum(cells)) / 1e9:.3g} GB, and {devices.named(ranks)} of which each may hold "
            f"{memory / 1e9:.3g} GB cannot hold its {count} cells: {remedy} {RENDER_MEMORY} says how much of a "
            "device's memory may be taken."
        )
    return ranks


def _cell_bytes(state: Mapping[str, Any], cells: int, checkpoint: Path) -> list[int]:
    """Return the bytes of each cell's parameters."""
    from ns_multigpu.plugin.checkpoint.saved_tensors import SavedTensors

    tensors, sizes = SavedTensors(cells_folder(state, checkpoint.parent)), [0] * cells
    for name in tensors.names:
        if name.startswith(f"{MODEL}cells."):
            sizes[int(name.split(".")[1])] += math.prod(tensors.shape(name)) * tensors.dtype(name).itemsize
    return sizes


def _named(cells: range) -> str:
    return f"cell {cells[0]}" if len(cells) == 1 else f"cells {cells[0]} to {cells[-1]}"
