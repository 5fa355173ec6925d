"""Placement of `pixel`: the owner of a point is the rank of the cell that contains its mean (Splaxel, section 4.2,
appendix 8.1)."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ns_multigpu.cells.balancing import loads_of, order_balanced
from ns_multigpu.cells.options import PixelOptions
from ns_multigpu.cells.tree import CellTree
from ns_multigpu.core.assign.placement import NewPoints, Placement, PlacementResult, Shares, even_bounds, shares_of
from ns_multigpu.core.assign.splitters import imbalance
from ns_multigpu.core.dist.collectives import all_gather_rows, max_in_place, sum_in_place
from ns_multigpu.core.dist.world import World
from ns_multigpu.core.exchange.composite import LocalCells
from ns_multigpu.core.schema import POSITION
from ns_multigpu.core.types import FAR, Points, View

LOOKED_EVERY = 100
"""Images after which the cells' boxes are measured again, where no refinement came between."""
_FLAT = 2.0
"""Distance of a cell in which a splat is searched, as a fraction of the splat's extent."""
_WORSE = 1.1
"""Cells are rebuilt when they have become so much less level than they were when they were cut."""


class ByCells(Placement):
    """Placement by cells: each rank owns the points of its cells, in the tree's order. Ranks have equally many cells,
    or one more.

    A point's cell is the one that contains its mean at the start, after each refinement, and when a run resumes with
    other ranks. Between these it does not change, wherever the point moves. Decisions follow from sums over all points.
    So any number of ranks cuts the same cells, and changes them after the same refinements.

    Args:
        world: the ranks. options: see there.

    Raises:
        ValueError: there are to be fewer cells than ranks.

    Attributes:
        cells: how many.
        local: this rank's, and which of them each of its points is in.
        tree: the cells as they were cut last; None before.
        boxes: [cells, 2, 3] float64, all that is seen of each cell's points; None where no bound is known. It is
            measured after each refinement and every 100 images: what grows beyond its box in between is cut off there.
    """

    replicated = False
    in_ranges = False

    def __init__(self, world: World, options: PixelOptions) -> None:
        self.cells = options.cells or world.size
        if self.cells < world.size:
            raise ValueError(
                f"--pipeline.pixel.cells {self.cells}: each of the {world.size} GPUs wants a cell at least. Give "
                f"{world.size} or more, or 0."
            )
        self.crosses = options.crossing == "ghosts"
        self._world, self._imbalance, self._level_steps = world, options.imbalance, options.level_steps
        self._look: Callable[[], Sequence[View]] = lambda: ()
        self._first: NDArray[np.float64] | None = None  # boxes around the means of the first points
        bounds = even_bounds(self.cells, world.size)
        self._rank_of = [r for r in range(world.size) for _ in range(bounds[r], bounds[r + 1])]
        self._ranks = torch.tensor(self._rank_of)
        self.local = LocalCells(bounds[world.rank], bounds[world.rank + 1] - bounds[world.rank])
        self.tree: CellTree | None = None
        self.boxes: NDArray[np.float64] | None = None
        self._level, self._placings, self._learned = 1.0, 0, False
        self._saved: Tensor | None = None  # the cells of points that are about to be read
        self._stale = True  # points have moved to their cells since these were measured
        self._moved, self._looked = True, 0  # or since training went on; images at which it measured

    def look(self, views: Callable[[], Sequence[View]], far: float = FAR) -> None:
        self._look = views

    def arranged(self, size: int) -> Callable[[list[int], int], list[int]] | None:
        """Return a function that balances the loads of the first cells: those of the points that every run begins
        with."""
        views = self._look()
        if not self._level_steps or size < 2 or self.cells < 2 or self._first is None or not views:
            return None
        loads = loads_of(self._first, views)
        return lambda order, begins: order_balanced(order, loads, size, -begins % size)

    @property
    def kind(self) -> str:
        """Name of the placement, with the number of cells."""
        return f"ByCells {self.cells}"

    @property
    def placings(self) -> int:
        return self._placings

    def rank_of(self, cell: int) -> int:
        """Return the rank that owns a cell."""
        return self._rank_of[cell]

    def shares(self, count: int, positions: Callable[[], Tensor], ranks: int) -> Shares:
        """See `Placement.shares`. Cells are cut for level points, unless there are those of a run that goes on.

        Raises:
            ValueError: other ranks are asked about than those of the world.
        """
        if ranks != self._world.size:
            raise ValueError(f"points are placed on the {self._world.size} ranks of this run, not on {ranks}")
        where = positions().detach()
        if self._learned:
            self._stale, self._moved, self._saved = True, True, None
            assert self.tree is not None
            return shares_of(self._owners(self.tree.of(where)), ranks)
        ones = torch.ones(len(where), dtype=torch.int64, device=where.device)
        cells = self._cut(where, ones, replace(self._world, group=None))
        if self._first is None:
            self._first = _boxes_around(where, cells, self.cells)
        return shares_of(self._owners(cells), ranks)

    def place(self, new: NewPoints, world: World) -> PlacementResult:
        """Place each point by the cell that contains it. Rebuild the cells if the work of one is too much."""
        where = new.positions().detach()
        cells, redistributed = self._cells_of(where), False
        if cells is None or self._imbalance_of(cells, new.work, world) > max(self._imbalance, _WORSE * self._level):
            cells, redistributed = self._cut(where, new.work, world), True
        self._stale = self._moved = True
        return PlacementResult(self._owners(cells), redistributed)

    def moved(self, positions: Tensor) -> None:
        if self.local.count > 1:
            assert self.tree is not None, "who says whose points are has cut cells"
            cells = self._saved
            self.local.put(self.tree.of(positions) - self.local.first if cells is None else cells.to(positions.device))
        self._saved = None

    def observe(self, points: Points, extents: Callable[[], Tensor | None], images: int | None, world: World) -> None:
        if self.tree is None:
            return
        trained = images is not None
        due = trained and not self._moved and images >= self._looked + LOOKED_EVERY
        if self._stale or due:
            with torch.no_grad():
                means = points.params[POSITION].detach()
                self.boxes = self._measured(means, extents(), world)
            self._stale = False
        if trained and (self._moved or due):
            self._moved, self._looked = False, images

    def state(self) -> dict[str, Tensor]:
        if self.tree is None:
            return {}
        known = {
            "splits": self.tree.tensor(), "level": torch.tensor([self._level], dtype=torch.float64),
            "looked": torch.tensor([self._looked, int(self._moved), int(self._stale)]),
        }  # fmt: skip
        if self.boxes is not None:
            known["boxes"] = torch.from_numpy(self.boxes.copy())
        if self.cells > self._world.size:
            mine = self.local.of_points
            mine = torch.empty(0, dtype=torch.int32, device=self._world.device) if mine is None else mine
            everyone, counts = all_gather_rows(mine, self._world)
            known |= {"cells": everyone.cpu(), "counts": torch.tensor(counts)}
        return known

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        if "splits" not in state:
            return
        known = {name: value.cpu() for name, value in state.items()}
        self.tree, self._level, self._learned = CellTree.from_tensor(known["splits"]), float(known["level"]), True
        self.boxes = known["boxes"].numpy() if "boxes" in known else None
        self._looked, self._moved, self._stale = (int(n) for n in known["looked"])
        if "cells" in known and self.local.count > 1 and len(known["counts"]) == self._world.size:
            self._saved = known["cells"].split(known["counts"].tolist())[self._world.rank]

    def _owners(self, cells: Tensor) -> Tensor:
        return self._ranks.to(cells.device)[cells]

    def _cells_of(self, where: Tensor) -> Tensor | None:
        """Return the cells [N] of positions [N, 3], or None before cells exist."""
        return None if self.tree is None else self.tree.of(where)

    def _imbalance_of(self, cells: Tensor, work: Tensor, world: World) -> float:
        """Return the largest work of a cell divided by the mean. `cells` [N] are those of this rank's points."""
        sums = torch.zeros(self.cells, dtype=torch.int64, device=cells.device)
        sums.index_add_(0, cells, work)
        sum_in_place(sums, world)
        return imbalance(sums.tolist())

    def _cut(self, where: Tensor, work: Tensor, world: World) -> Tensor:
        """Rebuild cells. Return those of the points.

        Args:
            world: the ranks that have these points, or no group where each has all.
        """
        self.tree = CellTree.of_work(where, work, self.cells, world)
        cells = self.tree.of(where)
        self._level = self._imbalance_of(cells, work, world)
        self._placings += 1
        self._stale = self._moved = True
        return cells

    def _measured(self, means: Tensor, extents: Tensor | None, world: World) -> NDArray[np.float64] | None:
        """Return the boxes of all ranks' cells, or None without extents. See `_boxes_around`."""
        if extents is None:
            return None
        tree = self.tree if self.crosses else None
        return _boxes_around(means, self.local.of_points, self.cells, extents, world, tree, first=self.local.first)


