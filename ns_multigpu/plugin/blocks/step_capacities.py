"""How much room the buffers of fused steps have: what was needed of late, and some more.

A step that has not enough is not taken, nor are those behind it in its block: all are taken again. So room is given
up only when every view has been drawn without needing it: views of one capture differ by a factor of ten.
"""

from collections import deque
from collections.abc import Sequence

from ns_multigpu.primitives.fused_step import padded

_SPARE = 3 * 8192
"""Rows or intersections of too much room that are not worth new buffers."""
_IMAGES = 500
"""Images that must have been seen, and every view once, before room is given up."""


class StepCapacities:
    """Capacities of steps, in a fixed order (rows and intersections; or rows, segments and intersections).

    Args:
        views: training views of the capture.
    """

    def __init__(self, views: int) -> None:
        self._window = max(_IMAGES, views)
        self._recent: deque[tuple[int, tuple[int, ...]]] = deque()  # images of a block, and what it needed
        self._now: tuple[int, ...] | None = None

    @property
    def now(self) -> tuple[int, ...] | None:
        """The capacities; None before the first."""
        return self._now

    def begin(self, capacities: Sequence[int]) -> None:
        """Sets the first ones."""
        self._now = tuple(capacities)

    def learn(self, needed: Sequence[int], full: bool, images: int) -> None:
        """Fits the capacities to what steps have needed.

        Args:
            needed: the most of any of the steps, by capacity.
            full: whether it was more than there was room for.
            images: that the steps which were taken have seen.
        """
        assert self._now is not None
        self._recent.append((images, tuple(needed)))
        while sum(seen for seen, _ in self._recent) - self._recent[0][0] >= self._window:
            self._recent.popleft()
        if full:
            wanted = [padded(most) for most in needed]
            # What was counted beyond a full capacity of rows may be too little: go well beyond.
            self._now = tuple(max(c, 2 * w if w > c else w) for w, c in zip(wanted, self._now, strict=True))
            return
        # Before all views have been seen, only what is far too much: the first guess of a run.
        halves = 3 if sum(seen for seen, _ in self._recent) >= self._window else 6
        wanted = [padded(max(column)) for column in zip(*(most for _, most in self._recent), strict=True)]
        self._now = tuple(
            w + w // 8 if c > halves * w // 2 + _SPARE else c for w, c in zip(wanted, self._now, strict=True)
        )
