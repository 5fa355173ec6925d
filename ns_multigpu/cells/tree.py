"""Tree of convex cells: recursive splits of space along the largest extent, with equal work on both sides.

Splaxel's partition (appendix 8.1), but by work instead of points, and for any number of cells. From a camera's position
the tree gives one order of the cells, front to back, that is right for every ray of the view. Pixels need no sorting.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ns_multigpu.core.dist.collectives import max_in_place, sum_in_place
from ns_multigpu.core.dist.world import World

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
        """Number of cells."""
        return len(self.splits) + 1

    @cached_property
    def _depth(self) -> int:
        def depth(node: int) -> int:
            return 0 if node < 0 else 1 + max(depth(self.splits[node].below), depth(self.splits[node].above))

        return depth(0) if self.splits else 0

    def of(self, positions: Tensor) -> Tensor:
        """Return the cells [N] int64 that contain positions [N, 3]."""
        device = positions.device
        if not self.splits:
            return torch.zeros(len(positions), dtype=torch.int64, device=device)
        root = self.splits[0]
        where = torch.where(positions[:, root.axis].double() >= root.plane, root.above, root.below)
        if self._depth == 1:
            return -1 - where
        axes = torch.tensor([split.axis for split in self.splits], device=device)
        planes = torch.tensor([split.plane for split in self.splits], dtype=torch.float64, device=device)
        parts = torch.tensor([[split.below, split.above] for split in self.splits], device=device)
        for _ in range(self._depth - 1):
            inside = where.clamp_min(0)
            coordinate = positions.gather(1, axes[inside][:, None])[:, 0].double()
            next_ = parts[inside, (coordinate >= planes[inside]).long()]
            where = torch.where(where < 0, where, next_)
        return -1 - where

    def order(self, position: tuple[float, float, float]) -> tuple[int, ...]:
        """Return all cells front to back as seen from `position`, for rays in any direction.

        Of two parts the one that contains the camera comes first: no ray crosses a plane twice. If the camera is
        exactly on a plane, no ray passes through both parts, and the part above comes first.
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
        """Return the lower and upper corner of each cell, [cells, 2, 3] float64; infinite where a cell is unbounded."""
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
        """Return the splits as [splits, 4] float64, for a checkpoint: see `from_tensor`."""
        rows = [[split.axis, split.plane, split.below, split.above] for split in self.splits]
        return torch.tensor(rows, dtype=torch.float64).reshape(-1, 4)

    @staticmethod
    def from_tensor(rows: Tensor) -> "CellTree":
        """Return the tree that `tensor` described."""
        return CellTree(tuple(Split(int(a), p, int(b), int(c)) for a, p, b, c in rows.tolist()))

    @staticmethod
    @torch.no_grad()
    def of_work(positions: Tensor, work: Tensor, cells: int, world: World) -> "CellTree":
        """Return cells of equal work. Every rank calls it and gets the same tree, whatever the placement.

        Cuts a part of k cells along the largest extent of its points (the first axis of equal ones), where floor(k / 2)
        of k parts of its work lie below. Ranks exchange histograms of integers, never positions. Points at one place
        cannot be separated; the cells below are then empty.

        Args:
            positions: [N, 3] this rank's points. work: [N] int64, at least 0; counted as 1 each where all are 0.
            cells: how many, at least 1.
            world: the ranks that have points; one of one rank where every rank has all of them.

        Raises:
            ValueError: there is to be no cell.
        """
        if cells < 1:
            raise ValueError(f"{cells} cells: at least 1 is needed")
        planes: dict[tuple[int, int], tuple[int, float]] = {}  # of parts, by their number of cells and first cell
        parts = [(cells, 0)] if cells > 1 else []
        at: Tensor | None = None  # the part that each point is in, negative for none; None for all in the first
        while parts:
            found = _planes(positions, work, at, [count for count, _ in parts], world)
            planes |= zip(parts, found, strict=True)
            parts_after = [half for part in parts for half in _split(*part)]
            parts = [half for half in parts_after if half[0] > 1]
            if not parts:
                break
            # Who is in a part that is one cell now is in none that is cut.
            next_ = torch.tensor(
                [parts.index(half) if half in parts else -1 for half in parts_after], device=work.device
            )
            below = torch.tensor([plane for _, plane in found], dtype=torch.float64, device=work.device)
            axes = torch.tensor([axis for axis, _ in found], device=work.device)
            at = torch.zeros_like(work) if at is None else at
            inside = at.clamp_min(0)
            beyond = _along(positions, axes, inside) >= below[inside]
            at = torch.where(at < 0, at, next_[2 * inside + beyond])
        return CellTree(_in_order(planes, cells))


