"""How a radiance field is spread over cells: jointly as NeRF-XL has it, or as what it is compared with (appendix A.4).

All ways have the same fields, samples, losses and optimizers. What differs is what a cell's field sees and what rays it
gets. In all of them every rank knows all rays, so that pixels and losses follow from the cells and not from the ranks.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from nerfstudio.cameras.rays import RayBundle
from torch import Tensor

from ns_multigpu.plugin.faults.errors import InputError
from ns_multigpu.plugin.radiance.fields import CellCoordinates, FocusCoordinates
from ns_multigpu.radiance.overlap import camera_weights, dealt, focuses, tiles, weight_in_tile, whole_rays
from ns_multigpu.radiance.partition import Partition
from ns_multigpu.radiance.segments import Segments, cell_of, clip
from ns_multigpu.radiance.slots import Slots, clip_to_slots

Spread = Literal["xl", "ddp", "mega", "block"]

MEGA_OVERLAP, BLOCK_OVERLAP = 0.15, 0.5


@dataclass(frozen=True)
class Taken:
    """What is rendered of a batch of rays.

    Attributes:
        bundle: the rays of `segments`. segments: of all cells.
        ray: [M] which ray of the batch each ray of `bundle` is; None where they are the same.
        weights: [M] how much each counts in its ray's pixel, where pixels are blended.
    """

    bundle: RayBundle
    segments: Segments
    ray: Tensor | None = None
    weights: Tensor | None = None


class Joint:
    """NeRF-XL: a field a cell, each ray clipped at cells.

    Args:
        cells: of space. boxes: [C, 2, 3] what fields attend to, in the world, where a way has it. device: of rays.
    """

    replicated = False
    """Whether all ranks have the one field, and rays are dealt out."""
    independent = False
    """Whether each field is trained alone, with a colour head and embeddings of its own."""

    def __init__(self, cells: Partition, boxes: Tensor | None, device: torch.device) -> None:
        self.cells, self.boxes = cells, None if boxes is None else boxes.to(device)
        self._extents = cells.extents()
        self._worlds = cells.boxes().to(device)

    @classmethod
    def focus(cls, points: Tensor, cells: Partition) -> Tensor | None:
        """What fields attend to, by the points that space was cut by: [C, 2, 3] in the world."""
        del cls, points, cells
        return None

    def coordinates(self, number: int) -> CellCoordinates | FocusCoordinates:
        """Of positions in the world, for the field of a cell."""
        return CellCoordinates(self._extents[number], self.cells.domain)

    def take(self, rays: RayBundle) -> Taken:
        """What is rendered of rays [R] with `nears` and `fars`."""
        return Taken(rays, self._clipped(rays, self._worlds))

    def slots(self, rays: RayBundle) -> Slots:
        """Rays [R] with `nears` and `fars`, clipped at cells in shapes that do not depend on them."""
        assert rays.nears is not None and rays.fars is not None
        if self._worlds.device != rays.origins.device:
            self._worlds = self._worlds.to(rays.origins.device)  # once: a CUDA graph must not wait for the host
        return clip_to_slots(rays.origins, rays.directions, rays.nears[:, 0], rays.fars[:, 0], self._worlds)

    @staticmethod
    def _clipped(rays: RayBundle, boxes: Tensor) -> Segments:
        assert rays.nears is not None and rays.fars is not None
        return clip(rays.origins, rays.directions, rays.nears[:, 0], rays.fars[:, 0], boxes)

    def _domain(self) -> Tensor:
        """[1, 2, 3] all of space, in the coordinates that cells are cut in."""
        return torch.tensor([[self.cells.domain.lower, self.cells.domain.upper]], dtype=torch.float64)


class Replicated(Joint):
    """Data parallel: one field for all of space, on every rank; the rays are dealt out to as many shares as cells."""

    replicated = True

    def __init__(self, cells: Partition, boxes: Tensor | None, device: torch.device) -> None:
        super().__init__(cells, boxes, device)
        self._all = cells.domain.outward(self._domain()).to(device)

    def coordinates(self, number: int) -> CellCoordinates | FocusCoordinates:
        return CellCoordinates(self._domain()[0], self.cells.domain)

    def take(self, rays: RayBundle) -> Taken:
        return Taken(rays, dealt(self._clipped(rays, self._all), self.cells.cells))


class Mega(Joint):
    """Mega-NeRF: a field a tile, which overlap by 15 %; each is trained alone with the rays that meet its tile, and has
    all else contracted around it. Samples are blended: see `blended`."""

    independent = True

    def __init__(self, cells: Partition, boxes: Tensor | None, device: torch.device) -> None:
        super().__init__(cells, boxes, device)
        self.tiles = tiles(cells, MEGA_OVERLAP).to(device)
        self.extents = self._extents.to(device)
        self._tiles = cells.domain.outward(self.tiles)  # of the world

    @classmethod
    def focus(cls, points: Tensor, cells: Partition) -> Tensor | None:
        return focuses(points, cells, MEGA_OVERLAP)

    def coordinates(self, number: int) -> CellCoordinates | FocusCoordinates:
        assert self.boxes is not None
        return FocusCoordinates(self.boxes[number])

    def take(self, rays: RayBundle) -> Taken:
        """Whole rays, for each tile that they meet: in training."""
        assert rays.nears is not None and rays.fars is not None
        met = self._clipped(rays, self._tiles)
        hits = torch.zeros(len(rays), self.cells.cells, dtype=torch.bool, device=rays.origins.device)
        hits[met.ray, cell_of(met)] = True
        ray, segments = whole_rays(hits, rays.nears, rays.fars)
        return Taken(rays[ray], segments, ray)

    def cut(self, rays: RayBundle) -> Segments:
        """Rays clipped at the cells, without overlap: where samples are taken that are blended."""
        return self._clipped(rays, self._worlds)


class Block(Joint):
    """Block-NeRF: a field for all of space a group of cameras; groups overlap by 50 %. Each is trained alone with its
    cameras' images, and pixels are blended by the distance from the groups' middles."""

    independent = True

    def __init__(self, cells: Partition, boxes: Tensor | None, device: torch.device) -> None:
        super().__init__(cells, boxes, device)
        self._all = cells.domain.outward(self._domain()).to(device)

    @classmethod
    def focus(cls, points: Tensor, cells: Partition) -> Tensor | None:
        if empty := cells.cells - len(cells.of(points).unique()):
            raise InputError(
                f"{empty} of {cells.cells} groups of cameras are empty: the capture has {len(points)} training views. "
                "Use fewer cells (--pipeline.model.cells) and workers."
            )
        return focuses(points, cells, BLOCK_OVERLAP, trim=False)

    def coordinates(self, number: int) -> CellCoordinates | FocusCoordinates:
        return CellCoordinates(self._domain()[0], self.cells.domain)

    def take(self, rays: RayBundle) -> Taken:
        assert self.boxes is not None
        whole = self._clipped(rays, self._all)
        nears, fars = (torch.zeros(len(rays), device=rays.origins.device) for _ in range(2))
        nears[whole.ray], fars[whole.ray] = whole.near, whole.far
        weights = camera_weights(rays.origins, self.boxes, self.cells.of(rays.origins))
        hits = (weights > 0) & (whole.counts > 0)[:, None]
        ray, segments = whole_rays(hits, nears[:, None], fars[:, None])
        return Taken(rays[ray], segments, ray, weights[ray, cell_of(segments)])


WAYS: dict[str, type[Joint]] = {"xl": Joint, "ddp": Replicated, "mega": Mega, "block": Block}


@torch.no_grad()
def blended_samples(
    edges: Tensor,
    rays: RayBundle,
    segments: Segments,
    spread: Mega,
    fields: dict[int, Any],
    summed: Callable[[Tensor], None],
) -> tuple[Tensor, Tensor]:
    """Mega-NeRF's density and colour of samples: those of the fields whose tiles have them, weighted.

    Args:
        edges: [M, S + 1] distances along the rays of segments, of all ranks' cells.
        rays: [R]. segments: M, see `Mega.cut`. spread: the tiles.
        fields: this rank's, by their numbers: (positions [K, 3], ray [K]) -> density [K], colour [K, 3].
        summed: adds a tensor up over the ranks, in place.

    Returns:
        [M, S] and [M, S, 3], on every rank.
    """
    middles = (edges[:, 1:] + edges[:, :-1]) / 2
    ray = segments.ray[:, None].expand_as(middles).reshape(-1)
    positions = rays.origins[ray] + rays.directions[ray] * middles.reshape(-1, 1)
    inward = spread.cells.domain.inward(positions.double())
    table = positions.new_zeros(len(positions), 5)
    for number, field in fields.items():
        weight = weight_in_tile(inward, spread.tiles[number], spread.extents[number]).to(positions)
        (at,) = weight.nonzero(as_tuple=True)
        if len(at):
            density, colour = field(positions[at], ray[at])
            part = torch.cat([density[:, None], colour, torch.ones_like(density[:, None])], 1)
            table[at] += part * weight[at, None]
    summed(table)
    table = table.view(*middles.shape, 5)
    total = table[..., 4].clamp_min(1e-12)
    return table[..., 0] / total, table[..., 1:4] / total[..., None]
