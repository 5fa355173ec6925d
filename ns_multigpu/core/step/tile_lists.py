"""Lists of the splats of each tile of a rank's patches, nearest first.

They are made by the rank that draws them, or by a sort of all splats of all views over all ranks (torch-dgx, section
4). Both give the same lists.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from cuda_ext.ops.sort.peer_sort import intersect_keys
from ns_multigpu.core.assign.plan import Plan
from ns_multigpu.core.dist.peer_memory import PeerBuffer
from ns_multigpu.core.dist.world import World
from ns_multigpu.core.kernels import Kernels, Lists, Received, Rows
from ns_multigpu.core.sort.peer_sort import SortBuffers, SortedPairs, peer_merge_sort, sorted_band_lists
from ns_multigpu.core.step.step_settings import StepSettings
from ns_multigpu.core.types import TILE, Patch, View, sizes_of


class TileLists(ABC):
    """One rank's lists. Every rank makes one and calls `begin`, then `finish`, once a step.

    Attributes:
        capturable: whether CUDA graphs can hold it.
    """

    capturable: bool = True

    def begin(self, rows: Rows, views: Sequence[View]) -> None:
        """Read this rank's own rows before they are sent. Does nothing unless overridden."""
        return

    @abstractmethod
    def finish(self, received: Received, patches: Sequence[int], plan: Plan, views: Sequence[View]) -> Lists:
        """Return the tile lists of the patches that this rank draws, halo included, from the received rows.

        Args:
            patches: 5 ints a patch (view among those of the rows, x0, y0, x1, y1). plan: where they are from.
            views: the batch's.
        """


class GatheredLists(TileLists):
    """Lists made by the rank that draws them: it intersects and sorts the rows that it received.

    Args:
        capacity: maximum number of intersections.
    """

    def __init__(self, kernels: Kernels, capacity: int) -> None:
        self._kernels, self._capacity = kernels, capacity

    def finish(self, received: Received, patches: Sequence[int], plan: Plan, views: Sequence[View]) -> Lists:
        return self._kernels.intersect(received, patches, self._capacity)


class SortedLists(TileLists):
    """Each rank intersects the rows that it owns with whole views; all intersections are sorted over the ranks, and
    each takes the stretches of its bands.

    Args:
        settings: the step's. world: the ranks.
        lines: received from each rank: the transport's.
        peer: sort in each other's memory, or by collectives (which wait for the device).
    """

    capturable = False

    def __init__(self, settings: StepSettings, world: World, lines: int, *, peer: bool) -> None:
        self._settings, self._world, self._segment = settings, world, lines
        self._buffers: SortBuffers | None = None
        if peer:
            size = SortBuffers.size(settings.intersections, world.size)
            self._buffers = SortBuffers(PeerBuffer(size, world), settings.intersections)
        device = world.device
        tiles = settings.views * settings.tile_rows * -(-settings.width // TILE)
        self._bits = 32 + tiles.bit_length()
        # One place more, for lines that are padding.
        self._where = torch.zeros(world.size * settings.rows + 1, dtype=torch.int32, device=device)
        self._lines = torch.arange(lines, dtype=torch.int32, device=device).repeat(world.size)
        self._pairs: SortedPairs | None = None
        self._own: Tensor = torch.zeros(1, dtype=torch.int64, device=device)

    def begin(self, rows: Rows, views: Sequence[View]) -> None:
        s, world = self._settings, self._world
        keys, values, self._own = intersect_keys(
            rows.means2d, rows.conics, rows.opacities, rows.radii, rows.depths, rows.view_ids,
            [side for size in sizes_of(views) for side in size], TILE, world.rank, s.intersections,
        )  # fmt: skip
        self._pairs = peer_merge_sort(keys, values, self._own, self._buffers, world, 32, self._bits)

    def finish(self, received: Received, patches: Sequence[int], plan: Plan, views: Sequence[View]) -> Lists:
        s, world = self._settings, self._world
        assert self._pairs is not None
        place = received.owners.long() * s.rows + received.slots
        place = torch.where((received.radii > 0).all(-1), place, world.size * s.rows)
        self._where.scatter_(0, place, self._lines)
        shapes = [(-(-view.height // TILE), -(-view.width // TILE)) for view in views]
        starts = list(accumulate((rows * columns for rows, columns in shapes), initial=0))
        bands = [[n for patch in drawn for n in _tiles(patch, views, shapes, starts)] for drawn in plan.drawn]
        where = self._where[:-1].view(world.size, s.rows)
        offsets, row_ids, met = sorted_band_lists(self._pairs, bands, where, self._segment, s.intersections, world)
        return offsets, row_ids, torch.maximum(met, self._own)


def _tiles(
    patch: Patch, views: Sequence[View], shapes: Sequence[tuple[int, int]], starts: Sequence[int]
) -> tuple[int, int]:
    """Return the first and the end tile of a band with its halo, counted over the tiles of all views."""
    _, top, _, bottom = patch.rendered(views[patch.view])
    start, columns = starts[patch.view], shapes[patch.view][1]
    return start + top // TILE * columns, start + -(-bottom // TILE) * columns
