"""Work counts that are read back some steps after the device has computed them, so that no step waits for them."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ns_multigpu.core.types import View

LAG = 4
"""Steps whose counts stay on their way: long enough that the device is done with the one before them."""


@dataclass(frozen=True)
class _Counts:
    """Numbers of a step during their copy: its counts [N] and, last, 1 if it was taken."""

    views: Sequence[View]
    counts: Tensor
    copied: Any


class DelayedReadback:
    """Delayed readback of each step's counts, a fixed number of steps later: on all ranks at the same step.

    Args:
        learn: what learns, given views and counts: `Assignment.learn`.
    """

    def __init__(self, learn: Callable[[Sequence[View], Sequence[int]], None]) -> None:
        self._learn = learn
        self._waiting: deque[_Counts] = deque()

    def send(self, views: Sequence[View], counts: Tensor, taken: Tensor) -> None:
        """Start the copy of a step's counts to the host, on the current stream.

        Args:
            views: of the step.
            counts: int64 of any shape, which may be overwritten afterwards.
            taken: [] bool: whether the step was taken. Counts of a step that was not are discarded.
        """
        numbers = torch.cat([counts.reshape(-1), taken.to(counts.dtype).reshape(1)])
        if not counts.is_cuda:
            self._waiting.append(_Counts(views, numbers, None))
            return
        there = torch.empty(numbers.shape, dtype=counts.dtype, pin_memory=True)
        there.copy_(numbers, non_blocking=True)
        copied = torch.cuda.Event()
        copied.record()
        self._waiting.append(_Counts(views, there, copied))

    def learn(self, pending: int = LAG) -> None:
        """Read the oldest counts until at most `pending` copies remain. Waits for those that it reads."""
        while len(self._waiting) > pending:
            one = self._waiting.popleft()
            if one.copied is not None:
                one.copied.synchronize()
            *counts, taken = one.counts.tolist()
            if taken:
                self._learn(one.views, counts)