def _split(count: int, first: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return (count, first cell) of the two parts of a part of `count` cells that begins with cell `first`."""
    lower = count // 2
    return (lower, first), (count - lower, first + lower)


def _in_order(planes: dict[tuple[int, int], tuple[int, float]], cells: int) -> tuple[Split, ...]:
    """Return the splits of these parts, each before those of its own parts."""
    splits: list[Split] = []

    def put(part: tuple[int, int]) -> int:
        if part[0] == 1:
            return -1 - part[1]
        node = len(splits)
        splits.append(Split(0, 0.0, 0, 0))
        below, above = (put(half) for half in _split(*part))
        splits[node] = Split(*planes[part], below, above)
        return node

    put((cells, 0))
    return tuple(splits)


def _along(positions: Tensor, axes: Tensor, at: Tensor) -> Tensor:
    """Return [N] float64, each position's coordinate along the axis (of `axes` [P]) of its part `at` [N]."""
    if len(axes) == 1:
        return positions[:, int(axes)].double()
    return positions.gather(1, axes[at][:, None])[:, 0].double()


def _planes(
    positions: Tensor, work: Tensor, at: Tensor | None, counts: Sequence[int], world: World
) -> list[tuple[int, float]]:
    """Return the axis and plane that cut each part. Points are those of all ranks.

    Of a part of `count` cells, floor(count / 2) of count parts of the work lie below the plane.

    Args:
        positions: [N, 3]. work: [N] int64. at: [N] int64 the part that each is in, negative for none; None for all in
            the only one.
        counts: of the P parts, above 1.
    """
    size, device = len(counts), positions.device
    if at is None:
        at = torch.zeros_like(work)
    else:
        within = (at >= 0).nonzero().flatten()
        positions, work, at = (
            positions.index_select(0, within),
            work.index_select(0, within),
            at.index_select(0, within),
        )
    bounds = positions.new_full((size, 6), -math.inf)
    reached = torch.cat([-positions, positions], 1)
    if size > 1:
        bounds.scatter_reduce_(0, at[:, None].expand(-1, 6), reached, "amax")
    elif len(positions):
        bounds[0] = reached.amax(0)
    bounds = bounds.double()
    max_in_place(bounds, world)
    axes: list[int] = []
    highs: list[float] = []
    ranges: list[tuple[float, float]] = []
    for row in bounds.tolist():
        low, high = [-b for b in row[:3]], row[3:]
        extents = [b - a if b >= a else 0.0 for a, b in zip(low, high, strict=True)]
        axis = max(range(3), key=lambda k: (extents[k], -k))
        axes.append(axis)
        highs.append(high[axis])
        # Without points there is nothing to search.
        ranges.append((low[axis], high[axis]) if math.isfinite(low[axis]) else (0.0, 0.0))
    along = _along(positions, torch.tensor(axes, device=device), at)
    goal = _Goal(torch.tensor(counts, device=device))
    for turn in range(2):
        steps = [(end - start) / _BINS for start, end in ranges]
        looks = [step > 0 and start + step != start for step, (start, _) in zip(steps, ranges, strict=True)]
        if not any(looks):
            break
        numbers = [
            [float(look), start, end, step] for look, step, (start, end) in zip(looks, steps, ranges, strict=True)
        ]
        table = torch.tensor(numbers, dtype=torch.float64, device=device)
        look, start, end, step = table[0] if size == 1 else table[at].unbind(1)
        inside = (look > 0) & (along >= start) & (along <= end if turn == 0 else along < end)
        # Those outside go into a bin beyond all.
        bins = ((along - start) / step).long().clamp_(0, _BINS - 1) + at * _BINS
        bins = torch.where(inside, bins, size * _BINS)
        sums = torch.zeros(2, size * _BINS + 1, dtype=torch.int64, device=device)
        sums[0].index_add_(0, bins, work)
        sums[1].index_add_(0, bins, torch.ones_like(bins))
        sum_in_place(sums, world)
        found = goal.bins(sums[:, :-1].view(2, size, _BINS))
        ranges = [
            (start + bin_ * step, start + (bin_ + 1) * step) if look else (start, end)
            for look, step, bin_, (start, end) in zip(looks, steps, found, ranges, strict=True)
        ]
    # The end of the bin in which the work below becomes enough. Where that is the last, nothing would lie above.
    return [
        (axis, 0.0 if high == -math.inf else end if end <= high else start)
        for axis, high, (start, end) in zip(axes, highs, ranges, strict=True)
    ]


class _Goal:
    """Target work below the planes of parts that are to have `counts` [P] cells."""

    def __init__(self, counts: Tensor) -> None:
        self._counts = counts
        self._before, self._wanted = torch.zeros_like(counts), torch.zeros_like(counts)
        self._by_points, self._begun = counts < 0, False

    def bins(self, sums: Tensor) -> list[int]:
        """Return the bin of each part in which the cumulative work becomes enough.

        `sums` [2, P, bins] are of work and of points. The sums of the next call are of these bins.
        """
        if not self._begun:
            self._by_points, self._begun = sums[0].sum(1) == 0, True  # no work at all: points count
            totals = torch.where(self._by_points, sums[1].sum(1), sums[0].sum(1))
            self._wanted = -torch.div(-totals * (self._counts // 2), self._counts, rounding_mode="floor")
        upto = self._before[:, None] + torch.where(self._by_points[:, None], sums[1], sums[0]).cumsum(1)
        found = (upto < self._wanted[:, None]).sum(1).clamp_(max=sums.shape[2] - 1)
        last = upto.gather(1, (found - 1).clamp_min(0)[:, None])[:, 0]
        self._before = torch.where(found > 0, last, self._before)
        return [int(bin_) for bin_ in found.tolist()]
