"""Splats or pixels: what brings a cell's layer of a view to the rank that owns some of its pixels.

Either the cell's rank draws the layer and sends pixels, or it sends the splats that touch that part, and the owner
draws the layer itself. Both give the same. For each view, cell and owner the one of fewer bytes is taken, there and
back.

How many splats touch a part of a layer is known from when the view was drawn last: where rows of tiles its splats began
and ended (`core.row_spans`), which tells the splats of any band. Of a view that nobody has drawn yet the cell is taken
to have as many as it has in the views that are known, in the mean. All ranks are told the same numbers some steps later
(`Learns.SPANS`), so that they decide alike and nobody waits.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from ns_multigpu.cells.seen import Rectangle
from ns_multigpu.cells.tree import CellTree
from ns_multigpu.core.row_spans import tile_rows
from ns_multigpu.core.types import SSIM_HALO, TILE, Patch, View

Kind: TypeAlias = Literal["pixels", "splats", "auto"]
Spans: TypeAlias = Sequence[Sequence[tuple[int, int] | None]]
"""[rank][view] first and end row of tiles of what a rank owns."""
PIXEL_BYTES = 4 * 4
"""A layer's pixel, or its gradients: colour and alpha."""
ROW_BYTES, GRADIENT_BYTES = 4 * 12, 4 * 11
"""A splat, and its gradients with absolute ones, as collectives carry them (`cuda_ext.ops.row_wire`)."""
_HALO = 2 * SSIM_HALO
"""Pixels around what a rank owns that its loss looks at: `with_halos`."""
_UNKNOWN = 2
"""Room for splats that nobody has counted yet is so many times the estimate."""
_OF_VIEW, _OF_CELLS = -3, -2
"""Marks of rows in a checkpoint: a view and cell; and the cells."""


@dataclass(frozen=True)
class _Counted:
    """Splats of a cell in a view: how many begin before each row of tiles, and end before it; [rows + 1] int64."""

    begun: NDArray[np.int64]
    ended: NDArray[np.int64]

    def within(self, first: int, end: int) -> int:
        """That touch rows of tiles first to end."""
        return int(self.begun[end] - self.ended[first])

    @property
    def total(self) -> int:
        """All."""
        return int(self.begun[-1])


@dataclass
class _Sent:
    """What was foreseen to travel in some steps: bytes as pixels and as splats, and parts of layers by either way."""

    pixels: int = 0
    splats: int = 0
    steps: int = 0
    as_pixels: int = 0
    as_splats: int = 0


