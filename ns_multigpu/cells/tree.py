# torch annotates only part of itself:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
"""Space in convex cells: recursive splits of the largest extent, where the work on both sides is level.

As Splaxel's partition (appendix 8.1), but by work rather than by points, and for any number of cells. The tree is kept:
from a camera's position it gives one order of the cells, front to back, that is right for each ray of the view, so that
nothing has to be sorted by pixel.
"""

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ns_multigpu.core.collectives import max_in_place, sum_in_place
from ns_multigpu.core.world import World

_BINS = 4096
"""Of a histogram of work along an axis. It is taken twice, the second time of one bin of the first."""


@dataclass(frozen=True)
class Split:
    """A plane between two parts of space.

    Attributes:
        axis: 0, 1 or 2. plane: a coordinate on it; what lies on the plane belongs above.
        below, above: the number of the split that cuts that part again; or of its cell, as -1 - cell.
    """

    axis: int
    plane: float
    below: int
    above: int


@dataclass(frozen=True)
class CellTree:
    """Cells of space, numbered so that a part's cells follow one another.

    Attributes:
        splits: the root first, each before those of its parts; none for one cell.
    """

    splits: tuple[Split, ...]

    @property
    def cells(self) -> int:
        """How many there are."""
        return len(self.splits) + 1

    @cached_property
    def _depth(self) -> int:
        def depth(node: int) -> int:
            return 0 if node < 0 else 1 + max(depth(self.splits[node].below), depth(self.splits[node].above))

        return depth(0) if self.splits else 0

    def of(self, positions: Tensor) -> Tensor:
        """The cells [N] int64 of points at these positions [N, 3], wherever they are."""
        device = positions.device
        if not self.splits:
            return torch.zeros(len(positions), dtype=torch.int64, device=device)
        axes = torch.tensor([split.axis for split in self.splits], device=device)
        planes = torch.tensor([split.plane for split in self.splits], dtype=torch.float64, device=device)
        parts = torch.tensor([[split.below, split.above] for split in self.splits], device=device)
        where = torch.zeros(len(positions), dtype=torch.int64, device=device)
        for _ in range(self._depth):
            inside = where.clamp_min(0)
            coordinate = positions.gather(1, axes[inside][:, None])[:, 0].double()
            next_ = parts[inside, (coordinate >= planes[inside]).long()]
            where = torch.where(where < 0, where, next_)
        return -1 - where

    def order(self, position: tuple[float, float, float]) -> tuple[int, ...]:
        """All cells, front to back as seen from `position`, for rays in any direction.

        Of two parts the one that the camera is in comes first: no ray comes back through a plane. Exactly on a plane
        no ray has both sides before it, and the part above comes first.
        """
        if not self.splits:
            return (0,)
        found: list[int] = []
        waiting = [0]
        while waiting:
            node = waiting.pop()
            if node < 0:
                found.append(-1 - node)
                continue
            split = self.splits[node]
            near, far = split.below, split.above
            if not position[split.axis] < split.plane:
                near, far = far, near
            waiting += [far, near]
        return tuple(found)

    def boxes(self) -> Tensor:
        """[cells, 2, 3] float64, the lower and upper corner of each; infinite where a cell has no end."""
        boxes = torch.full((self.cells, 2, 3), math.inf, dtype=torch.float64)
        boxes[:, 0] = -math.inf
        waiting = [(0, boxes[0].clone())] if self.splits else []
        while waiting:
            node, box = waiting.pop()
            if node < 0:
                boxes[-1 - node] = box
                continue
            split = self.splits[node]
            for part, corner in ((split.below, 1), (split.above, 0)):
                inner = box.clone()
                inner[corner, split.axis] = split.plane
                waiting.append((part, inner))
        return boxes

    def tensor(self) -> Tensor:
        """[splits, 4] float64, for a checkpoint: see `from_tensor`."""
        rows = [[split.axis, split.plane, split.below, split.above] for split in self.splits]
        return torch.tensor(rows, dtype=torch.float64).reshape(-1, 4)

    @staticmethod
    def from_tensor(rows: Tensor) -> "CellTree":
        """The tree that `tensor` wrote."""
        return CellTree(tuple(Split(int(a), p, int(b), int(c)) for a, p, b, c in rows.tolist()))

    @staticmethod
    @torch.no_grad()
    def of_work(positions: Tensor, work: Tensor, cells: int, world: World) -> "CellTree":
        """Cells of equal work. Every rank calls it, and gets the same tree, whoever has which points.

        A part that is to be k cells is cut along its largest extent (of its points; the first axis of equal ones) where
        floor(k / 2) of k parts of its work lie below. Positions never leave their rank: what is added up over ranks are
        histograms of integers. Points at one place cannot be parted; the cells below are empty then.

        Args:
            positions: [N, 3] this rank's points. work: [N] int64, at least 0; counted as 1 each where all are 0.
            cells: how many, at least 1.
            world: the ranks that have points; one of one rank where every rank has all of them.

        Raises:
            ValueError: there is to be no cell.
        """
        if cells < 1:
            raise ValueError(f"{cells} cells: at least 1 is needed")
        splits: list[Split] = []

        def cut(rows: Tensor, count: int, first: int) -> int:
            """Cuts the part that these rows are in into cells from `first` on; returns its number, as in `Split`."""
            if count == 1:
                return -1 - first
            node, lower = len(splits), count // 2
            splits.append(Split(0, 0.0, 0, 0))
            where = positions.index_select(0, rows)
            axis, plane = _plane(where, work.index_select(0, rows), lower, count, world)
            beyond = where[:, axis].double() >= plane
            below = cut(rows[~beyond], lower, first)
            above = cut(rows[beyond], count - lower, first + lower)
            splits[node] = Split(axis, plane, below, above)
            return node

        cut(torch.arange(len(positions), device=positions.device), cells, 0)
        return CellTree(tuple(splits))


