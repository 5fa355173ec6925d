"""Stable sort of (key, value) pairs that are distributed over ranks, by merge paths.

Each rank sorts its own pairs. Then sorted runs are merged two by two, in log2 N levels. A merge is a path through the
grid of two runs' elements. Its intersection with diagonal k shows how many of the first k merged elements each run has
(Green, Odeh and Birk 2014, "Merge Path", section 3; over GPUs: torch-dgx, section 4). Each rank finds the ends of its
part of the merged run by binary search, then reads and merges only that part. No rank ever holds more than its part.

Where torch-dgx reads a peer's memory, ranks here send the elements. This variant runs on any backend.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from ns_multigpu.core.dist.collectives import all_gather_ints, exchange_rows
from ns_multigpu.core.dist.world import World


@dataclass(frozen=True)
class SortedRun:
    """A sorted run: consecutive ranks hold its consecutive pieces.

    Attributes:
        first: the first of the ranks.
        counts: how many elements each of them holds; none is fine.
    """

    first: int
    counts: tuple[int, ...]

    @property
    def end(self) -> int:
        """One more than the last of the ranks."""
        return self.first + len(self.counts)

    @property
    def length(self) -> int:
        """Elements."""
        return sum(self.counts)

    def find(self, position: int) -> tuple[int, int]:
        """Return the rank that holds the element at `position`, and the element's position on that rank."""
        for rank, count in enumerate(self.counts, self.first):
            if position < count:
                return rank, position
            position -= count
        raise IndexError(f"a run of {self.length} has no element {position + self.length}")

    def piece(self, rank: int, first: int, end: int) -> tuple[int, int]:
        """Return the part of [first, end) of the run that is on `rank`, counted from that rank's first element."""
        if not self.first <= rank < self.end:
            return (0, 0)
        count = self.counts[rank - self.first]
        start = sum(self.counts[: rank - self.first])
        lo, hi = (min(max(position - start, 0), count) for position in (first, end))
        return (lo, hi)


