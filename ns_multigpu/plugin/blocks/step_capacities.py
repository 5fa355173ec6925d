"""How much room the buffers of fused steps have: what was needed of late, and some more.

A step that has not enough is not taken, nor are those behind it in its block: all are taken again. So room is given
up only when every view has been drawn without needing it: views of one capture differ by a factor of ten.

Each pair of ranks has room of its own, so that what one pair needs is not sent by all others.
"""

from collections import deque
from collections.abc import Callable
from typing import TypeAlias

from ns_multigpu.core.exchange.pair_capacities import Pairs, alike
from ns_multigpu.core.step.step_settings import padded

Capacities: TypeAlias = tuple[int, Pairs, int]
"""Of rows, of the rows of each pair of ranks, and of intersections."""
_SPARE = 3 * 8192
"""Rows or intersections of too much room that are not worth new buffers."""
_MOST_SPARE = 1 << 20
"""Rows or intersections that there is room for beside those that were needed, at most, before more are needed."""
LEAST_ROWS, LEAST_INTERSECTIONS = 1 << 17, 1 << 19
"""Room that a GPU's steps may have at least: sorting so many takes hardly longer than sorting few, and a small model
that grows meets no end of it for a while."""
_IMAGES = 500
"""Images that must have been seen, and every view once, before room is given up."""


class StepCapacities:
    """Capacities of steps: rows, segments and intersections.

    Args:
        views: training views of the capture.
        one_for_all: all pairs have the room of the largest, where their segments have one size anyway.
        least: room of rows and of intersections that there is whatever was needed.
    """

    def __init__(self, views: int, *, one_for_all: bool = False, least: tuple[int, int] = (0, 0)) -> None:
        self._one_for_all, self._least = one_for_all, least
        self._window = max(_IMAGES, views)
        self._recent: deque[tuple[int, Capacities]] = deque()  # images of a block, and what it needed
        self._now: Capacities | None = None

    @property
    def now(self) -> Capacities | None:
        """The capacities; None before the first."""
        if self._now is None:
            return None
        rows, pairs, intersections = self._now
        return max(rows, self._least[0]), pairs, max(intersections, self._least[1])

    def begin(self, capacities: Capacities) -> None:
        """Sets the first ones, also where what was needed before says nothing of what will be."""
        self._now = capacities
        self._recent.clear()

    def learn(self, needed: Capacities, full: bool, images: int) -> None:
        """Fits the capacities to what steps have needed.

        Args:
            needed: the most of any of the steps, by capacity; the same on all ranks, as are the other arguments.
            full: whether it was more than there was room for.
            images: that the steps which were taken have seen.
        """
        assert self._now is not None
        if self._one_for_all:
            needed = (needed[0], alike(needed[1]), needed[2])
        self._recent.append((images, needed))
        while sum(seen for seen, _ in self._recent) - self._recent[0][0] >= self._window:
            self._recent.popleft()
        if full:
            # What was counted beyond a full capacity of rows may be too little: go well beyond.
            self._now = self._each(lambda w, c: max(c, 2 * w if w > c else w), needed)
            return
        # Before all views have been seen, only what is far too much: the first guess of a run.
        all_seen = sum(seen for seen, _ in self._recent) >= self._window
        self._now = self._each(
            lambda w, c: w + w // 8 if c > (_too_much(w) if all_seen else 3 * w) + _SPARE else c,
            self._most(),
            lambda w, c: w + w // 8 if c > (3 if all_seen else 6) * w // 2 + _SPARE else c,
        )

    def spare(self, least: int = 9, wanted: int = 16, *, rows: bool = True, pairs: bool = False) -> None:
        """Has room for `wanted` eighths of what was needed of late, and some more, where there is not for `least`
        eighths. Called where steps are made anew in any case: room that turns out too small costs a block. Far more
        than is needed now, for other room may be another buffer that all GPUs reach, and making one takes 20 ms.

        Args:
            rows, pairs: for those of a rank, and of each pair of ranks, too. Not where they travel with their room.
        """

        def chosen(w: int, c: int, eighths: int = wanted) -> int:
            return max(c, w + min(w * (eighths - 8) // 8, _MOST_SPARE)) if c < w * least // 8 else c

        if self._recent:
            # Room of pairs is given up sooner than that of others.
            found = self._each(chosen, self._most(), lambda w, c: chosen(w, c, min(wanted, 12)))
            assert self._now is not None
            self._now = found[0] if rows else self._now[0], found[1] if pairs else self._now[1], found[2]

    def _most(self) -> Capacities:
        """That any step of late has needed."""
        rows, pairs, intersections = zip(*(most for _, most in self._recent), strict=True)
        most = tuple(tuple(map(max, *of_source, of_source[0])) for of_source in zip(*pairs, strict=True))
        return max(rows), most, max(intersections)

    def _each(
        self, chosen: Callable[[int, int], int], needed: Capacities, of_pairs: Callable[[int, int], int] | None = None
    ) -> Capacities:
        """A choice for each capacity, from what there should be room for and what there is; another one for those of
        pairs, where it is given."""
        assert self._now is not None
        of_pairs = of_pairs or chosen
        rows, pairs, intersections = self._now
        each = tuple(
            tuple(of_pairs(padded(n), c) for n, c in zip(wanted, there, strict=True))
            for wanted, there in zip(needed[1], pairs, strict=True)
        )
        return chosen(padded(needed[0]), rows), each, chosen(padded(needed[2]), intersections)


def _too_much(wanted: int) -> int:
    """Room that is given up once all views have been seen: of a small model more than `spare` makes, of a large one,
    where memory counts, half as much again."""
    return min(5 * wanted // 2, max(3 * wanted // 2, wanted + _MOST_SPARE))