def _plane(where: Tensor, work: Tensor, lower: int, count: int, world: World) -> tuple[int, float]:
    """The axis along which points [N, 3] of all ranks are cut, and where: `lower` of `count` parts of work below."""
    bounds = where.new_full((6,), -math.inf, dtype=torch.float64)
    if len(where):
        bounds = torch.cat([-where.amin(0), where.amax(0)]).double()
    max_in_place(bounds, world)
    low, high = (-bounds[:3]).tolist(), bounds[3:].tolist()
    extents = [b - a if b >= a else 0.0 for a, b in zip(low, high, strict=True)]
    axis = max(range(3), key=lambda k: (extents[k], -k))
    start, end = low[axis], high[axis]
    if not math.isfinite(start):  # nobody has a point here
        return axis, 0.0
    along = where[:, axis].double()
    before, wanted = 0, 0
    for turn in range(2):
        step = (end - start) / _BINS
        if step <= 0 or start + step == start:
            break
        inside = (along >= start) & (along <= end if turn == 0 else along < end)
        bins = ((along[inside] - start) / step).long().clamp_(0, _BINS - 1)
        sums = torch.zeros(2, _BINS, dtype=torch.int64, device=where.device)
        sums[0].index_add_(0, bins, work[inside])
        sums[1].index_add_(0, bins, torch.ones_like(bins))
        sum_in_place(sums, world)
        if turn == 0:
            weighed = int(int(sums[0].sum()) == 0)  # no work at all: points count
            wanted = -(-int(sums[weighed].sum()) * lower // count)
        upto = before + sums[weighed].cumsum(0)
        bin_ = min(int((upto < wanted).sum()), _BINS - 1)
        before = int(upto[bin_ - 1]) if bin_ else before
        start, end = start + bin_ * step, start + (bin_ + 1) * step
    # The end of the bin in which the work below becomes enough. Where that is the last, nothing would lie above.
    return axis, end if end <= high[axis] else start