class Exchange:
    """Decides, and remembers what decisions follow from. All ranks are told the same.

    Args:
        kind: "auto"; or "splats", which sends splats alone.
        homes: of each cell its rank. half: pixels are float16 on the wire.
    """

    def __init__(self, kind: Kind, homes: Sequence[int], *, half: bool = False) -> None:
        self._kind, self._homes = kind, tuple(homes)
        self._pixel = PIXEL_BYTES // 2 if half else PIXEL_BYTES
        self._of_rank = [[c for c, home in enumerate(homes) if home == rank] for rank in range(max(homes) + 1)]
        self._most = max(len(cells) for cells in self._of_rank)
        self._cells = 0  # of which tree
        self._known: dict[tuple[int, int, int], dict[int, _Counted]] = {}  # by a view's index and size, by cell
        self._growth = [1000] * len(homes)  # of a cell's splats from one visit to the next, thousandths
        self._sums = np.zeros((len(homes), 2), dtype=np.int64)  # of a cell: splats in known views, and these views
        self._sent = _Sent()

    def keep(self, tree: CellTree | None) -> None:
        """Forgets everything if it was of other cells than these."""
        cells = 0 if tree is None else crc32(tree.tensor().numpy().tobytes())
        if cells != self._cells:
            self._known, self._cells, self._growth = {}, cells, [1000] * len(self._homes)
            self._sums[:] = 0

    def divide(
        self, views: Sequence[View], seen: Sequence[Sequence[Rectangle | None]], owned: Spans
    ) -> tuple[list[list[Patch]], tuple[tuple[int, ...], ...]]:
        """Who draws which part of which layer, by rank; and the room for splats, [source][destination].

        What nobody trains on goes as pixels. There is no room said where splats travel that nobody can estimate.

        Args:
            views: of a batch. seen: of each view, the rectangle in which each cell is to be drawn.
            owned: who owns which of its rows of tiles.
        """
        ranks = len(owned)
        drawn: list[list[Patch]] = [[] for _ in range(ranks)]
        room = np.zeros((ranks, ranks), dtype=np.int64)
        foreseen = True
        for position, view in enumerate(views):
            spans = [of_rank[position] for of_rank in owned]
            for cell, rectangle in enumerate(seen[position]):
                if rectangle is None:
                    continue
                home = self._homes[cell]
                stay: list[tuple[int, int]] = []  # rows of tiles that the cell's rank draws
                for rank, span in enumerate(spans):
                    wide = None if span is None else _wide(span, rectangle, view)
                    if span is None or wide is None:
                        continue
                    rows = 0 if rank == home else self._splats(view, cell, wide, rectangle)
                    if rank == home or not self._sends_splats(view, cell, span, rectangle, rows):
                        stay.append(wide)
                        continue
                    drawn[rank].append(_rows_of(rectangle, wide, position, cell))
                    foreseen = foreseen and rows is not None
                    room[home, rank] += rows or 0
                drawn[home] += [_rows_of(rectangle, rows, position, cell) for rows in _joined(stay)]
        self._sent.steps += int(any(view.index >= 0 for view in views))
        return drawn, tuple(tuple(int(n) for n in row) for row in room) if foreseen else ()

    def learn(self, views: Sequence[View], counts: Sequence[int]) -> None:
        """Told what `Learns.SPANS` is of a batch, rank after rank."""
        if any(view.index < 0 for view in views):
            return
        numbers, at = np.asarray(counts, dtype=np.int64), 0
        for cells in self._of_rank:
            for view in views:
                rows = tile_rows(view.height)
                for k in range(self._most):
                    if k < len(cells):
                        self._count(view, cells[k], numbers[at : at + rows], numbers[at + rows : at + 2 * rows])
                    at += 2 * rows

    def figures(self) -> dict[str, float]:
        """Means since the last time: MB a step as pixels and as splats, foreseen, of all ranks together, with the room
        that splats have; and of the parts of layers that travelled, those that went as splats."""
        sent, self._sent = self._sent, _Sent()
        if sent.steps == 0:
            return {}
        return {
            "mb_as_pixels": sent.pixels / sent.steps / 1e6,
            "mb_as_splats": sent.splats / sent.steps / 1e6,
            "layers_as_splats": sent.as_splats / max(sent.as_splats + sent.as_pixels, 1),
        }

    def knowledge(self) -> list[list[int]]:
        """A row for the cells, then one a view and cell."""
        rows = [[_OF_CELLS, self._cells, *self._growth]]
        for key, cells in sorted(self._known.items()):
            rows += [[_OF_VIEW, *key, cell, *one.begun.tolist(), *one.ended.tolist()] for cell, one in cells.items()]
        return rows

    def learn_again(self, knowledge: Sequence[Sequence[int]]) -> None:
        """Goes on with what `knowledge` returned; rows of others are left out."""
        self._known, self._sums[:] = {}, 0
        for row in knowledge:
            if row[0] == _OF_CELLS:
                self._cells, self._growth = row[1], list(row[2:])
            elif row[0] == _OF_VIEW:
                _, index, width, height, cell, *numbers = row
                begun, ended = np.array(numbers, dtype=np.int64).reshape(2, -1)
                self._put((index, width, height), cell, _Counted(begun, ended))

    @staticmethod
    def owns(row: Sequence[int]) -> bool:
        """Whether a row of a checkpoint is one of these."""
        return row[0] in (_OF_VIEW, _OF_CELLS)

    def _count(self, view: View, cell: int, begins: NDArray[np.int64], ends: NDArray[np.int64]) -> None:
        key = view.index, view.width, view.height
        before = self._known.get(key, {}).get(cell)
        if before is None and not begins.any():
            return  # nothing to remember: most cells of most views
        one = _Counted(np.concatenate([[0], begins.cumsum()]), np.concatenate([[0], ends.cumsum()]))
        if before is not None and before.total > 0:
            grown = min(max(1000 * one.total // before.total, 1000), 2000)
            self._growth[cell] = (3 * self._growth[cell] + grown + 3) // 4
        self._put(key, cell, one)

    def _put(self, key: tuple[int, int, int], cell: int, one: _Counted) -> None:
        cells = self._known.setdefault(key, {})
        before = cells.get(cell)
        if before is not None:
            self._sums[cell] -= (before.total, 1)
        self._sums[cell] += (one.total, 1)
        cells[cell] = one

    def _splats(self, view: View, cell: int, wide: tuple[int, int], rectangle: Rectangle) -> int | None:
        """Room for the splats of a cell that touch some rows of tiles of a view; None where nothing is known of it."""
        key = view.index, view.width, view.height
        if key in self._known:
            counted = self._known[key].get(cell)
            rows = 0 if counted is None else counted.within(*wide)
            rows = -(-rows * self._growth[cell] // 1000)
            return rows + rows // 8 + 64
        total, known = self._sums[cell].tolist()
        if known == 0:
            return None
        first, end = _tiles(rectangle)
        part = min(wide[1] - wide[0] + 1, end - first)  # a splat may reach over a border
        return _UNKNOWN * -(-total * part // (known * (end - first))) + 64

    def _sends_splats(
        self, view: View, cell: int, span: tuple[int, int], rectangle: Rectangle, rows: int | None
    ) -> bool:
        """Whether a part of a layer goes as splats; counts what is sent."""
        pixels = self._pixel * _pixels_of(span, rectangle, view)
        splats = None if rows is None else (ROW_BYTES + GRADIENT_BYTES) * rows
        cheaper = splats is not None and splats < pixels
        by_splats = view.index >= 0 and (self._kind == "splats" or (self._kind == "auto" and cheaper))
        if view.index >= 0:
            self._sent.pixels += 0 if by_splats else pixels
            self._sent.splats += (splats or 0) if by_splats else 0
            self._sent.as_pixels += not by_splats
            self._sent.as_splats += by_splats
        return by_splats


def _tiles(rectangle: Rectangle) -> tuple[int, int]:
    """The rows of tiles that a rectangle of whole tiles covers."""
    return rectangle[1] // TILE, -(-rectangle[3] // TILE)


def _wide(span: tuple[int, int], rectangle: Rectangle, view: View) -> tuple[int, int] | None:
    """The rows of tiles that the owner of a span needs of a rectangle, its halo included; None for none."""
    around = span if span == (0, tile_rows(view.height)) else (span[0] - 1, span[1] + 1)
    first, end = _tiles(rectangle)
    first, end = max(first, around[0]), min(end, around[1])
    return (first, end) if first < end else None


def _pixels_of(span: tuple[int, int], rectangle: Rectangle, view: View) -> int:
    """Pixels that travel there and back where the owner of a span gets a layer as pixels: halos go there alone."""
    x0, y0, x1, y1 = rectangle
    top, bottom = span[0] * TILE, min(span[1] * TILE, view.height)
    halo = 0 if (top, bottom) == (0, view.height) else _HALO
    own = max(min(bottom, y1) - max(top, y0), 0)
    wide = max(min(bottom + halo, y1) - max(top - halo, y0), 0)
    return (x1 - x0) * (own + wide)


def _rows_of(rectangle: Rectangle, rows: tuple[int, int], position: int, cell: int) -> Patch:
    x0, y0, x1, y1 = rectangle
    return Patch(position, x0, max(y0, rows[0] * TILE), x1, min(y1, rows[1] * TILE), cell=cell)


def _joined(spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Stretches of rows, together where they touch."""
    joined: list[tuple[int, int]] = []
    for first, end in sorted(spans):
        if joined and first <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(joined[-1][1], end)
        else:
            joined.append((first, end))
    return joined
