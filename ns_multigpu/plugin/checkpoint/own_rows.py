"""Which rows of a saved model this rank goes on with: its placement says so.

As many ranks as wrote it, with the same placement, go on with what they had, and so exactly as they would have. Any
others are dealt the points anew, as at the start, and their order stays.
"""

from collections.abc import Mapping
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
class OwnRows:
    """What this rank reads of a saved model.

    Attributes:
        total: points of the whole model.
        rows: of the file, by place: a range, or [N] int64 on the CPU.
        counts: how many each rank reads.
        places: [N] int64 on the CPU, where they stand in the whole model; None where each rank reads a range of that.
    """

    total: int
    rows: range | Tensor
    counts: list[int]
    places: Tensor | None = None


def own_rows(pipeline: Mapping[str, Any], models: Path | None, placement: Placement | None, world: World) -> OwnRows:
    """The rows that this rank goes on with. Every rank asks together.

    Args:
        pipeline: of a .ckpt, with a marker of shards or with all points.
        models: the folder that the .ckpt lies in.
        placement: says who owns what; None where each process holds all points.

    Raises:
        InputError: see `SavedPoints.of`.
        ValueError: the placement does not deal these points out to these ranks.
    """
    counts, marker = counts_in(pipeline), pipeline.get(SHARDS, {})
    total, written = sum(counts), marker.get("placement")
    points = SavedPoints.of(pipeline, models) if SHARDS in pipeline else None
    places = None if written is None or points is None else points.tensors.rows_of(PLACES, range(total))
    # Which row of the file stands at each place.
    by_place: range | Tensor = range(total) if places is None else torch.sort(places).indices
    if placement is None:
        return OwnRows(total, by_place, [total])
    if len(counts) == world.size and written == placement.kind:
        rows = range(sum(counts[: world.rank]), sum(counts[: world.rank + 1]))
        return OwnRows(total, rows, counts, None if places is None else rows_of(places, rows))

    def positions() -> Tensor:
        return pipeline[POINTS + POSITION] if points is None else points.read([POSITION], by_place)[POSITION]

    shares = checked_shares(placement, placement.shares(total, positions, world.size), total, world.size)
    sizes, mine = [len(share) for share in shares], shares[world.rank]
    if placement.in_ranges and isinstance(by_place, range):
        return OwnRows(total, mine, sizes)
    mine = torch.arange(mine.start, mine.stop) if isinstance(mine, range) else mine.cpu()
    rows = mine if isinstance(by_place, range) else by_place[mine]
    return OwnRows(total, rows, sizes, None if placement.in_ranges else mine)