@dataclass(frozen=True)
class Merge:
    """Two neighbouring runs and the one that they become, on the same ranks, in equal pieces."""

    left: SortedRun
    right: SortedRun

    @property
    def result(self) -> SortedRun:
        """Result of the merge."""
        length, ranks = self.left.length + self.right.length, self.right.end - self.left.first
        bounds = [rank * length // ranks for rank in range(ranks + 1)]
        return SortedRun(self.left.first, tuple(b - a for a, b in pairwise(bounds)))


def merge_levels(counts: Sequence[int]) -> list[list[Merge]]:
    """Return each level's merges for ranks that start with `counts` elements. A run without a partner waits a level."""
    runs = [SortedRun(rank, (count,)) for rank, count in enumerate(counts)]
    levels: list[list[Merge]] = []
    while len(runs) > 1:
        merges = [Merge(runs[k], runs[k + 1]) for k in range(0, len(runs) - 1, 2)]
        runs = [merge.result for merge in merges] + runs[len(runs) - len(runs) % 2 :]
        levels.append(merges)
    return levels


def merge_sort(keys: Tensor, values: Tensor, world: World) -> tuple[Tensor, Tensor]:
    """Sort all ranks' pairs by key. Stable: equal keys stay in the order of their ranks, then of their rows.

    Every rank calls it. It reads keys back to the host, two at each step of a search.

    Args:
        keys: [M] of an integer type, M differing by rank; floats that sort like integers come as their bits.
        values: [M, ...].
        world: the ranks.

    Returns:
        this rank's part of the sorted keys and values: with more than one rank, parts differ by one element at most.

    Raises:
        TypeError: the keys are not integers.
        ValueError: the shapes do not fit.
    """
    if keys.is_floating_point() or keys.is_complex() or keys.dtype == torch.bool:
        raise TypeError(f"merge_sort: keys must be integers, not {keys.dtype}")
    if keys.dim() != 1 or values.dim() < 1 or len(values) != len(keys):
        raise ValueError(f"merge_sort: keys {list(keys.shape)} and values {list(values.shape)} are no pairs")
    keys, order = torch.sort(keys, stable=True)
    values = values[order]
    counts = [row[0] for row in all_gather_ints([len(keys)], world)]
    for merges in merge_levels(counts):
        starts = _search(keys, merges, world)
        keys, values = _merge(keys, values, merges, starts, world)
    return keys, values


@dataclass
class _Diagonal:
    """The search for how many of the first `at` merged elements are of the left run: in [lo, hi]."""

    merge: Merge
    at: int
    lo: int
    hi: int

    @property
    def open(self) -> bool:
        """True if it is still searched."""
        return self.lo < self.hi

    def reads(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Return (rank, position) of the two keys that the next step compares."""
        middle = (self.lo + self.hi) // 2
        return self.merge.left.find(middle), self.merge.right.find(self.at - 1 - middle)

    def step(self, left: int, right: int) -> None:
        """Narrow the search by the keys that `reads` named. The left run's equal keys come first: a stable sort."""
        middle = (self.lo + self.hi) // 2
        if left <= right:
            self.lo = middle + 1
        else:
            self.hi = middle


def _search(keys: Tensor, merges: Sequence[Merge], world: World) -> list[list[int]]:
    """Return for each merge, and each rank's part of its result, how many elements of the left run come before it.

    All searches of a level advance together. Every rank follows all of them and publishes the keys that it holds.
    """
    searches: list[list[_Diagonal]] = []
    for merge in merges:
        diagonals = accumulate(merge.result.counts[:-1], initial=0)
        left, right = merge.left.length, merge.right.length
        searches.append([_Diagonal(merge, at, max(0, at - right), min(at, left)) for at in diagonals])
    everything = [one for group in searches for one in group]
    while any(one.open for one in everything):
        active = [one for one in everything if one.open]
        reads = [read for one in active for read in one.reads()]
        gathered = all_gather_ints([int(keys[at]) if rank == world.rank else 0 for rank, at in reads], world)
        read_keys = [gathered[rank][k] for k, (rank, _) in enumerate(reads)]
        for k, one in enumerate(active):
            one.step(read_keys[2 * k], read_keys[2 * k + 1])
    return [[one.lo for one in group] for group in searches]


def _merge(
    keys: Tensor, values: Tensor, merges: Sequence[Merge], starts: Sequence[Sequence[int]], world: World
) -> tuple[Tensor, Tensor]:
    """Send each rank the ranges of the two runs that make its part of the result, and merge them."""
    # By rank: of which runs it gets which ranges. A rank whose run waits for a partner keeps what it has.
    parts: dict[int, list[tuple[SortedRun, int, int]]] = {}
    for merge, lefts in zip(merges, starts, strict=True):
        bounds = list(accumulate(merge.result.counts, initial=0))
        cuts = [*lefts, merge.left.length]
        for k, rank in enumerate(range(merge.result.first, merge.result.end)):
            parts[rank] = [
                (merge.left, cuts[k], cuts[k + 1]),
                (merge.right, bounds[k] - cuts[k], bounds[k + 1] - cuts[k + 1]),
            ]

    def ranges(source: int, reader: int) -> list[tuple[int, int]]:
        """Return the parts that `source` sends to `reader`, left run first; it holds a part of only one of the two."""
        if reader not in parts:
            return [(0, len(keys))] if source == reader == world.rank else []
        return [run.piece(source, first, end) for run, first, end in parts[reader]]

    out = [piece for reader in range(world.size) for piece in ranges(world.rank, reader)]
    rows = torch.cat([torch.arange(lo, hi, device=keys.device) for lo, hi in out])
    send = [sum(hi - lo for lo, hi in ranges(world.rank, reader)) for reader in range(world.size)]
    receive = [sum(hi - lo for lo, hi in ranges(source, world.rank)) for source in range(world.size)]
    keys, values = (exchange_rows(x[rows], send, receive, world) for x in (keys, values))
    if world.rank not in parts:
        return keys, values
    (_, first, end), _ = parts[world.rank]  # the left run's ranks come first, so its part is received first
    return merge_runs(keys, values, end - first)


def merge_runs(keys: Tensor, values: Tensor, left: int) -> tuple[Tensor, Tensor]:
    """Merge the sorted first `left` pairs with the sorted rest, stably; every element finds its place by itself."""
    a, b = keys[:left].contiguous(), keys[left:].contiguous()
    place = torch.cat(
        [
            torch.arange(len(a), device=keys.device) + torch.searchsorted(b, a),
            torch.arange(len(b), device=keys.device) + torch.searchsorted(a, b, right=True),
        ]
    )
    merged_keys, merged_values = torch.empty_like(keys), torch.empty_like(values)
    merged_keys[place], merged_values[place] = keys, values
    return merged_keys, merged_values
