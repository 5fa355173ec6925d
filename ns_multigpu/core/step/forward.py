"""Pictures of one view, rendered by all ranks with the first half of a step (`forward_pass`), without loss and
backward.

The host reads back once, after the picture: whether every capacity sufficed, and the work of each row of tiles. If a
capacity did not suffice, all ranks grow their buffers and render again.

With whole pixels, a view is cut into bands of rows of tiles, one for each rank, with equal work in the previous view.
No halo is needed, since no loss is computed and no densifier counts. With exchanged pixels, the strategy's assignment
decides.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch

from ns_multigpu.core.assign.assignment import ideal_cuts
from ns_multigpu.core.assign.plan import Plan
from ns_multigpu.core.dist.collectives import all_gather_into, max_int
from ns_multigpu.core.exchange.pair_capacities import Pairs, pairs_of
from ns_multigpu.core.exchange.pixel_operators import OwnedPixels
from ns_multigpu.core.exchange.replicated_rows import OwnRows
from ns_multigpu.core.exchange.transport import launched
from ns_multigpu.core.exchange.transports import CollectiveRows
from ns_multigpu.core.kernels import Cameras, Drawn, Kernels, Model, Rows
from ns_multigpu.core.step.forward_pass import ForwardPass, Gathered
from ns_multigpu.core.step.step_settings import padded
from ns_multigpu.core.step.tile_lists import GatheredLists
from ns_multigpu.core.strategy import Strategy
from ns_multigpu.core.types import TILE, Patch, Pixels, Points, View

_ROWS_AT_FIRST = 1 << 16
"""Row capacity per rank of the first picture; one that needs more is drawn again."""
_HEAD = 3
"""Numbers of a rank's message before those by rank and by row of tiles: failed, rows, intersections."""


class CapacityExceeded(RuntimeError):
    """A picture does not fit a rank's device. Raised on all ranks; nothing else has changed."""


@dataclass(frozen=True)
class _Capacities:
    """Capacities, the same on every rank: rows of a rank, rows of each pair of ranks, intersections."""

    rows: int
    pairs: Pairs
    intersections: int

    def after(self, counts_by_rank: Sequence[Sequence[int]]) -> "_Capacities":
        """Return the capacities of the next picture, after one with these needs."""
        ranks = len(counts_by_rank)
        pairs = tuple(tuple(padded(count) for count in row[_HEAD : _HEAD + ranks]) for row in counts_by_rank)
        return _Capacities(
            padded(max(row[1] for row in counts_by_rank)), pairs, padded(max(row[2] for row in counts_by_rank))
        )

    def holds(self, counts_by_rank: Sequence[Sequence[int]]) -> bool:
        """Return True if it was enough on all ranks."""
        return all(
            row[1] <= self.rows
            and row[2] <= self.intersections
            and all(count <= capacity for count, capacity in zip(row[_HEAD:], mine, strict=False))
            for row, mine in zip(counts_by_rank, self.pairs, strict=True)
        )


