"""The order (`morton`) of a model that is spread over the ranks, and which rank owns what of it.

Each rank sorts its own points by key; splitters cut the keys into as many ranges as there are ranks; every point
travels, with its moments, to the rank whose range its key is in, and what has arrived is sorted again. Equal keys stay
on one rank, in the order of the ranks they came from and of their rows there: one after the other, the ranks then hold
what a stable sort of the whole model gives.

Splitters are found by bisection in the integers, from sums that all ranks add up: whatever the ranks are, and whether
a rank owns nothing or everything, a splitter is one step away from the work that it should leave to its left.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from ns_multigpu.core.collectives import all_gather_ints, exchange_rows
from ns_multigpu.core.world import World
from ns_multigpu.primitives.morton import CODE_BITS, Grid, census, dealt_codes

_KEY_BITS = CODE_BITS + 2
_CANDIDATES = 63
"""Keys that a round of the bisection tries for each splitter: six bits of it are known after each."""


@dataclass(frozen=True)
class Reordering:
    """What a reordering did and cost; the same on every rank but for `seconds`.

    Attributes:
        seconds: of this rank, waiting for the others included.
        moved: points that went to another rank. bytes_sent: for that, by all ranks together.
        counts_before, counts_after: points by rank, new ones where their parents were and where they are.
        imbalance_before, imbalance_after: the most work of a rank / the mean; 1 is even.
        rebalanced: whether ranges were made anew, of equal work.
    """

    seconds: float
    moved: int
    bytes_sent: int
    counts_before: tuple[int, ...]
    counts_after: tuple[int, ...]
    imbalance_before: float
    imbalance_after: float
    rebalanced: bool

    def __str__(self) -> str:
        ranges = "ranges of equal work" if self.rebalanced else "ranges kept"
        return (
            f"{sum(self.counts_after):,} points in order in {self.seconds:.3f} s: {self.moved:,} changed GPUs "
            f"({self.bytes_sent / 1e6:,.1f} MB), work of the busiest {self.imbalance_before:.3f} -> "
            f"{self.imbalance_after:.3f} of the mean, {ranges}"
        )


@dataclass(frozen=True)
class Move:
    """How this rank's points, sorted by key, travel.

    Attributes:
        send, receive: points to and from each rank.
        order: [sum(receive)] int64, what has arrived, by its place in the end.
        counts_before, counts_after, moved, imbalance_before, imbalance_after, rebalanced: see `Reordering`.
    """

    send: list[int]
    receive: list[int]
    order: Tensor
    counts_before: tuple[int, ...]
    counts_after: tuple[int, ...]
    moved: int
    imbalance_before: float
    imbalance_after: float
    rebalanced: bool

    def record(self, started: float, row_bytes: int) -> Reordering:
        """The record of a reordering that began at `started` and has moved `row_bytes` a point. Waits for the device.

        Args:
            started: `clock`'s.
        """
        return Reordering(
            clock(self.order.device) - started, self.moved, self.moved * row_bytes, self.counts_before,
            self.counts_after, self.imbalance_before, self.imbalance_after, self.rebalanced,
        )  # fmt: skip


def clock(device: torch.device) -> float:
    """Seconds of a clock that is read when the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
    return time.perf_counter()


def common_grid(means: Tensor, world: World) -> Grid:
    """The cells for all ranks' points together; the same on every rank.

    Args:
        means: [N, 3] this rank's positions.
    """
    counts = all_gather_ints(census(means).tolist(), world)
    return Grid.of([sum(column) for column in zip(*counts, strict=True)])


def order_keys(means: Tensor, categories: Tensor, world: World) -> Tensor:
    """By the code of `dealt_codes` for all ranks' points, then by category: 62 bits.

    Args:
        means: [N, 3] positions.
        categories: [N] int64 in [0, 4).

    Returns:
        [N] int64.
    """
    return dealt_codes(means, common_grid(means, world)) * 4 + categories


