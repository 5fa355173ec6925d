"""Limit on block length while a viewer is connected, and the times at which pages are drawn.

A block of fused steps may have 64 steps, and a page's request waits for its end. Blocks are shortened from measured
step times so that the wait is about `WAIT`. Each block end costs one to two milliseconds. Pictures take at most the
fraction `SHARE` of the time: after a picture the next wait is longer, up to `LONGEST_WAIT`.
"""

import time
from collections import deque
from statistics import median

WAIT = 0.05
"""Approximate seconds that an open page waits for a block of steps to end."""
LONGEST_WAIT = 0.09
"""Longest wait in seconds, after a slow picture."""
SHARE = 0.1
"""Fraction of the time that pictures may take before waits grow."""


class ViewerThrottle:
    """Limit on block length while a viewer is connected: as many steps as fit into a page's wait, at least one."""

    def __init__(self) -> None:
        self._recent: deque[float] = deque(maxlen=5)  # seconds per step; the median ignores a step with an evaluation
        self._began: tuple[int, float] | None = None
        self._ended: float | None = None
        self._due = 0.0

    def ended(self, step: int) -> None:
        """Record the end of the steps before `step`. The time until `begins` counts as viewing."""
        self._ended = time.perf_counter()
        if self._began is not None and step > self._began[0]:
            self._recent.append((self._ended - self._began[1]) / (step - self._began[0]))

    def begins(self, step: int) -> None:
        """Record the start of `step`, and set the time of the next pictures."""
        now = time.perf_counter()
        if self._ended is not None:
            self._due = now + min((now - self._ended) * (1 / SHARE - 1), LONGEST_WAIT)
        self._began = (step, now)

    @property
    def due(self) -> bool:
        """True if the next pictures may be drawn."""
        return time.perf_counter() >= self._due

    @property
    def steps(self) -> int:
        """Number of steps until the next pictures are due, or that fit into `WAIT`."""
        if not self._recent:
            return 1
        wait = max(WAIT, self._due - time.perf_counter())
        return max(1, int(wait / max(median(self._recent), 1e-6)))