class Forward:
    """Renderer of single views of one model on all ranks. Every rank creates one and makes the same calls in the same
    order.

    Args:
        strategy: how the points are spread; one that `serves`.
    """

    def __init__(self, strategy: Strategy) -> None:
        self._strategy, self._world = strategy, strategy.world
        self._capacities = _Capacities(_ROWS_AT_FIRST, pairs_of(padded(0), self._world.size), 4 * _ROWS_AT_FIRST)
        self._work: list[int] = []

    @staticmethod
    def serves(strategy: Strategy) -> bool:
        """Return True if the strategy's rows and pixels have operators."""
        return strategy.rows.unsupported_reason is None and strategy.pixels.unsupported_reason is None

    @torch.no_grad()
    def draw(self, kernels: Kernels, points: Points, view: View, passes: int = 1) -> tuple[Plan, list[Pixels]]:
        """Draw a view.

        Args:
            kernels: the primitive's, with depth.
            points: those that this rank holds. view: on the device.
            passes: draws so many parts of the view one after the other, each in less memory.

        Returns:
            whose pixels are whose; and this rank's patches.

        Raises:
            CapacityExceeded: on all ranks; more passes may help.
        """
        # The moments are not read: no step is deferred.
        params = points.params
        model = kernels.model(params, {name: (params[name], params[name]) for name in kernels.parameters}, {}, None)
        work = [0] * _tile_rows(view)
        owned: list[list[Patch]] = [[] for _ in range(self._world.size)]
        pixels: list[Pixels] = []
        for plan in self._plans(view, passes):
            some, counts = self._draw(_Try(self._strategy, kernels, model, view, plan))
            pixels += some
            work = [a + b for a, b in zip(work, counts, strict=True)]
            for of_rank, patches in zip(owned, plan.owned, strict=True):
                of_rank += patches
        self._work = work
        return Plan.of(owned), pixels

    def _plans(self, view: View, passes: int) -> list[Plan]:
        """Return the plan of each pass."""
        ranks = self._world.size
        if self._strategy.pixels.whole:
            bands = cut(view, ranks * passes, self._work)
            return [
                Plan.of([patch] if patch.y0 < patch.y1 else [] for patch in bands[first : first + ranks])
                for first in range(0, len(bands), ranks)
            ]
        plan = self._strategy.plan([view]).without_halos()
        return [plan] if passes == 1 else [_rows_of(plan, band) for band in cut(view, passes, []) if band.y0 < band.y1]

    def _draw(self, attempt: "_Try") -> tuple[list[Pixels], list[int]]:
        """Return this rank's patches and the work of each row of tiles. Retries with larger capacities."""
        while True:
            pixels, counts_by_rank = attempt.run(self._capacities)
            if any(row[0] for row in counts_by_rank):
                ranks = ", ".join(str(rank) for rank, row in enumerate(counts_by_rank) if row[0])
                raise CapacityExceeded(f"out of memory on rank {ranks}, for a picture of {attempt.size} pixels")
            enough = self._capacities.holds(counts_by_rank)
            self._capacities = self._capacities.after(counts_by_rank)
            if enough:
                tail = [row[_HEAD + self._world.size :] for row in counts_by_rank]
                return pixels, [sum(column) for column in zip(*tail, strict=True)]