def _boxes_around(
    means: Tensor, of_points: Tensor | None, cells: int, extents: Tensor | None = None, world: World | None = None,
    tree: CellTree | None = None, first: int = 0,
) -> NDArray[np.float64]:  # fmt: skip
    """Return the boxes [cells, 2, 3] of all cells, around the points of all ranks of `world`.

    A cell without points has a box whose lower corner is above its upper.

    Args:
        means: [N, 3] positions. extents: [N, 3] half extents, or None to bound positions alone.
        of_points: [N] cell of each point, counted from `first`; None if all points are in cell `first`.
        tree: if given, boxes also contain points of other cells that overlap the cell.
    """
    bounds = torch.full((cells, 6), -math.inf, dtype=means.dtype, device=means.device)
    low, high = (means, means) if extents is None else (means - extents, means + extents)
    reached = torch.cat([-low, high], 1)
    if of_points is None:
        bounds[first] = reached.amax(0) if len(means) else -math.inf
    else:
        bounds.scatter_reduce_(0, (of_points.long() + first)[:, None].expand(-1, 6), reached, "amax")
    if tree is not None and extents is not None and len(means):
        # A splat that is drawn flat may stick out of its ellipsoid's box, in a wide view by about as much again.
        far = _FLAT * extents.norm(dim=1, keepdim=True)
        for cell, (lower, upper) in enumerate(tree.boxes().to(means).unbind(0)):
            crosses = ((means + far >= lower) & (means - far <= upper)).all(1, keepdim=True)
            bounds[cell] = torch.maximum(bounds[cell], reached.masked_fill(~crosses, -math.inf).amax(0))
    bounds = bounds.double()
    if world is not None:
        max_in_place(bounds, world)
    boxes = bounds.view(cells, 2, 3).cpu()
    boxes[:, 0] *= -1
    return boxes.numpy()
