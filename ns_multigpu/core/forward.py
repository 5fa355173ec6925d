# torch annotates only part of itself:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
"""The forward half of a step, for one view: rows, their way to who draws them, lists, pixels. No loss and no way back.

It runs a primitive's kernels, as a fused step does, and like it reads nothing back before the picture is made. Then all
ranks look once: whether every capacity sufficed, and how much work each row of tiles was. If one did not, all make room
and draw again. The next view is cut by what was learned of this one.

A view is cut into bands of rows of tiles, one a rank. Where every rank has all points that costs nothing but the cut:
no loss is computed, so that nobody needs a halo, and no densifier counts.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from cuda_ext.ops.row_exchange import route_lines
from ns_multigpu.core.assignment import ideal_cuts
from ns_multigpu.core.collectives import all_gather_into, max_int
from ns_multigpu.core.kernels import Arrived, Cameras, Drawn, Kernels, Model, Rows
from ns_multigpu.core.legs import RowsStay, WholePixels
from ns_multigpu.core.pairs import Pairs, pairs_of
from ns_multigpu.core.plan import Plan
from ns_multigpu.core.step_settings import padded
from ns_multigpu.core.strategy import Strategy
from ns_multigpu.core.transport import launched
from ns_multigpu.core.transports import CollectiveRows
from ns_multigpu.core.travelling_rows import RowsTravel
from ns_multigpu.core.types import TILE, Patch, Pixels, Points, View
from ns_multigpu.core.world import World

_ROWS_AT_FIRST = 1 << 16
"""Rows of a rank that the first picture has room for: one that needs more is drawn again."""
_HEAD = 3
"""Numbers of a rank's message before those by rank and by row of tiles: failed, rows, intersections."""


class NoRoom(RuntimeError):
    """A picture does not fit a rank's device. Raised on all ranks; nothing else has changed."""


@dataclass(frozen=True)
class _Room:
    """Capacities, the same on every rank: rows of a rank, rows of each pair of ranks, intersections."""

    rows: int
    pairs: Pairs
    intersections: int

    def after(self, told: Sequence[Sequence[int]]) -> "_Room":
        """What the next picture has room for, when this one needed that much."""
        ranks = len(told)
        pairs = tuple(tuple(padded(count) for count in row[_HEAD : _HEAD + ranks]) for row in told)
        return _Room(padded(max(row[1] for row in told)), pairs, padded(max(row[2] for row in told)))

    def holds(self, told: Sequence[Sequence[int]]) -> bool:
        """Whether it was enough on all ranks."""
        return all(
            row[1] <= self.rows
            and row[2] <= self.intersections
            and all(count <= room for count, room in zip(row[_HEAD:], mine, strict=False))
            for row, mine in zip(told, self.pairs, strict=True)
        )


class Forward:
    """Draws views of one model with all ranks. Every rank makes one and calls it with the same, in the same order.

    Args:
        strategy: how the points are spread; one that `serves`.
    """

    def __init__(self, strategy: Strategy) -> None:
        self._world, self._travels = strategy.world, strategy.rows.travels and strategy.world.size > 1
        self._room = _Room(_ROWS_AT_FIRST, pairs_of(padded(0), self._world.size), 4 * _ROWS_AT_FIRST)
        self._work: list[int] = []

    @staticmethod
    def serves(strategy: Strategy) -> bool:
        """Whether the operators know a way for the strategy's rows and pixels. A class derived from a leg that they
        know may do something else."""
        return type(strategy.rows) in (RowsStay, RowsTravel) and type(strategy.pixels) is WholePixels

    @torch.no_grad()
    def draw(self, kernels: Kernels, points: Points, view: View, passes: int = 1) -> tuple[Plan, list[Pixels]]:
        """Draws a view.

        Args:
            kernels: the primitive's, with depth.
            points: those that this rank holds. view: on the device.
            passes: draws so many parts of the view one after the other, each in less memory.

        Returns:
            who has drawn what; and this rank's patches.

        Raises:
            NoRoom: on all ranks; more passes may help.
        """
        bands = cut(view, self._world.size * passes, self._work)
        # Nobody reads the moments: no step is put off.
        params = points.params
        model = kernels.model(params, {name: (params[name], params[name]) for name in kernels.parameters}, {}, None)
        work = [0] * _tile_rows(view)
        drawn: list[list[Patch]] = [[] for _ in range(self._world.size)]
        pixels: list[Pixels] = []
        for first in range(0, len(bands), self._world.size):
            patches = bands[first : first + self._world.size]
            one, counts = self._draw(_Try(kernels, model, view, patches, self._world, self._travels))
            pixels += [] if one is None else [one]
            work = [a + b for a, b in zip(work, counts, strict=True)]
            for rank, patch in enumerate(patches):
                drawn[rank] += [patch] if patch.y0 < patch.y1 else []
        self._work = work
        return Plan.of(drawn), pixels

    def _draw(self, attempt: "_Try") -> tuple[Pixels | None, list[int]]:
        """One pass: this rank's patch, if it has any, and the work of each row of tiles."""
        while True:
            pixels, told = attempt.run(self._room)
            if any(row[0] for row in told):
                ranks = ", ".join(str(rank) for rank, row in enumerate(told) if row[0])
                raise NoRoom(f"out of memory on rank {ranks}, for a picture of {attempt.size} pixels")
            enough = self._room.holds(told)
            self._room = self._room.after(told)
            if enough:
                tail = [row[_HEAD + self._world.size :] for row in told]
                return pixels, [sum(column) for column in zip(*tail, strict=True)]


