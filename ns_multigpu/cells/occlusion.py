"""Occlusion of cells by others in a view (Splaxel's saturation redundancy, section 4.3).

The rank that composites a view knows the transmittance in front of each cell's image. Where it was less than 1/1000
when the view was last drawn, the cell is invisible. For each view and cell the tiles around all other pixels are kept
as one rectangle, so that drawn regions are rectangles.

Transmittance is measured in every step, also where no rank draws (the paper measures again by budgets, appendix 8.2). A
part that is not occluded any more is drawn in the view's next step.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from ns_multigpu.cells.tree import CellTree
from ns_multigpu.core.assign.image_part import Rectangle, area, contains, overlap
from ns_multigpu.core.types import TILE, View

_GROWN = 2 * TILE
"""Pixels by which a cell's rectangle may have grown on each side since it was looked at."""
NOTHING: Rectangle = (0, 0, 0, 0)


@dataclass
class _Looked:
    """Record of a view's last drawing: each cell's rectangle in sight, and the one with enough light left."""

    sight: list[Rectangle]
    live: list[Rectangle] | None = None


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
        key = view.index, view.width, view.height
        known = self._looked.get(key)
        found: list[Rectangle | None] = []
        for cell, wide in enumerate(sight):
            seen = wide
            if wide is not None and known is not None and known.live is not None and _within(wide, known.sight[cell]):
                seen = overlap(wide, _tiles(known.live[cell], view))
            found.append(seen)
        live = None if known is None else known.live
        whole = [wide or NOTHING for wide in sight]
        self._looked[key] = _Looked(whole, live)
        self._dark += sum(map(area, whole)) - sum(area(seen or NOTHING) for seen in found)
        return found

    def learn(self, views: Sequence[View], numbers: NDArray[np.int64]) -> None:
        """Record the visible rectangles.

        Args:
            views: of a batch. numbers: [ranks, views, cells, 5], see `Feedback.LIVE`.
        """
        boxes = numbers[..., :4].max(axis=0)
        self._flips += int(numbers[..., 4].sum())
        for view, of_view in zip(views, boxes.tolist(), strict=True):
            looked = self._looked.get((view.index, view.width, view.height))
            if looked is None or len(looked.sight) != len(of_view):  # the cells were rebuilt since
                continue
            looked.live = [(-a, -b, c, d) if a > -(1 << 30) else NOTHING for a, b, c, d in of_view]

    def flips(self) -> tuple[int, int]:
        """Return the numbers of occluded pixels that became visible and of all occluded pixels, since the last call."""
        state = self._flips, self._dark
        self._flips = self._dark = 0
        return state

    def state(self) -> list[list[int]]:
        """Return rows for a checkpoint: one for the cells, then one for each view and cell."""
        rows = [[-1, self._cells]]
        for key, looked in sorted(self._looked.items()):
            live = looked.live
            for cell, sight in enumerate(looked.sight):
                rows.append([*key, cell, *sight, *(() if live is None else live[cell])])
        return rows

    def load_state(self, state: Sequence[Sequence[int]]) -> None:
        """Restore the state that `state` returned."""
        self._looked, self._cells = {}, 0
        for row in state:
            if row[0] < -1:  # of `--pipeline.exchange`, which earlier versions had
                continue
            if row[0] < 0:
                self._cells = row[1]
                continue
            index, width, height, _, *numbers = row
            looked = self._looked.setdefault((index, width, height), _Looked([], [] if len(numbers) > 4 else None))
            looked.sight.append(_rectangle(numbers[:4]))
            if looked.live is not None:
                looked.live.append(_rectangle(numbers[4:]))


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
    """Return the tiles that a rectangle of pixels touches."""
    x0, y0, x1, y1 = live
    return (x0 // TILE * TILE, y0 // TILE * TILE, min(-(-x1 // TILE) * TILE, view.width),
            min(-(-y1 // TILE) * TILE, view.height))  # fmt: skip


def _rectangle(numbers: Sequence[int]) -> Rectangle:
    x0, y0, x1, y1 = numbers
    return x0, y0, x1, y1
