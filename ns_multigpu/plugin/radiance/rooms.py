"""How many lines a step of fixed shapes has for its segments: few different numbers, for each is a CUDA graph."""

from collections.abc import Sequence
from math import ceil, sqrt

Rooms = tuple[tuple[int, ...], ...]
"""Lines of each of a rank's cells, by class of segments (`FixedShapes`)."""

_STEPS, _SPREAD, _SPARE = 64, 2.0, 1.1
"""Rays are drawn at random: how many of them meet a cell scatters by about a root from step to step. Room is for two
roots more than there are, in so many even steps; and what was made for another step serves, if it is at most this times
as large."""


class KeptRooms:
    """Finds room for the segments of one step after another. Ranks do so by themselves.

    Args:
        rays: of each step.
    """

    def __init__(self, rays: int) -> None:
        self._rays = rays
        self._kept: list[Rooms] = []

    def of(self, counts: Sequence[Sequence[int]]) -> Rooms:
        """Room for so many segments, by cell and class; the smallest there was before that serves, or else new."""
        fresh = tuple(tuple(room_for(count, self._rays) for count in row) for row in counts)
        most = _SPARE * _lines(fresh)
        serve = [kept for kept in self._kept if _holds(kept, counts) and _lines(kept) <= most]
        if serve:
            return min(serve, key=_lines)
        self._kept.append(fresh)
        return fresh


def room_for(count: int, rays: int) -> int:
    """Lines for so many segments of so many rays; none for none."""
    step = max(ceil(rays / _STEPS), 1)
    return min(ceil((count + _SPREAD * sqrt(count)) / step) * step, rays)


def _lines(rooms: Rooms) -> int:
    return sum(map(sum, rooms))


def _holds(rooms: Rooms, counts: Sequence[Sequence[int]]) -> bool:
    return all(
        count <= room for row, given in zip(rooms, counts, strict=True) for room, count in zip(row, given, strict=True)
    )