class _Try:
    """One pass over a view, with whatever room there is."""

    def __init__(
        self, kernels: Kernels, model: Model, view: View, patches: Sequence[Patch], world: World, travels: bool
    ) -> None:
        self._kernels, self._model, self._view, self._patches = kernels, model, view, patches
        self._world, self._travels = world, travels
        self._own = patches[world.rank]
        self.size = f"{view.width}x{view.height}"

    def run(self, room: _Room) -> tuple[Pixels | None, list[list[int]]]:
        """What was drawn here, and what every rank tells: `_HEAD` numbers, rows for each rank, work by row of tiles."""
        device, ranks = self._world.device, self._world.size
        words = _HEAD + ranks + _tile_rows(self._view)
        message = torch.zeros(words, dtype=torch.int64, device=device)
        pixels: Pixels | None = None
        try:
            projected = self._project(room)
        except torch.OutOfMemoryError:
            projected = None
        short = int(projected is None)
        # Rows are exchanged by all ranks or by none.
        anybody = max_int(short, self._world) if self._travels else short
        if projected is None or anybody:
            message[0] = short
        else:
            rows, transport, counts = projected
            try:
                pixels = self._blend(room, self._arrive(rows, transport, counts), message)
                message[1:2] = rows.count
                message[_HEAD : _HEAD + ranks] = counts
            except torch.OutOfMemoryError:
                pixels = None
                message.zero_()
                message[0] = 1
            del rows, transport, counts
        del projected
        everyone = torch.empty(ranks, words, dtype=torch.int64, device=device)
        all_gather_into(everyone, message, self._world)
        return pixels, everyone.tolist()  # the one look

    def _project(self, room: _Room) -> tuple[Rows, CollectiveRows | None, Tensor]:
        view, kernels, world = self._view, self._kernels, self._world
        size, times = (view.width, view.height), view.K.new_full((1,), view.time)
        cameras = Cameras(view.viewmat[None].contiguous(), view.K[None].contiguous(), size, times)
        rows = kernels.project(self._model, cameras, room.rows, (), None)
        counts = torch.zeros(world.size, dtype=torch.int64, device=world.device)
        if not self._travels:
            return rows, None, counts
        transport = CollectiveRows(world, kernels, room.rows, room.pairs, 1)
        place = torch.empty(world.size, room.rows, dtype=torch.int32, device=world.device)
        drawn = self._rectangles()
        route_lines(rows.view_ids, rows.count, rows.means2d, rows.radii, drawn, 0, room.rows, place, counts)
        transport.leave(rows, place, 0, room.rows)
        return rows, transport, counts

    def _rectangles(self) -> list[int]:
        """Of each rank's patch: the rank, the view, x0, y0, x1, y1."""
        return [n for rank, p in enumerate(self._patches) for n in (rank, 0, p.x0, p.y0, p.x1, p.y1)]

    def _arrive(self, rows: Rows, transport: CollectiveRows | None, counts: Tensor) -> Arrived:
        if transport is None:
            return self._kernels.stay(rows, rows.view_ids, rows.point_ids)
        return launched(transport.arrive(rows, counts, 1, self._rectangles()))

    def _blend(self, room: _Room, arrived: Arrived, message: Tensor) -> Pixels | None:
        """This rank's patch, if it has any; sets what it tells of its lists."""
        kernels, own, world = self._kernels, self._own, self._world
        if own.y0 >= own.y1:
            return None
        flat = [0, own.x0, own.y0, own.x1, own.y1]
        lists = kernels.intersect(arrived, flat, room.intersections)
        drawn: Drawn = kernels.draw(arrived, lists, flat)
        offsets, _, met = lists
        message[2:3] = met
        columns = -(-self._view.width // TILE)
        first = _HEAD + world.size + own.y0 // TILE
        work = offsets[::columns].long().diff()
        message[first : first + len(work)] = work
        height, width = own.y1 - own.y0, own.x1 - own.x0
        image, alpha = drawn.color.view(height, width, -1), drawn.alpha.view(height, width, 1)
        shown = kernels.shown(drawn, self._view)
        extra = {name: values.view(height, width, -1) for name, values in shown.items()}
        return Pixels(own, image[..., :3], alpha, image[..., 3:4] / alpha.clamp(min=1e-10), extra=extra)


def cut(view: View, bands: int, work: Sequence[int]) -> list[Patch]:
    """A view in bands of whole rows of tiles, of about equal work; some may be empty.

    Args:
        work: of each row of tiles of a view seen before, of whatever height; empty if there was none.
    """
    rows = _tile_rows(view)
    if work:
        # Pixels that nothing covers are work, too: as much as a quarter of the mean row's.
        least = sum(work) // (4 * len(work)) + 1
        line = [work[row * len(work) // rows] + least for row in range(rows)]
    else:
        line = [1] * rows
    cuts = ideal_cuts([line], bands)
    return [
        Patch(0, 0, first * TILE, view.width, min(last * TILE, view.height)) if first < last else Patch(0, 0, 0, 0, 0)
        for first, last in pairwise(cuts)
    ]


def _tile_rows(view: View) -> int:
    return -(-view.height // TILE)
