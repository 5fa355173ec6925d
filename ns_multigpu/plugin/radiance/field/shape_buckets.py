"""Line capacities of steps with fixed shapes: few distinct sizes, because each needs a CUDA graph."""

from collections.abc import Sequence
from math import ceil, inf, sqrt

ShapeBuckets = tuple[tuple[int, ...], ...]
"""Lines of each of a rank's cells, by class of segments (`FixedShapes`)."""

WARM_UP_STEPS = 12
"""Number of first steps with exactly the needed capacity, which measure the demand."""
_STEPS, _SPREAD, _SPARE = 256, 1.5, 1.05
"""Rounding steps of capacities, margin in square roots of the largest count, and largest ratio for reuse. Rays are
random, so the number that meet a cell varies by about its square root."""
_FEW = 6
"""Number of capacities after which any sufficient one is reused, and new ones cover the largest demand so far. Each is
a graph, and graphs have memory of their own."""


class KeptShapeBuckets:
    """Line capacities of successive steps, chosen by each rank alone.

    Args:
        rays: of each step.
    """

    def __init__(self, rays: int) -> None:
        self._rays, self._steps = rays, 0
        self._most: list[list[int]] = []
        self._kept: list[ShapeBuckets] = []

    def of(self, counts: Sequence[Sequence[int]]) -> ShapeBuckets:
        """Return a capacity for segment counts by cell and class: the smallest sufficient old one, else a new one."""
        self._steps += 1
        if not self._most:
            self._most = [list(row) for row in counts]
        self._most = [list(map(max, row, most)) for row, most in zip(counts, self._most, strict=True)]
        if self._steps <= WARM_UP_STEPS:
            return tuple(map(tuple, counts))
        needed = _lines(tuple(tuple(capacity_for(count, self._rays) for count in row) for row in counts))
        most = _SPARE * needed if len(self._kept) < _FEW else inf
        serve = [kept for kept in self._kept if _holds(kept, counts) and _lines(kept) <= most]
        if serve:
            return min(serve, key=_lines)
        fresh = tuple(tuple(capacity_for(count, self._rays) for count in row) for row in self._most)
        if _lines(fresh) > most:  # the rays have changed since
            self._most = [list(row) for row in counts]
            fresh = tuple(tuple(capacity_for(count, self._rays) for count in row) for row in counts)
        self._kept.append(fresh)
        return fresh


def capacity_for(count: int, rays: int) -> int:
    """Return the padded number of lines for segments of these rays; 0 for 0."""
    step = max(ceil(rays / _STEPS), 1)
    return min(ceil((count + _SPREAD * sqrt(count)) / step) * step, rays)


def _lines(buckets: ShapeBuckets) -> int:
    return sum(map(sum, buckets))


def _holds(buckets: ShapeBuckets, counts: Sequence[Sequence[int]]) -> bool:
    return all(
        count <= capacity
        for row, given in zip(buckets, counts, strict=True)
        for capacity, count in zip(row, given, strict=True)
    )
