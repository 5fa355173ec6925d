"""Rows of a saved model that this rank loads, according to its placement.

With the same number of ranks and the same placement, each rank loads the rows it wrote, and training continues exactly.
Otherwise points are distributed as at the start, in their order.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ns_multigpu.core.assign.placement import Placement, checked_shares, rows_of
from ns_multigpu.core.dist.world import World
from ns_multigpu.core.schema import POSITION
from ns_multigpu.plugin.checkpoint.sharded_state import PLACES, POINTS, SavedPoints, counts_in
from ns_multigpu.plugin.checkpoint.verify import SHARDS


@dataclass(frozen=True)
class SavedRows:
    """Rows that this rank reads of a saved model.

    Attributes:
        total: points of the full model.
        rows: rows of the file, by place: a range, or [N] int64 on the CPU.
        counts: number of rows that each rank reads.
        places: [N] int64 on the CPU, their places in the full model; None if each rank reads a range of it.
    """

    total: int
    rows: range | Tensor
    counts: list[int]
    places: Tensor | None = None


def own_rows(pipeline: Mapping[str, Any], models: Path | None, placement: Placement | None, world: World) -> SavedRows:
    """Return the rows that this rank loads. Every rank calls it.

    Args:
        pipeline: of a .ckpt, with a marker of shards or with all points.
        models: the folder of the .ckpt.
        placement: assigns points to ranks; None if each process holds all points.

    Raises:
        InputError: see `SavedPoints.of`.
        ValueError: the placement cannot distribute these points over these ranks.
    """
    counts, marker = counts_in(pipeline), pipeline.get(SHARDS, {})
    total, written = sum(counts), marker.get("placement")
    points = SavedPoints.of(pipeline, models) if SHARDS in pipeline else None
    places = None if written is None or points is None else points.tensors.rows_of(PLACES, range(total))
    # Row of the file at each place.
    by_place: range | Tensor = range(total) if places is None else torch.sort(places).indices
    if placement is None:
        return SavedRows(total, by_place, [total])
    if len(counts) == world.size and written == placement.kind:
        rows = range(sum(counts[: world.rank]), sum(counts[: world.rank + 1]))
        return SavedRows(total, rows, counts, None if places is None else rows_of(places, rows))

    def positions() -> Tensor:
        return pipeline[POINTS + POSITION] if points is None else points.read([POSITION], by_place)[POSITION]

    return rows_at_start(by_place, positions, placement, world)


def rows_at_start(
    by_place: range | Tensor, positions: Callable[[], Tensor], placement: Placement, world: World
) -> SavedRows:
    """Return the rows that a placement assigns to this rank, as at the start of a run. Every rank calls it.

    Args:
        by_place: [N] int64 on the CPU, or a range: row of the file at each place.
        positions: returns [N, 3] positions by place, on demand.

    Raises:
        ValueError: the placement cannot distribute these points over these ranks.
    """
    total = len(by_place)
    shares = checked_shares(placement, placement.shares(total, positions, world.size), total, world.size)
    sizes, mine = [len(share) for share in shares], shares[world.rank]
    if placement.in_ranges and isinstance(by_place, range):
        return SavedRows(total, mine, sizes)
    mine = torch.arange(mine.start, mine.stop) if isinstance(mine, range) else mine.cpu()
    rows = mine if isinstance(by_place, range) else by_place[mine]
    return SavedRows(total, rows, sizes, None if placement.in_ranges else mine)
