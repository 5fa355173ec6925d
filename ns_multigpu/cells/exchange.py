"""Splats or pixels: what brings a cell's layer of a view to the rank that owns some of its pixels.

Either the cell's rank draws the layer and sends pixels, or the owner is sent the splats that touch that part, and draws
the layer itself. Both give the same. For each view, cell and owner the one of fewer bytes is taken, there and back.
Where bytes are not what a step waits for, one kind for all is faster: `Trials` finds out, and says which it is to be.

With ghosts a layer is made of splats of several ranks. Whoever draws it is sent those that the others have: the owner,
or the cell's rank, which then sends pixels besides. A splat that reaches two cells which one rank draws travels once,
and is counted twice: there may be more room than need be, and it may go as pixels where splats were hardly fewer bytes.

How many splats touch a part of a layer is known from when the view was drawn last: where rows of tiles they began and
ended (`cuda_ext.row_spans`), by the rank that has them, which tells the splats of any band. Of a view that nobody has
drawn yet the cell is taken to have as many as it has in the views that are known, in the mean. All ranks are told the
same numbers some steps later (`Learns.SPANS`), so that they decide alike and nobody waits.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from ns_multigpu.cells.seen import Rectangle
from ns_multigpu.cells.tree import CellTree
from ns_multigpu.core.row_spans import spans_length, tile_rows
from ns_multigpu.core.trials import Trials
from ns_multigpu.core.types import SSIM_HALO, TILE, Patch, View

Kind: TypeAlias = Literal["mixed", "pixels", "splats"]
WAYS: Sequence[Kind] = get_args(Kind)
"""Ways to take steps that trials choose among: "mixed" is whichever is fewer bytes."""
PLAIN: Kind = "pixels"
"""The plain way of `Trials`: what travels does not depend on what was counted."""
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
_FEW = 16
"""Room for splats of a source that had none that reached the cell: any that did would cost the step, and those after it
until the host looks."""
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
        kind: "mixed", whichever is fewer bytes; or "pixels" or "splats" alone.
        homes: of each cell its rank. half: pixels are float16 on the wire.
        ghosts: whether splats are drawn in all cells that they reach; else in their own.
        trials: of `WAYS`; they say which it is to be, in the place of `kind`. None for always `kind`.
    """

    def __init__(
        self, kind: Kind, homes: Sequence[int], *, half: bool = False, ghosts: bool = False,
        trials: Trials | None = None,
    ) -> None:  # fmt: skip
        self._kind, self._homes, self._ghosts = kind, tuple(homes), ghosts
        self._trials, self._trial = trials, 0
        self._pixel = PIXEL_BYTES // 2 if half else PIXEL_BYTES
        # Of each rank the cells that it counts splats of; a number for each, a source.
        everywhere = range(len(homes))
        self._of_rank = [[c for c in everywhere if ghosts or homes[c] == rank] for rank in range(max(homes) + 1)]
        self._sources: list[list[tuple[int, int]]] = [[] for _ in homes]  # of each cell: rank, number
        for rank, cells in enumerate(self._of_rank):
            for cell in cells:
                self._sources[cell].append((rank, len(homes) * rank + cell if ghosts else cell))
        numbers = len(homes) * len(self._of_rank) if ghosts else len(homes)
        self._most = max(len(cells) for cells in self._of_rank)
        self._cells = 0  # of which tree
        self._known: dict[tuple[int, int, int], dict[int, _Counted]] = {}  # by a view's index and size, by source
        self._growth = [1000] * numbers  # of a source's splats from one visit to the next, thousandths
        self._sums = np.zeros((numbers, 2), dtype=np.int64)  # of a source: splats in known views, and these views
        self._sent = _Sent()

    def keep(self, tree: CellTree | None) -> None:
        """Forgets everything if it was of other cells than these."""
        cells = 0 if tree is None else crc32(tree.tensor().numpy().tobytes())
        if cells != self._cells:
            self._known, self._cells, self._growth = {}, cells, [1000] * len(self._growth)
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
        if self._trials is not None and self._trials.number != self._trial:
            self._trial = self._trials.number
            if self._trials.chosen == "pixels":  # else it has been counted all the time
                self._grow(self._trials.growth)
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
                    away = self._needed(view, cell, wide, rectangle, rank)
                    if rank != home and self._sends_splats(
                        view, cell, span, rectangle, _sum(away), self._ghosts_bytes(view, cell, wide, rectangle)
                    ):
                        drawn[rank].append(_rows_of(rectangle, wide, position, cell))
                        foreseen &= _add(room, rank, away)
                    else:
                        stay.append(wide)
                for wide in _joined(stay):
                    foreseen &= _add(room, home, self._needed(view, cell, wide, rectangle, home))
                drawn[home] += [_rows_of(rectangle, rows, position, cell) for rows in _joined(stay)]
        self._sent.steps += int(any(view.index >= 0 for view in views))
        return drawn, tuple(tuple(int(n) for n in row) for row in room) if foreseen else ()

    def numbers(self, sizes: Sequence[tuple[int, int]]) -> int:
        """How many a rank tells of views of these sizes."""
        return self._most * spans_length(sizes)

    def learn(self, views: Sequence[View], counts: Sequence[int]) -> None:
        """Told what `Learns.SPANS` is of a batch, rank after rank."""
        if any(view.index < 0 for view in views):
            return
        numbers, at = np.asarray(counts, dtype=np.int64), 0
        for rank, cells in enumerate(self._of_rank):
            sources = [source for cell in cells for r, source in self._sources[cell] if r == rank]
            for view in views:
                rows = tile_rows(view.height)
                for k in range(self._most):
                    if k < len(sources):
                        self._count(view, sources[k], numbers[at : at + rows], numbers[at + rows : at + 2 * rows])
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
        """A row for the cells, then one a view and source."""
        rows = [[_OF_CELLS, self._cells, *self._growth]]
        for key, cells in sorted(self._known.items()):
            rows += [[_OF_VIEW, *key, number, *of.begun.tolist(), *of.ended.tolist()] for number, of in cells.items()]
        return rows

    def learn_again(self, knowledge: Sequence[Sequence[int]]) -> None:
        """Goes on with what `knowledge` returned; rows of others are left out."""
        self._known, self._sums[:] = {}, 0
        if any(row[0] == _OF_CELLS and len(row) - 2 != len(self._growth) for row in knowledge):
            return  # of a run that had another number of cells, or other ways with splats that cross
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

    def _grow(self, factor: float) -> None:
        """The model has grown so while nobody counted. Sources are taken to have done so until they are counted again,
        for a step without room for its splats has to be taken twice."""
        self._growth = [max(grown, round(1000 * factor)) for grown in self._growth]

    def _put(self, key: tuple[int, int, int], cell: int, one: _Counted) -> None:
        cells = self._known.setdefault(key, {})
        before = cells.get(cell)
        if before is not None:
            self._sums[cell] -= (before.total, 1)
        self._sums[cell] += (one.total, 1)
        cells[cell] = one

    def _needed(
        self, view: View, cell: int, wide: tuple[int, int], rectangle: Rectangle, rank: int
    ) -> dict[int, int | None]:
        """By the rank that has them, room for the splats that a rank is sent to draw some rows of tiles of a layer."""
        return {s: self._splats(view, number, wide, rectangle) for s, number in self._sources[cell] if s != rank}

    def _ghosts_bytes(self, view: View, cell: int, wide: tuple[int, int], rectangle: Rectangle) -> int:
        """What the cell's rank is sent to draw them; 0 where nothing is known."""
        return (ROW_BYTES + GRADIENT_BYTES) * (_sum(self._needed(view, cell, wide, rectangle, self._homes[cell])) or 0)

    def _splats(self, view: View, source: int, wide: tuple[int, int], rectangle: Rectangle) -> int | None:
        """Room for the splats of a source that touch some rows of tiles of a view; None where nothing is known."""
        key = view.index, view.width, view.height
        if key in self._known:
            counted = self._known[key].get(source)
            rows = 0 if counted is None else counted.within(*wide)
            rows = -(-rows * self._growth[source] // 1000)
            return rows + rows // 8 + (_FEW if counted is None and self._ghosts else 64)
        total, known = self._sums[source].tolist()
        if known == 0:  # of a source that has none anywhere: it is far from the cell
            return 64 if self._ghosts and self._known else None
        first, end = _tiles(rectangle)
        part = min(wide[1] - wide[0] + 1, end - first)  # a splat may reach over a border
        return _UNKNOWN * -(-total * part // (known * (end - first))) + 64

    def _sends_splats(
        self, view: View, cell: int, span: tuple[int, int], rectangle: Rectangle, rows: int | None, ghosts: int = 0
    ) -> bool:
        """Whether a part of a layer goes as splats; counts what is sent.

        Args:
            rows: that would travel then. ghosts: bytes of those that travel where it goes as pixels.
        """
        pixels = self._pixel * _pixels_of(span, rectangle, view)
        splats = None if rows is None else (ROW_BYTES + GRADIENT_BYTES) * rows
        cheaper = splats is not None and splats < pixels + ghosts
        way = self._kind if self._trials is None else self._trials.way
        by_splats = view.index >= 0 and (way == "splats" or (way == "mixed" and cheaper))
        if view.index >= 0:
            self._sent.pixels += 0 if by_splats else pixels
            self._sent.splats += (splats or 0) if by_splats else ghosts
            self._sent.as_pixels += not by_splats
            self._sent.as_splats += by_splats
        return by_splats


def _sum(rooms: Mapping[int, int | None]) -> int | None:
    """Of all; None where one is not known."""
    known = [rows for rows in rooms.values() if rows is not None]
    return sum(known) if len(known) == len(rooms) else None


def _add(room: NDArray[np.int64], rank: int, rooms: Mapping[int, int | None]) -> bool:
    """Adds what a rank is sent, by who sends it; whether all of it was foreseen."""
    for source, rows in rooms.items():
        room[source, rank] += rows or 0
    return None not in rooms.values()


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
