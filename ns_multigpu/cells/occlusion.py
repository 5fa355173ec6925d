"""Visible parts of cells in a view (Splaxel's saturation redundancy, section 4.3).

The rank that composites a view knows what each pixel of a cell's image contributes: the transmittance in front of it
times its alpha. A cell is drawn where that was 1/1000 or more when the view was last drawn. For each view and cell this
is one rectangle, with a tile around it: masks of tiles would save little more (benchmarks/results/pixel-sim.md).

Two checks find parts that became visible. Transmittance is measured in every step, also where no rank draws. If 1 % more
of a cell's undrawn pixels receive light than before, all of the cell is drawn in the view's next step. (The paper
compares stale budgets, appendix 8.2.) Splats that grow into an empty part change no transmittance in front of it. So
all cells in sight are drawn in every eighth step of a view.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from ns_multigpu.cells.tree import CellTree
from ns_multigpu.core.assign.image_part import Rectangle, area, contains, is_empty, overlap
from ns_multigpu.core.types import TILE, View

_GROWN = 2 * TILE
"""Pixels by which a cell's rectangle may have grown on each side since it was looked at."""
COMPLETE = 8
"""Steps of a view of which one draws all cells in sight."""
_FLIPPED = 100
"""A cell is drawn completely if one of this many undrawn pixels became visible."""
NOTHING: Rectangle = (0, 0, 0, 0)


@dataclass
class _Looked:
    """Record of a view's last drawing.

    Attributes:
        sight: each cell's rectangle in sight. live: around each cell's visible pixels; None to draw all in sight.
        dark: undrawn pixels of each cell. lit: the fewest of these that received light; -1 if unknown.
        steps: how often the view was drawn.
    """

    sight: list[Rectangle]
    live: list[Rectangle | None]
    dark: list[int]
    lit: list[int]
    steps: int = 0


class Occlusion:
    """Occlusion state of each training view, the same on all ranks."""

    def __init__(self) -> None:
        self._looked: dict[tuple[int, int, int], _Looked] = {}  # by the view's index and size
        self._cells = 0  # of which tree
        self._flips = self._dark = 0

    def keep(self, tree: CellTree | None) -> None:
        """Clear the state if it is of other cells than these."""
        cells = 0 if tree is None else crc32(tree.tensor().numpy().tobytes())
        if cells != self._cells:
            self._looked, self._cells = {}, cells

    def drawn(self, view: View, sight: Sequence[Rectangle | None]) -> list[Rectangle | None]:
        """Return the rectangles of each cell to draw in a view, from those in which it is in sight."""
        if view.index < 0:
            return list(sight)
        cells, whole = len(sight), [wide or NOTHING for wide in sight]
        key = view.index, view.width, view.height
        known = self._looked.setdefault(key, _Looked(whole, [None] * cells, [0] * cells, [-1] * cells))
        complete = (known.steps + view.index) % COMPLETE == 0  # views differ, so that steps are alike
        found: list[Rectangle | None] = []
        for cell, wide in enumerate(sight):
            live = known.live[cell]
            partly = wide is not None and live is not None and not complete and _within(wide, known.sight[cell])
            found.append(overlap(wide, _tiles(live, view)) if partly else wide)
            known.dark[cell] = area(whole[cell]) - area(found[-1] or NOTHING)
            if not partly:
                known.lit[cell] = -1
        known.sight, known.steps = whole, known.steps + 1
        self._dark += sum(known.dark)
        return found

    def learn(self, views: Sequence[View], numbers: NDArray[np.int64]) -> None:
        """Record the visible rectangles.

        Args:
            views: of a batch. numbers: [ranks, views, cells, 5], see `Feedback.LIVE`.
        """
        boxes, lights = numbers[..., :4].max(axis=0).tolist(), numbers[..., 4].sum(axis=0).tolist()
        for view, of_view, lit in zip(views, boxes, lights, strict=True):
            looked = self._looked.get((view.index, view.width, view.height))
            if looked is None or len(looked.sight) != len(of_view):  # the cells were rebuilt since
                continue
            for cell, (a, b, c, d) in enumerate(of_view):
                looked.live[cell] = (-a, -b, c, d) if a > -(1 << 30) else NOTHING
                if looked.dark[cell] == 0:
                    continue
                known = looked.lit[cell]
                more = max(lit[cell] - known, 0) if known >= 0 else 0
                self._flips += more
                looked.lit[cell] = min(known, lit[cell]) if known >= 0 else lit[cell]
                if _FLIPPED * more > looked.dark[cell]:
                    looked.live[cell] = None

    def flips(self) -> tuple[int, int]:
        """Return the numbers of occluded pixels that became visible and of all occluded pixels, since the last call."""
        state = self._flips, self._dark
        self._flips = self._dark = 0
        return state

    def state(self) -> list[list[int]]:
        """Return rows for a checkpoint: one for the cells, then one for each view and cell."""
        rows = [[-1, self._cells]]
        for key, looked in sorted(self._looked.items()):
            columns = zip(looked.sight, looked.live, looked.dark, looked.lit, strict=True)
            for cell, (sight, live, dark, lit) in enumerate(columns):
                rows.append([*key, cell, *sight, looked.steps, dark, lit, *(live or ())])
        return rows

    def load_state(self, state: Sequence[Sequence[int]]) -> None:
        """Restore the state that `state` returned."""
        self._looked, self._cells = {}, 0
        for row in state:
            if len(row) == 2 and row[0] == -1:
                self._cells = row[1]
            if len(row) not in (11, 15):  # of earlier versions
                continue
            index, width, height, _, *sight, steps, dark, lit = row[:11]
            looked = self._looked.setdefault((index, width, height), _Looked([], [], [], [], steps))
            looked.sight.append(_rectangle(sight))
            looked.live.append(_rectangle(row[11:]) if len(row) > 11 else None)
            looked.dark.append(dark)
            looked.lit.append(lit)


def around(wide: Rectangle | None, inner: Rectangle | None) -> list[Rectangle]:
    """Return the part of a rectangle outside of another one within it, as up to four rectangles."""
    if wide is None or wide == inner:
        return []
    if inner is None:
        return [wide]
    (x0, y0, x1, y1), (left, top, right, bottom) = wide, inner
    parts = [(x0, y0, x1, top), (x0, bottom, x1, y1), (x0, top, left, bottom), (right, top, x1, bottom)]
    return [(a, b, c, d) for a, b, c, d in parts if a < c and b < d]


def _within(wide: Rectangle, known: Rectangle) -> bool:
    a, b, c, d = known
    return contains((a - _GROWN, b - _GROWN, c + _GROWN, d + _GROWN), wide)


def _tiles(live: Rectangle, view: View) -> Rectangle:
    """Return the tiles that a rectangle of pixels touches, and one more on each side; of an empty one none."""
    if is_empty(live):
        return NOTHING
    x0, y0, x1, y1 = live
    return (max(x0 // TILE - 1, 0) * TILE, max(y0 // TILE - 1, 0) * TILE, min((-(-x1 // TILE) + 1) * TILE, view.width),
            min((-(-y1 // TILE) + 1) * TILE, view.height))  # fmt: skip


def _rectangle(numbers: Sequence[int]) -> Rectangle:
    x0, y0, x1, y1 = numbers
    return x0, y0, x1, y1
