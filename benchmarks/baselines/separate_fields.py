"""Mega-NeRF and Block-NeRF, which NeRF-XL is compared with (appendix A.4): fields that are trained alone.

They are `nerfacto-xl` with other rays for each field, fields with colour heads of their own, and blended pictures. All
else is the product's: fields, samples, losses, optimizers, checkpoints. `benchmarks.captures.radiance` trains them as
its ways `mega-C` and `block-C`. A run's config.yml names classes of this module.
"""

import copy
import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from nerfstudio.cameras.rays import Frustums, RayBundle, RaySamples
from nerfstudio.field_components.field_heads import FieldHeadNames
from nerfstudio.field_components.spatial_distortions import SpatialDistortion
from torch import Tensor, nn

from benchmarks.baselines.overlap import camera_weights, focuses, tiles, weight_in_tile, whole_rays
from ns_multigpu.core.dist.collectives import broadcast_object, max_int, sum_in_place
from ns_multigpu.methods import nerfacto_xl
from ns_multigpu.plugin.faults.errors import InputError
from ns_multigpu.plugin.radiance.field.fields import Cell, CellCoordinates, Head
from ns_multigpu.plugin.radiance.field.model import NerfactoXLModel, NerfactoXLModelConfig
from ns_multigpu.plugin.radiance.field.sampling import Group, in_order, median_depth
from ns_multigpu.plugin.radiance.field.spread import Joint
from ns_multigpu.plugin.radiance.run.config import RadianceTrainerConfig
from ns_multigpu.plugin.radiance.run.pipeline import RadiancePipeline, RadiancePipelineConfig
from ns_multigpu.plugin.radiance.run.saved import SavedField
from ns_multigpu.radiance.contraction import contract, expand
from ns_multigpu.radiance.exchange import all_segments, segments_of_ranks
from ns_multigpu.radiance.integrals import Samples
from ns_multigpu.radiance.partition import Partition
from ns_multigpu.radiance.segments import Segments, cell_of

MEGA_OVERLAP, BLOCK_OVERLAP = 0.15, 0.5
_BOXES = "boxes"
"""Name, among what a checkpoint's cells share, of the boxes that fields attend to."""
_INSIDE = 1e-5


