# torch annotates only part of itself:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
"""Keys that cut rows that are spread over the ranks, each rank's sorted by key, into ranges of wanted weights.

Splitters are found by bisection in the integers, from sums that all ranks add up: whatever the ranks are, and whether
a rank owns nothing or everything, a splitter is one step away from the work that it should leave to its left.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ns_multigpu.core.collectives import sum_ints_on_device
from ns_multigpu.core.world import World

KEY_BITS = 62
"""Keys are in [0, 2^62): sums and differences of them stay inside an int64."""
_CANDIDATES = 63
"""Keys that a round of the bisection tries for each splitter: six bits of it are known after each."""


def imbalance(works: Sequence[int]) -> float:
    """The most of them / their mean; 1 if there are none."""
    return max(works) * len(works) / sum(works) if sum(works) > 0 else 1.0


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
    intervals = [_Interval(target, 0, 1 << KEY_BITS, 0, total) for target in targets]
    while any(one.high - one.low > 1 for one in intervals):
        tried = [key for one in intervals for key in one.candidates()]
        totals = sum_ints_on_device(sums[torch.searchsorted(keys, torch.tensor(tried, device=keys.device))], world)
        for k, one in enumerate(intervals):
            one.narrow(totals[k * _CANDIDATES : (k + 1) * _CANDIDATES])
    return [one.low if one.target - one.low_sum <= one.high_sum - one.target else one.high for one in intervals]


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