class _Try:
    """Run one pass over a view with the given capacities."""

    def __init__(self, strategy: Strategy, kernels: Kernels, model: Model, view: View, plan: Plan) -> None:
        self._strategy, self._kernels, self._model, self._view, self._plan = strategy, kernels, model, view, plan
        self._world, self._exchanges = strategy.world, strategy.rows.is_exchanged and strategy.world.size > 1
        self.size = f"{view.width}x{view.height}"
        self._short = False  # whether this rank's memory did not suffice

    def run(self, capacities: _Capacities) -> tuple[list[Pixels], list[list[int]]]:
        """Return this rank's pixels, and every rank's counts: `_HEAD` numbers, rows for each rank, work by row of
        tiles."""
        device, ranks = self._world.device, self._world.size
        words = _HEAD + ranks + _tile_rows(self._view)
        message = torch.zeros(words, dtype=torch.int64, device=device)
        self._short = False
        pixels = self._passed(capacities, message)
        if pixels is None:
            message.zero_()
            message[0] = int(self._short)
        everyone = torch.empty(ranks, words, dtype=torch.int64, device=device)
        all_gather_into(everyone, message, self._world)
        return pixels or [], everyone.tolist()  # the one look

    def _passed(self, capacities: _Capacities, message: torch.Tensor) -> list[Pixels] | None:
        """Return this rank's patches, or None if memory ran out here or, before an exchange, on any rank."""
        try:
            forward = self._forward(capacities)
            rows: Rows | None = forward.project(self._model, self._cameras(), [self._view])
        except torch.OutOfMemoryError:
            forward = rows = None
            self._short = True
        # Rows, and pixels, are exchanged by all ranks or by none.
        if self._fails(self._exchanges) or forward is None or rows is None:
            return None
        try:
            gathered = launched(forward.gather(rows, [self._view], self._plan, range(1)))
            drawn, _ = forward.draw(gathered, self._plan, [self._view])
            self._publish(rows, forward.counts, gathered, message)
        except torch.OutOfMemoryError:
            drawn = None
            self._short = True
        if self._fails(forward.pixels.exchanged) or drawn is None:
            return None
        try:
            owned = launched(forward.pixels.exchange(drawn, self._plan, [self._view]))
            return self._pixels(drawn, owned, forward)
        except torch.OutOfMemoryError:
            self._short = True
            return None

    def _fails(self, exchanged: bool) -> bool:
        """Return True if memory did not suffice on this rank, or before an exchange on any."""
        return max_int(int(self._short), self._world) > 0 if exchanged and self._world.size > 1 else self._short

    def _cameras(self) -> Cameras:
        view = self._view
        size, times = (view.width, view.height), view.K.new_full((1,), view.time)
        return Cameras(view.viewmat[None].contiguous(), view.K[None].contiguous(), size, times)

    def _forward(self, capacities: _Capacities) -> ForwardPass:
        shape = (self._world, self._kernels, capacities.rows, capacities.pairs, 0)
        transport = CollectiveRows(*shape) if self._exchanges else OwnRows(*shape)
        lists = GatheredLists(self._kernels, capacities.intersections)
        return ForwardPass(self._strategy, self._kernels, transport, lists, capacities.rows)

    def _publish(self, rows: Rows, counts: torch.Tensor, gathered: Gathered, message: torch.Tensor) -> None:
        """Set the counts of rows and lists that this rank publishes."""
        ranks, (offsets, _, met) = self._world.size, gathered.lists
        message[1:2] = rows.count
        message[_HEAD : _HEAD + ranks] = counts
        own = self._plan.drawn[self._world.rank]
        if not own:
            return
        message[2:3] = met
        if self._strategy.pixels.whole:  # the patch is a band
            work = offsets[:: -(-self._view.width // TILE)].long().diff()
            first = _HEAD + ranks + own[0].y0 // TILE
            message[first : first + len(work)] = work

    def _pixels(self, drawn: Drawn, owned: OwnedPixels, forward: ForwardPass) -> list[Pixels]:
        """Return the patches that this rank owns."""
        shown = {} if forward.pixels.exchanged else self._kernels.shown(drawn, self._view)
        found: list[Pixels] = []
        start = 0
        for patch in self._plan.owned[self._world.rank]:
            height, width = patch.y1 - patch.y0, patch.x1 - patch.x0
            piece = slice(start, start + height * width)
            start = piece.stop
            image, alpha = owned.color[piece].view(height, width, -1), owned.alpha[piece].view(height, width, 1)
            extra = {name: values[piece].view(height, width, -1) for name, values in shown.items()}
            depth = image[..., 3:4] / alpha.clamp(min=1e-10)
            found.append(Pixels(patch, image[..., :3], alpha, depth, extra=extra))
        return found


def _rows_of(plan: Plan, band: Patch) -> Plan:
    """Return the part of a plan in a band of whole rows of tiles."""

    def within(patches: Sequence[Patch]) -> tuple[Patch, ...]:
        cut_ = (replace(p, y0=max(p.y0, band.y0), y1=min(p.y1, band.y1)) for p in patches)
        return tuple(patch for patch in cut_ if patch.y0 < patch.y1)

    drawn, owned = (tuple(map(within, ranks)) for ranks in (plan.drawn, plan.owned))
    return replace(plan, drawn=drawn, owned=owned, hidden=within(plan.hidden))


def cut(view: View, bands: int, work: Sequence[int]) -> list[Patch]:
    """Cut a view into bands of whole rows of tiles, of about equal work. Some may be empty.

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
