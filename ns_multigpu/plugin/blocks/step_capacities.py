"""Capacities of the buffers of fused steps: recent demand plus a margin.

A step that exceeds a capacity is skipped, as are those after it in its block; all are retried. Demand varies tenfold
between views of one capture. So a capacity shrinks only after every view has been drawn without needing it.

Each pair of ranks has its own capacity, so that one pair's demand does not enlarge the messages of all others.
"""

from collections import deque
from collections.abc import Callable
from typing import TypeAlias

from ns_multigpu.core.exchange.pair_capacities import Pairs, alike
from ns_multigpu.core.step.step_settings import padded

Capacities: TypeAlias = tuple[int, Pairs, int]
"""(rows, rows of each pair of ranks, intersections)."""
_SPARE = 3 * 8192
"""Excess capacity, in rows or intersections, that does not justify new buffers."""
_MOST_SPARE = 1 << 20
"""Largest margin above recent demand, in rows or intersections."""
LEAST_ROWS, LEAST_INTERSECTIONS = 1 << 17, 1 << 19
"""Least capacities on a GPU: sorting so many takes hardly longer than sorting few, and a growing small model does not
exceed them soon."""
_IMAGES = 500
"""Images to be seen, besides every view once, before a capacity shrinks."""


class StepCapacities:
    """Capacities of steps: rows, segments and intersections.

    Args:
        views: training views of the capture.
        one_for_all: give all pairs the largest pair's capacity, if their segments have one size anyway.
        least: minimum capacities of rows and of intersections.
    """

    def __init__(self, views: int, *, one_for_all: bool = False, least: tuple[int, int] = (0, 0)) -> None:
        self._one_for_all, self._least = one_for_all, least
        self._window = max(_IMAGES, views)
        self._recent: deque[tuple[int, Capacities]] = deque()  # images of a block, and its demand
        self._now: Capacities | None = None

    @property
    def now(self) -> Capacities | None:
        """Current capacities; None before the first."""
        if self._now is None:
            return None
        rows, pairs, intersections = self._now
        return max(rows, self._least[0]), pairs, max(intersections, self._least[1])

    def begin(self, capacities: Capacities) -> None:
        """Set capacities and discard measured demand, which no longer predicts future demand."""
        self._now = capacities
        self._recent.clear()

    def learn(self, needed: Capacities, full: bool, images: int) -> None:
        """Update capacities from measured demand.

        Args:
            needed: maximum demand of any of the steps, by capacity; all arguments are the same on all ranks.
            full: whether a capacity was exceeded.
            images: number of images seen by the completed steps.
        """
        assert self._now is not None
        if self._one_for_all:
            needed = (needed[0], alike(needed[1]), needed[2])
        self._recent.append((images, needed))
        while sum(seen for seen, _ in self._recent) - self._recent[0][0] >= self._window:
            self._recent.popleft()
        if full:
            # The count beyond a full capacity of rows may be too low: enlarge well beyond it. Counts of pairs are then
            # too low as well, and else exact.
            exact = needed[0] <= self._now[0] and not self._one_for_all
            self._now = self._each(lambda w, c: max(c, 2 * w if w > c else w), needed, max if exact else None)
            return
        # Before all views have been seen, shrink only a far too large first guess.
        all_seen = sum(seen for seen, _ in self._recent) >= self._window
        self._now = self._each(
            lambda w, c: w + w // 8 if c > (_too_much(w) if all_seen else 3 * w) + _SPARE else c,
            self._most(),
            lambda w, c: w + w // 8 if c > (3 if all_seen else 6) * w // 2 + _SPARE else c,
        )

    def spare(self, least: int = 9, wanted: int = 16, *, rows: bool = True, pairs: bool = False) -> None:
        """Raise capacities below `least` eighths of recent demand to `wanted` eighths, with a limited margin.

        Call it only if steps are rebuilt anyway: a capacity that proves too small costs a block. The margin is generous
        because a change may need new peer buffers on all GPUs, which takes 20 ms.

        Args:
            rows, pairs: whether to raise capacities of a rank's rows and of pairs; not if collectives transfer the
                margin.
        """

        def chosen(w: int, c: int, eighths: int = wanted) -> int:
            return max(c, w + min(w * (eighths - 8) // 8, _MOST_SPARE)) if c < w * least // 8 else c

        if self._recent:
            # Capacities of pairs shrink sooner than others.
            found = self._each(chosen, self._most(), lambda w, c: chosen(w, c, min(wanted, 12)))
            assert self._now is not None
            self._now = found[0] if rows else self._now[0], found[1] if pairs else self._now[1], found[2]

    def _most(self) -> Capacities:
        """Return the maximum recent demand of any step."""
        rows, pairs, intersections = zip(*(most for _, most in self._recent), strict=True)
        most = tuple(tuple(map(max, *of_source, of_source[0])) for of_source in zip(*pairs, strict=True))
        return max(rows), most, max(intersections)

    def _each(
        self, chosen: Callable[[int, int], int], needed: Capacities, of_pairs: Callable[[int, int], int] | None = None
    ) -> Capacities:
        """Return new capacities, each chosen from its padded demand and present value; pairs by `of_pairs` if given."""
        assert self._now is not None
        of_pairs = of_pairs or chosen
        rows, pairs, intersections = self._now
        each = tuple(
            tuple(of_pairs(padded(n), c) for n, c in zip(wanted, there, strict=True))
            for wanted, there in zip(needed[1], pairs, strict=True)
        )
        return chosen(padded(needed[0]), rows), each, chosen(padded(needed[2]), intersections)


def _too_much(wanted: int) -> int:
    """Return the capacity above which it shrinks once all views have been seen.

    That is 2.5 times the demand of a small model, above the margin of `spare`, and 1.5 times that of a large one, whose
    memory matters.
    """
    return min(5 * wanted // 2, max(3 * wanted // 2, wanted + _MOST_SPARE))
