"""How many steps training takes at once while somebody looks, and when it draws for them.

A block of fused steps may be 64 long, and a page's request waits until it ends. Steps are measured, and blocks made so
short that the wait is about `WAIT`. A block's end costs a millisecond or two: that is the price of a look. Pictures
themselves take `SHARE` of the time at most: after one, pages wait so much longer, but not longer than `LONGEST_WAIT`.
"""

import time
from collections import deque
from statistics import median

WAIT = 0.05
"""Seconds that a page waits for a block of steps to end, about, while one is open."""
LONGEST_WAIT = 0.09
"""The same behind a picture that took long."""
SHARE = 0.1
"""Of the time that pictures may take before pages wait longer."""


class ViewerThrottle:
    """How many steps to take at once while somebody looks: as many as fit into a page's wait, and one at least."""

    def __init__(self) -> None:
        self._recent: deque[float] = deque(maxlen=5)  # seconds a step; an evaluation in between is an exception
        self._began: tuple[int, float] | None = None
        self._ended: float | None = None
        self._due = 0.0

    def ended(self, step: int) -> None:
        """The steps before `step` have been taken. What follows until `begins` is for those who look."""
        self._ended = time.perf_counter()
        if self._began is not None and step > self._began[0]:
            self._recent.append((self._ended - self._began[1]) / (step - self._began[0]))

    def begins(self, step: int) -> None:
        """`step` is about to be taken."""
        now = time.perf_counter()
        if self._ended is not None:
            self._due = now + min((now - self._ended) * (1 / SHARE - 1), LONGEST_WAIT)
        self._began = (step, now)

    @property
    def due(self) -> bool:
        """Whether the next pictures may be drawn."""
        return time.perf_counter() >= self._due

    @property
    def steps(self) -> int:
        """How many: until the next pictures are due, or as `WAIT` has it."""
        if not self._recent:
            return 1
        wait = max(WAIT, self._due - time.perf_counter())
        return max(1, int(wait / max(median(self._recent), 1e-6)))
