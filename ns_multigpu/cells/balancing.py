"""Batching of views that show different cells, so that GPUs have balanced work.

Splaxel (section 4.4) sorts views into buckets whose GPUs do not conflict, and trains a bucket per step. A step here has
as many views as the user asked for, because learning rates depend on that number. So the views that conflict least form
a step; where enough views are disjoint, it equals such a bucket.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ns_multigpu.cells.seen import tiles_seen
from ns_multigpu.core.types import View

WINDOW = 64
"""Views, the next ones in the order, that are looked at for each place of a step."""


def loads_of(boxes: NDArray[np.float64], views: Sequence[View]) -> NDArray[np.int64]:
    """Return [V, cells], the pixels of each view in the tiles that each cell's box touches (see `tiles_seen`)."""
    loads = np.zeros((len(views), len(boxes)), dtype=np.int64)
    for row, view in zip(loads, views, strict=True):
        for cell, seen in enumerate(tiles_seen(boxes, view)):
            if seen is not None:
                x0, y0, x1, y1 = seen
                row[cell] = (x1 - x0) * (y1 - y0)
    return loads


def order_balanced(order: Sequence[int], loads: NDArray[np.int64], size: int, lead: int = 0) -> list[int]:
    """Return the views of an epoch in an order in which the cells of each step have balanced loads.

    A step begins with the next view of the order. It then takes, of the views that follow, the one that keeps the
    largest load of a cell smallest. Ties go to the earlier view. An epoch has each view once. Views of a step are
    sorted by the cell that they show most of, so that plans recur.

    Args:
        order: views of an epoch. loads: `loads_of` all views.
        size: views of a step. lead: of the first step, as many as are still to be found for it; 0 for all.

    Raises:
        ValueError: the size is not positive.
    """
    if size < 1:
        raise ValueError(f"a step of {size} views: at least 1 is needed")
    waiting, found = list(order), list[int]()
    capacity = lead or size
    while waiting:
        load, together = np.zeros(loads.shape[1], dtype=np.int64), list[int]()
        for place in range(min(capacity, len(waiting))):
            near = waiting[: WINDOW if place else 1]
            best = int((load + loads[near]).max(axis=1).argmin()) if loads.shape[1] else 0
            view = waiting.pop(best)
            load += loads[view]
            together.append(view)
        found += sorted(together, key=lambda view: int(loads[view].argmax()) if loads.shape[1] else 0)
        capacity = size
    return found
