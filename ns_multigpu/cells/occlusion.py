"""Visible parts of cells in a view (Splaxel's saturation redundancy, section 4.3).

The rank that composites a view knows what each pixel of a cell's image contributes: the transmittance in front of it
times its alpha. A cell is drawn where that was 1/1000 or more when the view was last drawn. Of each view and cell this
is a box in each of 16 bands of the view, with a tile around it, so that a patch is still a rectangle. Masks of tiles
would save little more (benchmarks/results/pixel-sim.md).

Two checks find parts that became visible. Transmittance is measured in every step, also where no rank draws. If 1 %
more of a cell's undrawn pixels receive light than before, all of the cell is drawn in the view's next step. (The paper
compares stale budgets, appendix 8.2.) Splats that grow into an empty part change no transmittance in front of it. So
all cells in sight are drawn in every eighth step of a view.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from ns_multigpu.cells.tree import CellTree
from ns_multigpu.core.assign.image_part import Rectangle, area, contains
from ns_multigpu.core.exchange.fragments import BANDS
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
        sight: each cell's rectangle in sight. live: boxes [BANDS, 4] around each cell's visible pixels, with the
            right end before the left where there are none; None to draw all in sight.
        dark: undrawn pixels of each cell. lit: the fewest of these that received light; -1 if unknown.
        steps: how often the view was drawn.
    """

    sight: list[Rectangle]
    live: list[NDArray[np.int64] | None]
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

    def drawn(self, view: View, sight: Sequence[Rectangle | None]) -> list[list[Rectangle]]:
        """Return the rectangles of each cell to draw in a view, from that in which it is in sight."""
        if view.index < 0:
            return [[wide] if wide else [] for wide in sight]
        cells, whole = len(sight), [wide or NOTHING for wide in sight]
        key = view.index, view.width, view.height
        known = self._looked.setdefault(key, _Looked(whole, [None] * cells, [0] * cells, [-1] * cells))
        complete = (known.steps + view.index) % COMPLETE == 0  # views differ, so that steps are alike
        found: list[list[Rectangle]] = []
        for cell, wide in enumerate(sight):
            live = known.live[cell]
            if wide is not None and live is not None and not complete and _within(wide, known.sight[cell]):
                found.append(tiles_around(live, wide))
            else:
                found.append([wide] if wide else [])
                known.lit[cell] = -1
            known.dark[cell] = area(whole[cell]) - sum(map(area, found[-1]))
        known.sight, known.steps = whole, known.steps + 1
        self._dark += sum(known.dark)
        return found

    def learn(self, views: Sequence[View], numbers: NDArray[np.int64]) -> None:
        """Record the visible rectangles.

        Args:
            views: of a batch. numbers: [ranks, views, cells, BANDS, 5], see `Feedback.LIVE`.
        """
        boxes, lights = numbers[..., :4].max(axis=0) * (-1, -1, 1, 1), numbers[..., 4].sum(axis=(0, 3)).tolist()
        for view, of_view, lit in zip(views, boxes, lights, strict=True):
            looked = self._looked.get((view.index, view.width, view.height))
            if looked is None or len(looked.sight) != len(of_view):  # the cells were rebuilt since
                continue
            for cell, live in enumerate(of_view):
                looked.live[cell] = live
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
                boxes = [] if live is None else live.reshape(-1).tolist()
                rows.append([*key, cell, *sight, looked.steps, dark, lit, *boxes])
        return rows

    def load_state(self, state: Sequence[Sequence[int]]) -> None:
        """Restore the state that `state` returned."""
        self._looked, self._cells = {}, 0
        for row in state:
            if len(row) == 2 and row[0] == -1:
                self._cells = row[1]
            if len(row) not in (11, 11 + 4 * BANDS):  # of earlier versions
                continue
            index, width, height, _, *sight, steps, dark, lit = row[:11]
            looked = self._looked.setdefault((index, width, height), _Looked([], [], [], [], steps))
            looked.sight.append((sight[0], sight[1], sight[2], sight[3]))
            looked.live.append(np.array(row[11:]).reshape(BANDS, 4) if len(row) > 11 else None)
            looked.dark.append(dark)
            looked.lit.append(lit)


def around(wide: Rectangle | None, inner: Sequence[Rectangle]) -> list[Rectangle]:
    """Return the part of a rectangle outside of others within it: these are one below the other, top to bottom."""
    if wide is None:
        return []
    x0, y, x1, y1 = wide
    parts: list[Rectangle] = []
    for left, top, right, bottom in inner:
        parts += [(x0, y, x1, top), (x0, top, left, bottom), (right, top, x1, bottom)]
        y = bottom
    return [part for part in [*parts, (x0, y, x1, y1)] if area(part) > 0]


def _within(wide: Rectangle, known: Rectangle) -> bool:
    a, b, c, d = known
    return contains((a - _GROWN, b - _GROWN, c + _GROWN, d + _GROWN), wide)


def tiles_around(live: NDArray[np.int64], wide: Rectangle) -> list[Rectangle]:
    """Return the tiles within a rectangle that boxes [BANDS, 4] of pixels touch, and one more around each box: of each
    row of tiles those between the first and the last, as rectangles top to bottom."""
    x0, y0, x1, y1 = wide
    boxes = live[live[:, 2] > live[:, 0]]
    if len(boxes) == 0:
        return []
    first, end = boxes[:, :2] // TILE - 1, -(-boxes[:, 2:] // TILE) + 1
    rows = np.arange(y0 // TILE, -(-y1 // TILE))
    touched = (first[:, 1:] <= rows) & (rows < end[:, 1:])  # [boxes, rows]
    left = np.where(touched, first[:, :1] * TILE, x1).min(0).clip(x0)
    right = np.where(touched, end[:, :1] * TILE, x0).max(0).clip(max=x1)
    borders = [0, *(1 + np.flatnonzero((np.diff(left) != 0) | (np.diff(right) != 0))).tolist(), len(rows)]
    found = [(int(left[a]), y0 + a * TILE, int(right[a]), min(y0 + b * TILE, y1)) for a, b in pairwise(borders)]
    return [rectangle for rectangle in found if area(rectangle) > 0]
