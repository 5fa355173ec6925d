"""How many steps training takes at once while somebody looks.

A block of fused steps may be 64 long, and a page's request waits until it ends. Steps are measured, and blocks made so
short that the wait is about `LONGEST_WAIT`. A block's end costs a millisecond or two: that is the price of a look.
"""

import time
from collections import deque
from statistics import median

LONGEST_WAIT = 0.05
"""Seconds that a page waits for a block of steps to end, about, while one is open."""


class Strides:
    """How many steps to take at once while somebody looks: as many as take `LONGEST_WAIT`, and one at least."""

    def __init__(self) -> None:
        self._recent: deque[float] = deque(maxlen=5)  # seconds a step; an evaluation in between is an exception
        self._began: tuple[int, float] | None = None

    def ended(self, step: int) -> None:
        """The steps before `step` have been taken."""
        if self._began is not None and step > self._began[0]:
            self._recent.append((time.perf_counter() - self._began[1]) / (step - self._began[0]))

    def begins(self, step: int) -> None:
        """`step` is about to be taken."""
        self._began = (step, time.perf_counter())

    @property
    def steps(self) -> int:
        """How many."""
        return max(1, int(LONGEST_WAIT / max(median(self._recent), 1e-6))) if self._recent else 1
