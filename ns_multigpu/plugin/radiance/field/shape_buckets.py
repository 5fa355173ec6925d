"""How many lines a step of fixed shapes has for its segments: few different numbers, for each is a CUDA graph."""

from collections.abc import Sequence
from math import ceil, inf, sqrt

ShapeBuckets = tuple[tuple[int, ...], ...]
"""Lines of each of a rank's cells, by class of segments (`FixedShapes`)."""

LEARNT = 12
"""Steps at first that have exactly the room that they need, so that there is something to go by."""
_STEPS, _SPREAD, _SPARE = 256, 1.5, 1.05
"""Rays are drawn at random: how many of them meet a cell scatters by about a root from step to step. Room is for so
many roots more than there were at most, in so many even steps; and what was made before serves where it is at most so
many times as large as need be."""
_FEW = 6
"""After so many numbers of lines whatever holds serves, and new ones are for the most there ever was: each is a graph,
and graphs have memory of their own."""


class KeptShapeBuckets:
    """Finds room for the segments of one step after another. Ranks do so by themselves.

    Args:
        rays: of each step.
    """

    def __init__(self, rays: int) -> None:
        self._rays, self._steps = rays, 0
        self._most: list[list[int]] = []
        self._kept: list[ShapeBuckets] = []

    def of(self, counts: Sequence[Sequence[int]]) -> ShapeBuckets:
        """Room for so many segments, by cell and class: the smallest there was before that serves, or else new."""
        self._steps += 1
        if not self._most:
            self._most = [list(row) for row in counts]
        self._most = [list(map(max, row, most)) for row, most in zip(counts, self._most, strict=True)]
        if self._steps <= LEARNT:
            return tuple(map(tuple, counts))
        needed = _lines(tuple(tuple(capacity_for(count, self._rays) for count in row) for row in counts))
        most = _SPARE * needed if len(self._kept) < _FEW else inf
        serve = [kept for kept in self._kept if _holds(kept, counts) and _lines(kept) <= most]
        if serve:
            return min(serve, key=_lines)
        fresh = tuple(tuple(capacity_for(count, self._rays) for count in row) for row in self._most)
        if _lines(fresh) > most:  # rays have changed since
            self._most = [list(row) for row in counts]
            fresh = tuple(tuple(capacity_for(count, self._rays) for count in row) for row in counts)
        self._kept.append(fresh)
        return fresh


def capacity_for(count: int, rays: int) -> int:
    """Lines for so many segments of so many rays, and some more; none for none."""
    step = max(ceil(rays / _STEPS), 1)
    return min(ceil((count + _SPREAD * sqrt(count)) / step) * step, rays)


def _lines(rooms: ShapeBuckets) -> int:
    return sum(map(sum, rooms))


def _holds(rooms: ShapeBuckets, counts: Sequence[Sequence[int]]) -> bool:
    return all(
        count <= room for row, given in zip(rooms, counts, strict=True) for room, count in zip(row, given, strict=True)
    )