def plan_move(keys: Tensor, weights: Tensor, world: World, threshold: float) -> Move:
    """Decides which rank will own what, and brings the keys there.

    Where a rank has more than `threshold` times the mean work, the ranges are cut anew into equal work. Otherwise each
    keeps as much work as it has: the splitters are the keys where the work before them is that of the ranks before.
    Points were in order at the last refinement and have moved little since, so that most stay where they are.

    Args:
        keys: [N] int64 in [0, 2^62), ascending.
        weights: [N] int64, work by point; at least 0.
        threshold: at least 1.

    Raises:
        ValueError: the threshold is less than 1.
    """
    if threshold < 1.0:
        raise ValueError(f"a threshold of imbalance is at least 1, not {threshold}: 1 is even")
    sums = torch.nn.functional.pad(weights.cumsum(0), (1, 0))
    table = all_gather_ints([len(keys), int(sums[-1])], world)
    counts, works = [row[0] for row in table], [row[1] for row in table]
    before = imbalance(works)
    rebalanced = before > threshold
    if rebalanced:
        targets = [sum(works) * rank // world.size for rank in range(1, world.size)]
    else:
        targets = list(accumulate(works))[:-1]
    splitters = find_splitters(keys, sums, targets, sum(works), world)
    cuts = torch.searchsorted(keys, torch.tensor(splitters, dtype=torch.int64, device=keys.device))
    places = [0, *cuts.tolist(), len(keys)]
    send = [b - a for a, b in pairwise(places)]
    sent_work = sums[torch.tensor(places, device=keys.device)].diff().tolist()
    table = all_gather_ints([*send, *sent_work], world)
    receive = [row[world.rank] for row in table]
    arrived = exchange_rows(keys, send, receive, world)
    totals = [sum(column) for column in zip(*table, strict=True)]
    return Move(
        send=send,
        receive=receive,
        order=torch.sort(arrived, stable=True).indices,
        counts_before=tuple(counts),
        counts_after=tuple(totals[: world.size]),
        moved=sum(counts) - sum(row[rank] for rank, row in enumerate(table)),
        imbalance_before=before,
        imbalance_after=imbalance(totals[world.size :]),
        rebalanced=rebalanced,
    )


def imbalance(works: Sequence[int]) -> float:
    """The most of them / their mean; 1 if there are none."""
    return max(works) * len(works) / sum(works) if sum(works) > 0 else 1.0


@dataclass
class _Interval:
    """Where a splitter is: `below(low)` <= target and, unless `high` is the end of all keys, < `below(high)`."""

    target: int
    low: int
    high: int
    low_sum: int
    high_sum: int

    def candidates(self) -> list[int]:
        """Ascending keys in (low, high), or `high` itself."""
        return [self.low + max(1, (self.high - self.low) * k // (_CANDIDATES + 1)) for k in range(1, _CANDIDATES + 1)]

    def narrow(self, sums: Sequence[int]) -> None:
        """Keeps the part between two neighbouring candidates, below which is `sums`."""
        for key, below in zip(self.candidates(), sums, strict=True):
            if below > self.target:
                self.high, self.high_sum = key, below
                return
            if key < self.high:
                self.low, self.low_sum = key, below


def find_splitters(keys: Tensor, sums: Tensor, targets: Sequence[int], total: int, world: World) -> list[int]:
    """Keys such that the weight of all ranks' smaller keys is as near to each target as equal keys allow.

    Args:
        keys: [N] int64 in [0, 2^62), ascending.
        sums: [N + 1] int64, the weight before each of them, and of all of them.
        targets: ascending.
        total: the weight of all ranks' keys.

    Returns:
        a key for each target, ascending; the same on every rank.
    """
    intervals = [_Interval(target, 0, 1 << _KEY_BITS, 0, total) for target in targets]
    while any(one.high - one.low > 1 for one in intervals):
        tried = [key for one in intervals for key in one.candidates()]
        below = sums[torch.searchsorted(keys, torch.tensor(tried, device=keys.device))].tolist()
        totals = [sum(column) for column in zip(*all_gather_ints(below, world), strict=True)]
        for k, one in enumerate(intervals):
            one.narrow(totals[k * _CANDIDATES : (k + 1) * _CANDIDATES])
    return [one.low if one.target - one.low_sum <= one.high_sum - one.target else one.high for one in intervals]