class FocusCoordinates(CellCoordinates):
    """All of space as nerfacto's fields take it, contracted around a box (Mip-NeRF 360), each axis by itself.

    Args:
        box: [2, 3] finite, in the world: within [-1, 1] in the field's coordinates.
    """

    middle: Tensor
    half_size: Tensor

    def __init__(self, box: Tensor) -> None:
        SpatialDistortion.__init__(self)
        self.register_buffer("middle", box.mean(0).float(), persistent=False)
        self.register_buffer("half_size", ((box[1] - box[0]) / 2).float(), persistent=False)

    def forward(self, positions: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return positions in the field, of those in the world [..., 3]."""
        return contract((positions - self.middle) / self.half_size).clamp(-2 + 4 * _INSIDE, 2 - 4 * _INSIDE)

    def outward(self, inside: Tensor) -> Tensor:
        """Return positions in the world, of what `forward` gives; finite."""
        return expand(inside.clamp(-2 + 4 * _INSIDE, 2 - 4 * _INSIDE)) * self.half_size + self.middle


@dataclass(frozen=True)
class Shown:
    """Rays [M], each once for each field that it is shown to.

    Attributes:
        ray: [M] the batch's. segments: one each. weights: [M] of each in its ray's pixel, where pixels are blended.
    """

    ray: Tensor
    segments: Segments
    weights: Tensor | None = None


class Separate(Joint):
    """Fields that attend to boxes, each trained alone.

    Attributes:
        boxes: [C, 2, 3] in the world; set by the model before it makes fields.
    """

    boxes: Tensor

    @staticmethod
    def focus(points: Tensor, cells: Partition) -> Tensor:
        """Return the boxes that fields attend to, [C, 2, 3], by the points that space was cut by."""
        raise NotImplementedError

    def shown(self, rays: RayBundle) -> Shown:
        """Return which field sees which of rays [R]."""
        raise NotImplementedError


class MegaTiles(Separate):
    """A field a tile. Tiles overlap by 15 %; rays that meet a tile train its field, with all else contracted around."""

    def __init__(self, cells: Partition, device: torch.device) -> None:
        super().__init__(cells, device)
        self.tiles = tiles(cells, MEGA_OVERLAP).to(device)
        self.extents = self._extents.to(device)
        self._tiles = cells.domain.outward(self.tiles)  # of the world

    @staticmethod
    def focus(points: Tensor, cells: Partition) -> Tensor:
        return focuses(points, cells, MEGA_OVERLAP)

    def coordinates(self, number: int) -> CellCoordinates:
        return FocusCoordinates(self.boxes[number])

    def shown(self, rays: RayBundle) -> Shown:
        assert rays.nears is not None and rays.fars is not None
        met = self._clipped(rays, self._tiles)
        hits = torch.zeros(len(rays), self.cells.cells, dtype=torch.bool, device=rays.origins.device)
        hits[met.ray, cell_of(met)] = True
        return Shown(*whole_rays(hits, rays.nears, rays.fars))


class BlockGroups(Separate):
    """A field for all of space a group of cameras. Groups overlap by 50 %; each field sees its cameras' images."""

    def __init__(self, cells: Partition, device: torch.device) -> None:
        super().__init__(cells, device)
        self._all = cells.domain.outward(self._domain()).to(device)

    @staticmethod
    def focus(points: Tensor, cells: Partition) -> Tensor:
        if empty := cells.cells - len(cells.of(points).unique()):
            raise InputError(
                f"{empty} of {cells.cells} groups of cameras are empty: the capture has {len(points)} training views. "
                "Use fewer cells (--pipeline.model.cells) and workers."
            )
        return focuses(points, cells, BLOCK_OVERLAP, trim=False)

    def coordinates(self, number: int) -> CellCoordinates:
        return CellCoordinates(self._domain()[0], self.cells.domain)

    def shown(self, rays: RayBundle) -> Shown:
        whole = self._clipped(rays, self._all)
        nears, fars = (torch.zeros(len(rays), device=rays.origins.device) for _ in range(2))
        nears[whole.ray], fars[whole.ray] = whole.near, whole.far
        weights = camera_weights(rays.origins, self.boxes, self.cells.of(rays.origins))
        ray, segments = whole_rays((weights > 0) & (whole.counts > 0)[:, None], nears[:, None], fars[:, None])
        return Shown(ray, segments, weights[ray, cell_of(segments)])


@dataclass
class SeparateModelConfig(NerfactoXLModelConfig):
    """nerfacto-xl's options, with nerfacto's own background."""

    background_color: Any = "last_sample"


@dataclass
class MegaModelConfig(SeparateModelConfig):
    """Mega-NeRF's options."""

    _target: type = field(default_factory=lambda: MegaModel)


@dataclass
class BlockModelConfig(SeparateModelConfig):
    """Block-NeRF's options."""

    _target: type = field(default_factory=lambda: BlockModel)


class SeparateModel(NerfactoXLModel):
    """nerfacto over fields that share poses alone.

    Attributes:
        ways: which field sees which rays. boxes: what fields attend to; set before `place`.
    """

    separation: type[Separate]
    boxes: Tensor
    spread: Separate

    def populate_modules(self) -> None:
        super().populate_modules()
        self.way, self.shared, self.may_fix = self.separation, nn.Module(), False

    def spread_over(self, partition: Partition) -> Separate:
        made = self.separation(partition, self.device)
        made.boxes = self.boxes.to(self.device)
        return made

    def made_cell(self, number: int, grid: int) -> Cell:
        head = Head(self.config, self.num_train_data, self.seed, number)
        coordinates = self.spread.coordinates(number)
        cell = Cell(number, coordinates, self.config, head, self.num_train_data, self.seed, grid)
        cell.head = head
        return cell

    def rendered(self, rays: RayBundle) -> dict[str, Any]:
        """Render rays. In training outputs are of M rays, and "ray" [M] says which of the batch each is."""
        shown = self.spread.shown(rays)
        outputs = self.of_segments(rays[shown.ray], shown.segments)
        if self.training:
            met = torch.zeros(len(rays), dtype=torch.bool, device=shown.ray.device).index_fill_(0, shown.ray, True)
            assert self.figures is not None
            self.figures = replace(self.figures, rays=len(rays), outside=1 - met.float().mean())
            return {**outputs, "ray": shown.ray}
        assert shown.weights is not None
        weights = shown.weights[:, None]
        return {
            name: value.new_zeros(len(rays), value.shape[1]).index_add_(0, shown.ray, value * weights.to(value))
            for name, value in outputs.items()
        }

    def truth(self, outputs: dict[str, Any], batch: dict[str, Any]) -> Tensor:
        image = super().truth(outputs, batch)
        return image[outputs["ray"]] if "ray" in outputs else image


class BlockModel(SeparateModel):
    """Block-NeRF: pictures blend pixels, by how far the camera is from the groups' middles."""

    separation = BlockGroups
    spread: BlockGroups


class MegaModel(SeparateModel):
    """Mega-NeRF: pictures blend samples, by their place in the tiles' overlap."""

    separation = MegaTiles
    spread: MegaTiles

    def rendered(self, rays: RayBundle) -> dict[str, Any]:
        return super().rendered(rays) if self.training else self._blended(rays)

    def _blended(self, rays: RayBundle) -> dict[str, Any]:
        """Render rays by samples as each tile's proposals have them, blended where tiles overlap."""
        segments = self.spread.take(rays)
        first = segments_of_ranks(segments, self.world.size)[self.world.rank]
        groups = self.own_segments(rays, segments, first)
        most = max_int(max((group.taken.edges.shape[1] for group in groups), default=1), self.world)
        # Segments with fewer samples have some of no length behind them.
        own = [torch.cat([e := group.taken.edges, e[:, -1:].expand(-1, most - e.shape[1])], 1) for group in groups]
        none = rays.origins.new_zeros(self.held(segments), most)
        edges = all_segments(in_order(own, groups, none), segments, self.world)
        density, colour = blended_samples(
            edges, rays, segments, self.spread,
            {number: partial(_looked, self.cell(number), rays) for number in self.numbers},
            lambda table: sum_in_place(table, self.world),
        )  # fmt: skip
        assert rays.nears is not None and rays.fars is not None
        near, far = (end[segments.ray] for end in (rays.nears, rays.fars))
        taken = Samples(edges, density, self.sampling.coordinates(edges, near, far), {"colour": colour})
        whole, before = self.family.fold(self.family.within(taken), segments.order)
        every = Group(torch.arange(len(segments), device=edges.device), taken, 0)
        return {**self.pixels(whole, rays), "depth": median_depth([every], before, whole, segments, 0, self.background)}


def _looked(cell: Cell, rays: RayBundle, positions: Tensor, ray: Tensor) -> tuple[Tensor, Tensor]:
    """Return a cell's density [K] and colour [K, 3] at positions [K, 3] of these of the rays [K]."""
    chosen = rays[ray]
    zero = torch.zeros_like(positions[:, None, :1])
    frustums = Frustums(positions[:, None], chosen.directions[:, None], zero, zero, chosen.pixel_area[:, None])
    cameras = None if chosen.camera_indices is None else chosen.camera_indices[:, None]
    found = cell.field(RaySamples(frustums=frustums, camera_indices=cameras))
    return found[FieldHeadNames.DENSITY][:, 0, 0], found[FieldHeadNames.RGB][:, 0]


@torch.no_grad()
def blended_samples(
    edges: Tensor,
    rays: RayBundle,
    segments: Segments,
    spread: MegaTiles,
    fields: dict[int, Any],
    summed: Callable[[Tensor], None],
) -> tuple[Tensor, Tensor]:
    """Return Mega-NeRF's density and colour of samples: those of the fields whose tiles have them, weighted.

    Args:
        edges: [M, S + 1] distances along the rays of segments, of all ranks' cells.
        rays: [R]. segments: M, clipped at cells without overlap. spread: the tiles.
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
    for number, one in fields.items():
        weight = weight_in_tile(inward, spread.tiles[number], spread.extents[number]).to(positions)
        (at,) = weight.nonzero(as_tuple=True)
        if len(at):
            density, colour = one(positions[at], ray[at])
            part = torch.cat([density[:, None], colour, torch.ones_like(density[:, None])], 1)
            table[at] += part * weight[at, None]
    summed(table)
    table = table.view(*middles.shape, 5)
    total = table[..., 4].clamp_min(1e-12)
    return table[..., 0] / total, table[..., 1:4] / total[..., None]


@dataclass
class SeparatePipelineConfig(RadiancePipelineConfig):
    """The pipeline of fields that are trained alone."""

    _target: type = field(default_factory=lambda: SeparatePipeline)
    model: NerfactoXLModelConfig = field(default_factory=BlockModelConfig)


class SeparatePipeline(RadiancePipeline):
    """Keeps the boxes that fields attend to: they are the checkpoint's, or follow from the points that cut space."""

    def points_to_cut(self) -> Tensor | None:
        return super().points_to_cut() if isinstance(self.model, MegaModel) else self.camera_centres()

    def new_cells(self) -> Partition:
        cells = super().new_cells()
        assert isinstance(self.model, SeparateModel) and self.cut_by is not None
        self.model.boxes = broadcast_object(self.model.separation.focus(self.cut_by, cells), 0, self.world)
        return cells

    def place(self, cells: Partition, saved: SavedField | None) -> None:
        if saved is not None:
            assert isinstance(self.model, SeparateModel)
            self.model.boxes = saved.shared[_BOXES]
        super().place(cells, saved)

    def saved_field(self) -> SavedField:
        found = super().saved_field()
        assert isinstance(self.model, SeparateModel)
        return replace(found, shared={**found.shared, _BOXES: self.model.boxes.cpu()})


@dataclass
class SeparateTrainerConfig(RadianceTrainerConfig):
    """Configuration of a run of fields that are trained alone."""

    def check_method(self) -> None:
        """Raise if the options do not go together.

        Raises:
            InputError: they do not.
        """
        super().check_method()
        model: Any = self.pipeline.model
        if model.background_color in ("sky", "mean"):
            raise InputError(
                f"--pipeline.model.background-color {model.background_color}: that is of cells that are trained "
                "together, and each field is trained alone. Give another background."
            )
        if model.depth_loss != 0:
            raise InputError(f"--pipeline.model.depth-loss {model.depth_loss}: the baselines have none. Leave it out.")
        if isinstance(model, MegaModelConfig) and model.disable_scene_contraction:
            raise InputError(
                "--pipeline.model.disable-scene-contraction: each field of Mega-NeRF has what is outside of its tile "
                "contracted around it. Leave it out."
            )


def _method(name: str, kind: type[SeparateModelConfig]) -> SeparateTrainerConfig:
    """Return `nerfacto-xl`'s recipe for other fields."""
    usual: Any = copy.deepcopy(nerfacto_xl.config)
    options = {one.name: getattr(usual.pipeline.model, one.name) for one in dataclasses.fields(usual.pipeline.model)}
    for own in ("_target", "background_color"):
        del options[own]
    options["depth_loss"] = 0.0
    recipe = {one.name: getattr(usual, one.name) for one in dataclasses.fields(usual)}
    pipeline = SeparatePipelineConfig(datamanager=usual.pipeline.datamanager, model=kind(**options))
    return SeparateTrainerConfig(**{**recipe, "method_name": name, "pipeline": pipeline, "fused_steps": "never"})


BASELINES = {
    "mega": _method("nerfacto-mega", MegaModelConfig),
    "block": _method("nerfacto-block", BlockModelConfig),
}
"""Methods by the ways' names in `benchmarks.captures.radiance`."""
