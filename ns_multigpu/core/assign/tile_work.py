"""Estimated work of each row of tiles of a view, by which tile ranges are balanced."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ns_multigpu.core.assign.plan import Plan
from ns_multigpu.core.types import Splats, View

EMPTY_TILE = 64
"""Of a step at 3840x2160 on an H200 the loss took 29 ns a tile, drawing forth and back about 0.45 ns an intersection
(benchmarks/results/tile-h200.md)."""


@dataclass
class TileWork:
    """The intersections of splats and tiles, by row of tiles, that each view had when it was seen last.

    It decides who renders what, and with it the rounding of sums: all ranks must hold the same, and a run that is to go
    on bit for bit must keep `counts` in its checkpoints.

    Attributes:
        tile: side of a tile in pixels.
        empty: cost of a tile's pixels in addition to its splats, in intersections.
        counts: by the views' `index`, one number a row of tiles.
    """

    tile: int = 16
    empty: int = EMPTY_TILE
    counts: dict[int, list[int]] = field(default_factory=dict[int, list[int]])

    def rows(self, view: View) -> int:
        """Return the number of tile rows of a view; the last may be cut off by the image's border."""
        return -(-view.height // self.tile)

    def learn(self, views: Sequence[View], counts: Sequence[int]) -> None:
        """Store the counts of `views`: their rows' numbers, one view after the other.

        Raises:
            ValueError: there are more or fewer numbers than rows.
        """
        if len(counts) != sum(self.rows(view) for view in views):
            raise ValueError(f"{len(counts)} counts for {sum(self.rows(view) for view in views)} rows of tiles")
        start = 0
        for view in views:
            self.counts[view.index] = list(counts[start : start + self.rows(view)])
            start += self.rows(view)

    def estimate(self, views: Sequence[View]) -> list[list[int]]:
        """Return the expected work of each row of tiles of each view of a batch, never 0.

        A view that was never seen, or had another height, counts by its area, at the rate of the batch's views that
        were seen. A tile without splats still has pixels to process: it counts as `empty` intersections.
        """
        known = [self.counts.get(view.index, []) for view in views]
        seen = [len(counts) == self.rows(view) for counts, view in zip(known, views, strict=True)]
        both = [(counts, view) for counts, view, s in zip(known, views, seen, strict=True) if s]
        total = sum(sum(counts) + self.empty * self._tiles(view) for counts, view in both)
        area = sum(view.width * view.height for _, view in both)
        work: list[list[int]] = []
        for view, counts, s in zip(views, known, seen, strict=True):
            if s:
                work.append([count + self.empty * self._columns(view) for count in counts])
                continue
            heights = [min(self.tile, view.height - row * self.tile) for row in range(self.rows(view))]
            pixels = [height * view.width for height in heights]
            work.append([max(1, p * total // area) for p in pixels] if area else pixels)
        return work

    def record(self, views: Sequence[View], plan: Plan, table: Sequence[Sequence[int]]) -> None:
        """Store the sums over ranks of what each has counted."""
        self.learn(views, [sum(column) for column in zip(*table, strict=True)])

    def count(self, splats: Splats, views: Sequence[View], plan: Plan | None = None) -> Tensor:
        """Return the intersections of this rank's splats, one number per row of tiles, one view after the other: [sum]
        int64.

        Counts the splats' boxes, which contain their ellipses: an upper bound that is known before rows are exchanged.
        Nothing is read back.
        """
        device = splats.hits.view_ids.device
        with torch.no_grad():
            place = splats.hits.view_ids.long()
            sizes = torch.tensor([[view.width, view.height] for view in views], device=device).reshape(-1, 2)
            means, radii = splats.rows["means2d"], splats.rows["radii"]
            limit = sizes[place]
            first = torch.ceil(means - radii - 0.5).clamp(min=0).minimum(limit).long()
            end = torch.floor(means + radii + 0.5).clamp(min=0).minimum(limit).long()
            hit = (end > first).all(-1) & (radii > 0).all(-1)
            first, last = first // self.tile, (end - 1) // self.tile
            columns = (last[:, 0] - first[:, 0] + 1) * hit
            # Differences: a splat starts to count at its first row and stops behind its last; a spare row ends a view.
            rows = [self.rows(view) for view in views]
            starts = [sum(rows[:v]) + v for v in range(len(rows))]
            base = torch.tensor(starts, dtype=torch.int64, device=device)[place]
            steps = torch.zeros(sum(rows) + len(rows), dtype=torch.int64, device=device)
            zero = torch.zeros_like(columns)
            steps.index_add_(0, torch.where(hit, base + first[:, 1], zero), columns)
            steps.index_add_(0, torch.where(hit, base + last[:, 1] + 1, zero), -columns)
            totals = steps.cumsum(0)
            return torch.cat([totals[:0], *(totals[s : s + n] for s, n in zip(starts, rows, strict=True))])

    def _columns(self, view: View) -> int:
        return -(-view.width // self.tile)

    def _tiles(self, view: View) -> int:
        return self._columns(view) * self.rows(view)
