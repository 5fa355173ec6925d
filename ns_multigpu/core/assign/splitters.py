"""Splitter keys that cut distributed rows, sorted by key on each rank, into ranges of wanted weights.

Splitters are found digit by digit in the integers, from sums over all ranks. The result does not depend on how rows are
distributed, even if one rank has none or all of them. Equal keys are on one side of a splitter.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ns_multigpu.core.dist.collectives import add_up, on_device
from ns_multigpu.core.dist.world import World

KEY_BITS = 62
"""Keys are in [0, 2^62): sums and differences of them stay inside an int64."""
_DIGITS = (11, 11, 10, 10, 10, 10)
"""Bits of a splitter that are found at once, the highest first. Each digit is a meeting of the ranks."""


def imbalance(works: Sequence[int]) -> float:
    """Return the largest work divided by the mean; 1 if there is no work."""
    return max(works) * len(works) / sum(works) if sum(works) > 0 else 1.0


def find_splitters(keys: Tensor, sums: Tensor, targets: Sequence[int], world: World) -> Tensor:
    """Return keys such that the weight of all ranks' smaller keys is as close to each target as equal keys allow.

    Every rank calls it. The host does not wait: the result stays on the device.

    Args:
        keys: [N] int64 in [0, 2^62), ascending.
        sums: [N + 1] int64, the weight before each of them, and of all of them.
        targets: ascending.

    Returns:
        [targets] int64, a key for each, ascending; the same on every rank.
    """
    wanted = on_device(targets, world)[:, None]
    low = torch.zeros_like(wanted)  # all keys below it weigh the target at most
    bits = KEY_BITS
    for digit in _DIGITS:
        bits -= digit
        tried = low + (torch.arange(1, 1 << digit, device=keys.device) << bits)
        low = low + ((_below(tried, keys, sums, world) <= wanted).sum(1, keepdim=True) << bits)
    ends = torch.cat([low, low + 1], 1)
    less, more = _below(ends, keys, sums, world).unbind(1)
    return torch.where(wanted[:, 0] - less <= more - wanted[:, 0], *ends.unbind(1))


def _below(ends: Tensor, keys: Tensor, sums: Tensor, world: World) -> Tensor:
    """Return the weight of all ranks' keys below each of `ends`."""
    return add_up(sums[torch.searchsorted(keys, ends)], world)
