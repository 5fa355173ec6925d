"""Distributions of a radiance field over cells: joint, as in NeRF-XL, or one field in data parallel.

Both have the same fields, samples, losses and optimizers. They differ in the coordinates of a cell's field and in the
rays that it gets. Every rank has all rays, so that pixels and losses depend on the cells and not on the ranks.
"""

from typing import Literal

import torch
from nerfstudio.cameras.rays import RayBundle
from torch import Tensor

from ns_multigpu.plugin.radiance.field.fields import CellCoordinates
from ns_multigpu.radiance.partition import Partition
from ns_multigpu.radiance.segments import Segments, clip, round_robin
from ns_multigpu.radiance.slots import Slots, clip_to_slots

Spread = Literal["xl", "ddp"]


class Joint:
    """NeRF-XL: one field per cell, with each ray clipped at cells.

    Args:
        cells: of space. device: of rays.
    """

    replicated = False
    """True if all ranks have the one field and the rays are distributed round-robin."""

    def __init__(self, cells: Partition, device: torch.device) -> None:
        self.cells = cells
        self._extents = cells.extents()
        self._worlds = cells.boxes().to(device)

    def coordinates(self, number: int) -> CellCoordinates:
        """Return the map from world positions to the coordinates of a cell's field."""
        return CellCoordinates(self._extents[number], self.cells.domain)

    def all_coordinates(self) -> CellCoordinates:
        """Return the map from world positions to the coordinates of one field for all of space."""
        return CellCoordinates(self._domain()[0], self.cells.domain)

    def take(self, rays: RayBundle) -> Segments:
        """Return the segments to render of rays [R] with `nears` and `fars`."""
        return self._clipped(rays, self._worlds)

    def slots(self, rays: RayBundle) -> Slots:
        """Clip rays [R] with `nears` and `fars` at cells, in shapes that do not depend on them."""
        assert rays.nears is not None and rays.fars is not None
        if self._worlds.device != rays.origins.device:
            self._worlds = self._worlds.to(rays.origins.device)  # once: a CUDA graph must not wait for the host
        return clip_to_slots(rays.origins, rays.directions, rays.nears[:, 0], rays.fars[:, 0], self._worlds)

    @staticmethod
    def _clipped(rays: RayBundle, boxes: Tensor) -> Segments:
        assert rays.nears is not None and rays.fars is not None
        return clip(rays.origins, rays.directions, rays.nears[:, 0], rays.fars[:, 0], boxes)

    def _domain(self) -> Tensor:
        """Return all of space [1, 2, 3], in the coordinates that cells are cut in."""
        return torch.tensor([[self.cells.domain.lower, self.cells.domain.upper]], dtype=torch.float64)


class DataParallel(Joint):
    """Data parallel: one field for all of space on every rank, with the rays split into as many parts as cells."""

    replicated = True

    def __init__(self, cells: Partition, device: torch.device) -> None:
        super().__init__(cells, device)
        self._all = cells.domain.outward(self._domain()).to(device)

    def coordinates(self, number: int) -> CellCoordinates:
        return self.all_coordinates()

    def take(self, rays: RayBundle) -> Segments:
        return round_robin(self._clipped(rays, self._all), self.cells.cells)


SPREADS: dict[str, type[Joint]] = {"xl": Joint, "ddp": DataParallel}
