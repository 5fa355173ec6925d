"""Which splats each tile of a rank's bands has, nearest first: found by the rank that draws them, or by a sort of all
splats of all views over all ranks (torch-dgx, section 4). Both give the same lists."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

import cuda_ext
from cuda_ext.ops.fused import SplatRows
from cuda_ext.ops.peer_sort import intersect_keys
from cuda_ext.ops.row_exchange import ArrivedRows
from ns_multigpu.core.peer_memory import PeerBuffer
from ns_multigpu.core.peer_sort import SortBuffers, SortedPairs, peer_merge_sort, sorted_band_lists
from ns_multigpu.core.placement import Plan
from ns_multigpu.core.types import Patch, View
from ns_multigpu.core.world import World
from ns_multigpu.primitives.gaussians import TILE
from ns_multigpu.primitives.tile_settings import TileSettings

Lists = tuple[Tensor, Tensor, Tensor]
"""As `intersect_capacity` returns them: tile_offsets, row_ids, and how many intersections there should be room for."""


class TileLists(ABC):
    """One rank's lists. Every rank makes one and calls `begin`, then `finish`, once a step."""

    def begin(self, rows: SplatRows, views: Sequence[View]) -> None:
        """Looks at this rank's own rows, before they are sent."""
        return

    @abstractmethod
    def finish(self, arrived: ArrivedRows, plan: Plan, views: Sequence[View]) -> Lists:
        """The lists of this rank's patches, halo included, of rows that arrived."""


class GatheredLists(TileLists):
    """Each rank intersects and sorts what it is about to draw.

    Args:
        settings: the step's. rank: this one.
    """

    def __init__(self, settings: TileSettings, rank: int) -> None:
        self._capacity, self._rank = settings.intersections, rank

    def finish(self, arrived: ArrivedRows, plan: Plan, views: Sequence[View]) -> Lists:
        patches = [n for patch in plan[self._rank] for n in (patch.view, *patch.rendered(views[patch.view]))]
        return cuda_ext.intersect_capacity(
            arrived.means2d, arrived.conics, arrived.opacities, arrived.radii, arrived.depths, arrived.view_ids,
            patches, tile_size=TILE, capacity=self._capacity,
        )  # fmt: skip


class SortedLists(TileLists):
    """Each rank intersects the rows that it owns with whole views; all intersections are sorted over the ranks, and
    each takes the stretches of its bands.

    Args:
        settings: the step's. world: the ranks.
        peer: sort in each other's memory, or by collectives (which wait for the device).
    """

    def __init__(self, settings: TileSettings, world: World, *, peer: bool) -> None:
        self._settings, self._world = settings, world
        self._buffers: SortBuffers | None = None
        if peer:
            size = SortBuffers.size(settings.intersections, world.size)
            self._buffers = SortBuffers(PeerBuffer(size, world), settings.intersections)
        device = world.device
        self._columns = -(-settings.width // TILE)
        self._bits = 32 + (settings.views * settings.tile_rows * self._columns).bit_length()
        # One place more, for lines that are padding.
        self._where = torch.zeros(world.size * settings.rows + 1, dtype=torch.int32, device=device)
        self._lines = torch.arange(settings.segment, dtype=torch.int32, device=device).repeat(world.size)
        self._pairs: SortedPairs | None = None
        self._own: Tensor = torch.zeros(1, dtype=torch.int64, device=device)

    def begin(self, rows: SplatRows, views: Sequence[View]) -> None:
        s, world = self._settings, self._world
        keys, values, self._own = intersect_keys(
            rows.means2d, rows.conics, rows.opacities, rows.radii, rows.depths, rows.view_ids,
            (s.width, s.height) * s.views, TILE, world.rank, s.intersections,
        )  # fmt: skip
        self._pairs = peer_merge_sort(keys, values, self._own, self._buffers, world, 32, self._bits)

    def finish(self, arrived: ArrivedRows, plan: Plan, views: Sequence[View]) -> Lists:
        s, world = self._settings, self._world
        assert self._pairs is not None
        place = arrived.owners.long() * s.rows + arrived.slots
        place = torch.where((arrived.radii > 0).all(-1), place, world.size * s.rows)
        self._where.scatter_(0, place, self._lines)
        bands = [[n for patch in patches for n in self._tiles(patch, views)] for patches in plan]
        where = self._where[:-1].view(world.size, s.rows)
        offsets, row_ids, met = sorted_band_lists(self._pairs, bands, where, s.segment, s.intersections, world)
        return offsets, row_ids, torch.maximum(met, self._own)

    def _tiles(self, patch: Patch, views: Sequence[View]) -> tuple[int, int]:
        """First and end tile of a patch with its halo, among those of all views."""
        _, top, _, bottom = patch.rendered(views[patch.view])
        first = patch.view * self._settings.tile_rows
        return (first + top // TILE) * self._columns, (first + -(-bottom // TILE)) * self._columns
