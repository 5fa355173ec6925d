"""Assignment of each view's cells to drawing ranks, and of pixels to owners."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ns_multigpu.cells.occlusion import Occlusion, around
from ns_multigpu.cells.placing import ByCells
from ns_multigpu.cells.seen import camera_position, tiles_seen
from ns_multigpu.cells.tree import CellTree
from ns_multigpu.core.assign.assignment import MOST_KEPT, Assignment, Feedback
from ns_multigpu.core.assign.image_part import Rectangle, area
from ns_multigpu.core.assign.plan import Plan
from ns_multigpu.core.exchange.fragments import BANDS
from ns_multigpu.core.types import SSIM_HALO, TILE, Patch, View, sizes_of

MOST_WHOLE = 12_000_000
"""Pixels of a step's views up to which they are drawn whole. With 8 million on two H200s steps take 0.83 times as long
as with the rectangles that show cells, with 17 million 1.06 times."""


@dataclass
class _Seen:
    """Totals over steps for the log."""

    steps: int = 0
    at_work: float = 0.0
    level: float = 0.0
    drawn: int = 0
    hidden: int = 0
    pixels: int = 0


@dataclass(frozen=True)
class _Sight:
    """Rectangles of tiles in which a camera sees cells, and the cells front to back; found for these boxes and tree."""

    camera: bytes
    boxes: NDArray[np.float64] | None
    tree: CellTree | None
    rectangles: list[Rectangle | None]
    order: tuple[int, ...]


class CellPixels(Assignment):
    """Assignment of cells: each rank draws its cells, over the rectangle of tiles in which a view sees the cell's box.

    Pixels are owned in bands of rows of tiles, by the ranks that draw any of the view. All of this follows from the
    cells' boxes, which every rank knows. A view that sees no cell has owners too: it has a background and an image to
    compare.

    Args:
        space: where the cells are. hide: leave out parts in which a cell contributed nothing (`occlusion`).
    """

    @property
    def learns(self) -> Feedback:  # pyright: ignore[reportIncompatibleVariableOverride]
        return Feedback.LIVE if self._hides else Feedback.NOTHING

    @property
    def recurs(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """True if views are drawn whole: other plans say what each view sees of each cell."""
        return self.fast_links and not self._hides

    def __init__(self, space: ByCells, *, hide: bool = False) -> None:
        self._space, self._hides = space, hide
        self._occlusion = Occlusion()
        self._seen = _Seen()
        self._sights: dict[tuple[int, int, int], _Sight] = {}  # by a training view's index and size
        self._whole: dict[Hashable, Plan] = {}  # made lately

    def figures(self) -> dict[str, float]:
        """Return means over the steps since the last call.

        `gpus_at_work`: the part of the ranks that draw in a step. `drawing_level`: pixels that ranks draw, mean over
        maximum. `pixels_in_sight`: the part of all cells' pixels in tiles that the cells' boxes touch. `pixels_drawn`:
        the part in which a cell contributed, too; other pixels are neither drawn nor sent. `hidden_flips`: the part of
        these other pixels that received light when checked again, and had not before.
        """
        seen, self._seen = self._seen, _Seen()
        if seen.steps == 0:
            return {}
        figures = {"gpus_at_work": seen.at_work, "drawing_level": seen.level}
        flips, seen_dark = self._occlusion.flips()
        parts = {
            "pixels_in_sight": (seen.drawn + seen.hidden) / seen.pixels,
            "pixels_drawn": seen.drawn / seen.pixels,
            "hidden_flips": flips / max(seen_dark, 1),
        }
        return {name: sum_ / seen.steps for name, sum_ in figures.items()} | parts

    def assign(self, views: Sequence[View], ranks: int, holders: Sequence[int] | None = None) -> Plan:
        space = self._space
        drawn: list[list[Patch]] = [[] for _ in range(ranks)]
        order: list[tuple[int, ...]] = []
        hidden: list[Patch] = []
        self._occlusion.keep(space.tree)
        seen_by: list[dict[int, int]] = []
        for position, view in enumerate(views):
            in_sight, front_to_back = self._sight(view)
            seen_by.append({})
            for cell, (wide, rectangles) in enumerate(zip(in_sight, self.visible(view, in_sight), strict=True)):
                hidden += [Patch(position, *dark, cell=cell) for dark in around(wide, rectangles)]
                rank = space.rank_of(cell)
                drawn[rank] += [Patch(position, *seen, cell=cell) for seen in rectangles]
                if rectangles:
                    seen_by[position][rank] = seen_by[position].get(rank, 0) + sum(map(area, rectangles))
            order.append(front_to_back)
        owned = self._owned(views, seen_by, ranks)
        plan = replace(Plan.of(drawn, owned), order=tuple(order), hidden=tuple(hidden), partition=space.tree)
        self._count(plan, views)
        return plan

    def visible(self, view: View, in_sight: Sequence[Rectangle | None]) -> list[list[Rectangle]]:
        """Return the rectangles of each cell to draw in a view, from that in which it is in sight."""
        if self._hides:
            return self._occlusion.drawn(view, in_sight)
        return [[wide] if wide else [] for wide in in_sight]

    def assign_alike(self, views: Sequence[View], ranks: int) -> Plan:
        """Assign patches as `assign` does or, where links are fast and views small, whole views.

        The plan of whole views depends on the cells' order alone, so it recurs.
        """
        if not self.recurs or sum(view.width * view.height for view in views) > MOST_WHOLE:
            return self.assign(views, ranks)
        space = self._space
        order, sizes = tuple(self._sight(view)[1] for view in views), sizes_of(views)
        key = order, sizes, space.tree, ranks
        if key not in self._whole:
            drawn: list[list[Patch]] = [[] for _ in range(ranks)]
            for position, view in enumerate(views):
                for cell in range(space.cells):
                    drawn[space.rank_of(cell)].append(replace(Patch.whole(position, view), cell=cell))
            alike = [dict.fromkeys(map(space.rank_of, range(space.cells)), 1)] * len(views)
            plan = replace(Plan.of(drawn, self._owned(views, alike, ranks)), order=order, partition=space.tree)
            self._whole = {**dict(list(self._whole.items())[1 - 4 * MOST_KEPT :]), key: plan}
        self._count(self._whole[key], views)
        return self._whole[key]

    def _count(self, plan: Plan, views: Sequence[View]) -> None:
        """Add a plan to the totals, if it is of training views."""
        if all(view.index < 0 for view in views):
            return
        pixels = [sum((p.x1 - p.x0) * (p.y1 - p.y0) for p in patches) for patches in plan.drawn]
        self._seen.steps += 1
        self._seen.at_work += sum(1 for patches in plan.drawn if patches) / len(pixels)
        self._seen.level += sum(pixels) / (len(pixels) * max(pixels)) if any(pixels) else 1.0
        self._seen.drawn += sum(pixels)
        self._seen.hidden += sum((p.x1 - p.x0) * (p.y1 - p.y0) for p in plan.hidden)
        self._seen.pixels += self._space.cells * sum(view.width * view.height for view in views)

    @staticmethod
    def _owned(views: Sequence[View], seen_by: Sequence[Mapping[int, int]], ranks: int) -> list[list[Patch]]:
        """Return the bands of views that each rank owns; arguments as `share_rows`'."""
        spans = share_rows([-(-view.height // TILE) for view in views], seen_by, ranks)
        return [
            [_band(position, views[position], *span) for position, span in enumerate(of_rank) if span is not None]
            for of_rank in spans
        ]

    def _sight(self, view: View) -> tuple[list[Rectangle | None], tuple[int, ...]]:
        """Return the rectangle of tiles in which a view sees each cell, and the cells front to back."""
        space, key = self._space, (view.index, view.width, view.height)
        boxes, tree = space.boxes, space.tree
        camera = b"".join(matrix.detach().cpu().numpy().tobytes() for matrix in (view.viewmat, view.K))
        known = self._sights.get(key)
        if known is not None and known.boxes is boxes and known.tree is tree and known.camera == camera:
            return known.rectangles, known.order
        order = tuple(range(space.cells)) if tree is None else tree.order(camera_position(view))
        everywhere: list[Rectangle | None] = [(0, 0, view.width, view.height)] * space.cells
        rectangles = everywhere if boxes is None else tiles_seen(boxes, view)  # None: nothing is known yet
        if view.index >= 0:
            self._sights[key] = _Sight(camera, boxes, tree, rectangles, order)
        return rectangles, order

    def most_exchanged(self, batch: int, width: int, height: int, ranks: int) -> int:
        """See `Assignment`. Larger views use collectives: their exchange takes much longer than its launch."""
        pixels = batch * width * height
        return self._space.cells * pixels if pixels <= MOST_WHOLE else 0

    def counts(self, batch: int, width: int, height: int) -> int:
        return 5 * batch * self._space.cells * BANDS if self._hides else 0

    def learn(self, views: Sequence[View], counts: Sequence[int]) -> None:
        if self._hides and all(view.index >= 0 for view in views):
            shape = -1, len(views), self._space.cells, BANDS, 5
            self._occlusion.learn(views, np.array(counts, dtype=np.int64).reshape(shape))

    def state(self) -> list[list[int]]:
        return self._occlusion.state()

    def load_state(self, state: Sequence[Sequence[int]]) -> None:
        self._occlusion.load_state(state)


def _band(position: int, view: View, first: int, end: int) -> Patch:
    top, bottom = first * TILE, min(end * TILE, view.height)
    if (top, bottom) == (0, view.height):
        return Patch.whole(position, view)
    return Patch(position, 0, top, view.width, bottom, SSIM_HALO)


_LIKE = 4
"""Ranks draw alike of a view if they draw as much, in this many parts of the most that any draws."""


def share_rows(
    rows: Sequence[int], seen_by: Sequence[Mapping[int, int]], ranks: int
) -> list[list[tuple[int, int] | None]]:
    """Distribute the rows of views over the ranks that draw them, as evenly as possible.

    A rank gets as much of a view as fits its capacity, because each border between two ranks costs a halo. The rank
    that draws most of a view comes first, because it does not send what it owns. Views that few ranks draw come before
    others.

    Args:
        rows: of each view. seen_by: the pixels that ranks draw of it; where there are none anybody may own it.
        ranks: how many.

    Returns:
        [rank][view] first and end row; None where a rank owns none of it. Every row has an owner.
    """
    capacity = [-(-sum(rows) // ranks)] * ranks
    spans: list[list[tuple[int, int] | None]] = [[None] * len(rows) for _ in range(ranks)]
    candidates = [dict(some) or dict.fromkeys(range(ranks), 1) for some in seen_by]
    for view in sorted(range(len(rows)), key=lambda v: len(candidates[v])):
        left, given = rows[view], dict.fromkeys(candidates[view], 0)
        most = max(candidates[view].values())
        for rank in sorted(given, key=lambda r: (-(_LIKE * candidates[view][r] // max(most, 1)), -capacity[r], r)):
            given[rank] = min(left, max(capacity[rank], 0))
            left -= given[rank]
        # No rank has capacity for the rest: distribute it evenly.
        for k, rank in enumerate(given):
            given[rank] += (k + 1) * left // len(given) - k * left // len(given)
        start = 0
        for rank, count in given.items():
            capacity[rank] -= count
            if count:
                spans[rank][view] = (start, start + count)
            start += count
    return spans
