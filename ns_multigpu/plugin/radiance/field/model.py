"""nerfacto in cells: what of it this rank has, and how it takes part in rendering rays."""

from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

import torch
import tyro
from nerfstudio.cameras.cameras import Cameras
from nerfstudio.cameras.rays import RayBundle
from nerfstudio.data.scene_box import OrientedBox
from nerfstudio.engine.callbacks import TrainingCallback, TrainingCallbackAttributes, TrainingCallbackLocation
from nerfstudio.model_components.losses import MSELoss
from nerfstudio.model_components.renderers import RGBRenderer
from nerfstudio.model_components.scene_colliders import NearFarCollider
from nerfstudio.models.nerfacto import NerfactoModel, NerfactoModelConfig
from nerfstudio.utils import colormaps
from nerfstudio.utils.external import TCNN_EXISTS
from nerfstudio.utils.rich_utils import CONSOLE
from torch import Tensor, nn

from ns_multigpu.core.dist.collectives import sum_in_place
from ns_multigpu.core.dist.world import World
from ns_multigpu.plugin.faults.errors import InputError
from ns_multigpu.plugin.launch.option_help import Only
from ns_multigpu.plugin.launch.removed_options import REMOVED_VALUES
from ns_multigpu.plugin.model.metrics import OptionalLpips, psnr
from ns_multigpu.plugin.radiance.field.backgrounds import blended, chosen, mean_colour
from ns_multigpu.plugin.radiance.field.draws import background
from ns_multigpu.plugin.radiance.field.fields import Cell, Head
from ns_multigpu.plugin.radiance.field.figures import Figures
from ns_multigpu.plugin.radiance.field.fixed import FixedShapes, why_not
from ns_multigpu.plugin.radiance.field.marching import OccupancySampling
from ns_multigpu.plugin.radiance.field.sampling import Group, Lines, ProposalSampling, in_order, median_depth
from ns_multigpu.plugin.radiance.field.sky import Sky
from ns_multigpu.plugin.radiance.field.spread import WAYS, Joint, Spread
from ns_multigpu.plugin.render.service import RenderService
from ns_multigpu.radiance.contraction import Domain
from ns_multigpu.radiance.exchange import all_segments, cells_of, segments_of_ranks
from ns_multigpu.radiance.integrals import (
    BACKGROUND,
    COLOUR,
    DEPTH,
    MOMENT,
    TRANSMITTANCE,
    Breakable,
    Distortion,
    Family,
    State,
)
from ns_multigpu.radiance.partition import Partition
from ns_multigpu.radiance.segments import Segments, cell_of

_GRID = Only("pipeline.model.sampling", "occupancy")
_STANDARD: tuple[Breakable, ...] = (COLOUR, DEPTH, MOMENT, Distortion(), BACKGROUND)


@dataclass
class NerfactoXLModelConfig(NerfactoModelConfig):
    """nerfacto's options, and how space is cut."""

    _target: type = field(default_factory=lambda: NerfactoXLModel)
    cells: int = 0
    """Into how many cells space is cut, each with a hash grid, a density and proposal networks of its own; 0 for one a
    GPU. A run that goes on from a checkpoint keeps the checkpoint's."""
    spread: Spread = "xl"
    """How the field is spread. xl: cells that are trained together as one field, as in NeRF-XL. ddp: one field on every
    GPU, rays dealt out to as many shares as cells."""
    sampling: Literal["proposals", "occupancy"] = "proposals"
    """Where samples are taken: by nerfacto's proposal networks, or in even steps through what an occupancy grid has not
    as empty (Instant-NGP)."""
    samples_per: Annotated[Literal["ray", "segment"], Only("pipeline.model.sampling", "proposals")] = "ray"
    """What nerfacto's numbers of samples are for, with proposals: a ray, whose k segments have a k-th each; or each
    segment, so that a ray that crosses k cells has k times as many. Segments behind what is seen then have as many as
    those before it, and can paint each view its own background there."""
    grid_resolution: Annotated[int, _GRID] = 128
    """Voxels of a cell's occupancy grid along each axis."""
    alpha_thre: Annotated[float, _GRID] = 0.01
    """How opaque a voxel of it is to be found, to be occupied."""
    march_steps: Annotated[int, _GRID] = 512
    """Even steps of a whole ray, with an occupancy grid."""
    background_color: Literal["auto", "mean", "random", "last_sample", "sky", "black", "white"] = "auto"
    """What is behind what lets light through. auto: with several cells of xl mean, the ray's own mean colour, else the
    last sample's, as in nerfacto. random: in training. sky: a colour for each direction, which all cells share."""
    predict_normals: tyro.conf.Suppress[bool] = False  # not there yet


class NerfactoXLModel(NerfactoModel):
    """nerfacto over cells. It has no cells before `place`."""

    config: NerfactoXLModelConfig
    integrals: ClassVar[tuple[Breakable, ...]] = ()
    """Integrals along rays beside the model's own, which a subclass may have: each is an output of its name."""

    def populate_modules(self) -> None:
        """Sets up all that does not depend on cells."""
        super(NerfactoModel, self).populate_modules()
        config = self.config
        if config.implementation == "tcnn" and not TCNN_EXISTS:
            CONSOLE.print("tiny-cuda-nn is not installed: fields run in torch, which is slower.")
            config.implementation = "torch"  # nerfstudio would do so, and say it of each part of each cell
        self.family = Family([*_STANDARD, *self.integrals])
        self.seed = torch.initial_seed() & (1 << 62) - 1
        self.domain = Domain.box(self.scene_box.aabb) if config.disable_scene_contraction else Domain.unbounded()
        if config.spread not in WAYS:  # of a run of an earlier version
            instead = REMOVED_VALUES["pipeline.model.spread", config.spread]
            raise InputError(f"--pipeline.model.spread {config.spread}: {instead}.")
        self.way: type[Joint] = WAYS[config.spread]
        self.shared: nn.Module = Head(config, self.num_train_data, self.seed)
        self.sky = Sky(self.seed) if config.background_color == "sky" else None
        self.camera_optimizer = config.camera_optimizer.setup(num_cameras=self.num_train_data, device="cpu")
        self.cells = nn.ModuleDict()
        self.partition: Partition | None = None
        self.world = World.single()
        self.sampling: ProposalSampling | OccupancySampling = ProposalSampling(config, self.seed)
        if config.sampling == "occupancy":
            scaled = config.use_gradient_scaling
            self.sampling = OccupancySampling(self.seed, config.march_steps, config.alpha_thre, scaled)
        self.collider = NearFarCollider(near_plane=config.near_plane, far_plane=config.far_plane)
        self.renderer_rgb = RGBRenderer()
        self.rgb_loss = MSELoss()
        from torchmetrics.functional import structural_similarity_index_measure  # seconds of every method's start

        self.psnr, self.ssim, self.lpips = psnr, structural_similarity_index_measure, OptionalLpips()
        self.step = 0
        self.figures: Figures | None = None
        self.may_fix, self.fixed = True, None  # whether training steps may have fixed shapes, and what takes them
        self.elsewhere: RenderService | None = None  # renders for a viewer that is not alone

    def place(self, partition: Partition, world: World) -> None:
        """Make this rank's fields, with parameters that follow from the seed and a cell's number.

        Args:
            partition: of space. world: the ranks.
        """
        self.partition, self.world = partition, world
        self.numbers = cells_of(world.rank, partition.cells, world.size)
        self.spread, config = self.spread_over(partition), self.config
        auto = "mean" if partition.cells > 1 and config.spread == "xl" else "last_sample"
        self.background = auto if config.background_color == "auto" else config.background_color
        self.renderer_rgb.background_color = "black" if self.background in ("sky", "mean") else self.background
        grid = config.grid_resolution if config.sampling == "occupancy" else 0
        made = {str(c): self.made_cell(c, grid) for c in ([0] if self.way.replicated else self.numbers)}
        # As the rest of the model is: in evaluation, a new module would take images' own appearance, not their mean.
        self.cells = nn.ModuleDict(made).to(self.device).train(self.training)
        fits = not why_not(config, self.integrals)
        self.fixed: FixedShapes | None = FixedShapes(self) if self.may_fix and fits else None

    def spread_over(self, partition: Partition) -> Joint:
        """Return how the field is spread over the cells of space."""
        return self.way(partition, self.device)

    def made_cell(self, number: int, grid: int) -> Cell:
        """Return a new cell, with an occupancy grid of so many voxels along each axis; 0 for none."""
        assert isinstance(self.shared, Head)
        coordinates = self.spread.coordinates(number)
        return Cell(number, coordinates, self.config, self.shared, self.num_train_data, self.seed, grid)

    def cell(self, number: int) -> Cell:
        """One of this rank's cells."""
        cell = self.cells["0" if self.way.replicated else str(number)]
        assert isinstance(cell, Cell)
        return cell

    def _is_own(self, name: str) -> bool:
        return name.startswith("cells.") and not self.way.replicated

    def own_parameters(self) -> dict[str, nn.Parameter]:
        """By name, those of this rank's cells."""
        return {name: p for name, p in self.named_parameters() if self._is_own(name)}

    def shared_parameters(self) -> dict[str, nn.Parameter]:
        """By name, those that are equal on every rank: the colour head, embeddings of appearance and pose; in data
        parallel training all."""
        return {name: p for name, p in self.named_parameters() if not self._is_own(name) and p.numel()}

    def get_param_groups(self) -> dict[str, list[nn.Parameter]]:
        """As nerfacto's, of this rank's cells; the colour head and the appearance embedding are with the fields."""
        parts = [part for part in (self.shared, self.sky) if part is not None]
        proposals, fields = [], [p for part in parts for p in part.parameters()]
        for name, p in self.cells.named_parameters():
            if p.requires_grad:
                (proposals if ".proposal_networks." in name else fields).append(p)
        groups = {"fields": fields, **({"proposal_networks": proposals} if proposals else {})}
        self.camera_optimizer.get_param_groups(param_groups=groups)
        return groups

    def get_training_callbacks(
        self, training_callback_attributes: TrainingCallbackAttributes
    ) -> list[TrainingCallback]:
        """Before a step, how sharp proposals are (Mip-NeRF 360, equation 18); after it, when they learn again."""
        return [
            TrainingCallback([TrainingCallbackLocation.BEFORE_TRAIN_ITERATION], self.begin_step, 1),
            TrainingCallback([TrainingCallbackLocation.AFTER_TRAIN_ITERATION], self._end_step, 1),
        ]

    def begin_step(self, step: int) -> None:
        """Makes the model that of a step: how sharp proposals are, and what is drawn at random."""
        self.step = step
        self.sampling.begin_step(step)

    def _end_step(self, step: int) -> None:
        del step
        self.sampling.end_step({int(number): self.cell(int(number)) for number in self.cells})

    # ---- rays ----

    def get_outputs_for_camera(self, camera: Cameras, obb_box: OrientedBox | None = None) -> dict[str, Tensor]:
        """An image. All ranks ask for the same; of a viewer, or with helpers, rank 0 alone: see `RenderService`."""
        if self.elsewhere is not None and (asked := self.elsewhere.outputs(camera, obb_box)) is not None:
            return dict(asked)
        return super().get_outputs_for_camera(camera, obb_box)

    def get_outputs(self, ray_bundle: RayBundle) -> dict[str, Any]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Renders rays with all ranks together; every rank calls it with the same rays, and gets the same pixels.

        In training each rank's outputs have gradients to its own cells and to what is shared, of its own segments.

        Args:
            ray_bundle: [R], with `nears` and `fars`.
        """
        assert self.partition is not None, "there are no cells yet"
        if self.elsewhere is not None and (asked := self.elsewhere.outputs_of_rays(ray_bundle)) is not None:
            return asked
        if self.training:
            self.camera_optimizer.apply_to_raybundle(ray_bundle)
            if self.fixed is not None:
                return self.fixed.outputs(ray_bundle)
        return self.rendered(ray_bundle)

    def rendered(self, rays: RayBundle) -> dict[str, Any]:
        """Render rays as `get_outputs` does, in shapes that follow from them."""
        return self.of_segments(rays, self.spread.take(rays))

    def of_segments(self, bundle: RayBundle, segments: Segments) -> dict[str, Any]:
        """Render rays by their segments, of all ranks' cells."""
        first = segments_of_ranks(segments, self.world.size)[self.world.rank]
        groups = self.own_segments(bundle, segments, first)
        own = in_order(
            [self.family.within(group.taken) for group in groups],
            groups,
            self.family.empty(self.held(segments), bundle.origins),
        )
        rows = all_segments(own, segments, self.world)
        whole, before = self.family.fold(rows, segments.order)
        outputs = self.pixels(whole, bundle)
        if self.training:
            outputs["distortion"] = whole["distortion"]
            outputs |= self.sampling.losses(groups, before[first:], segments.rays)
            outside = 1 - (segments.counts > 0).float().mean()
            self.figures = Figures(segments, sum(group.count for group in groups), len(bundle), outside)
            return outputs
        outputs["depth"] = median_depth(groups, before, whole, segments, first, self.background)
        sum_in_place(outputs["depth"], self.world)
        return outputs

    def own_segments(self, rays: RayBundle, segments: Segments, first: int) -> list[Group]:
        """The samples of this rank's segments: as many in each as nerfacto has in a ray, or, of a ray's k segments, a
        k-th of them (`samples_per`)."""
        nears, fars = rays.nears, rays.fars
        assert nears is not None and fars is not None
        groups: list[Group] = []
        base = list(self.numbers)
        lines, ends = slice(first, segments.begins[base[-1] + 1]), segments.counts[segments.ray]
        longest = segments.order.shape[1]
        if self.config.samples_per == "segment":
            longest, ends = 1, torch.ones_like(ends)
        key = (cell_of(segments)[lines] - base[0]) * (longest + 1) + ends[lines]
        sizes = key.new_zeros(len(base) * (longest + 1)).index_add_(0, key, torch.ones_like(key)).tolist()
        for number, rows in enumerate(key.argsort(stable=True).split(sizes)):
            local, parts = divmod(number, longest + 1)
            if len(rows):
                at = first + rows
                ray = segments.ray[at]
                bundle = rays[ray]
                bundle.nears, bundle.fars = segments.near[at, None], segments.far[at, None]
                lines = Lines(rows, ray, segments.rays, bundle, (nears[ray], fars[ray]))
                group = self.sampling.sample(self.cell(base[local]), base[local], parts, lines, self.training)
                groups += [] if group is None else [group]
        return groups

    def held(self, segments: Segments) -> int:
        """How many of the segments are in this rank's cells."""
        return segments.begins[self.numbers[-1] + 1] - segments.begins[self.numbers[0]]

    def pixels(self, whole: State, rays: RayBundle) -> dict[str, Any]:
        """What is shown of whole rays."""
        assert rays.nears is not None and rays.fars is not None
        through = whole[TRANSMITTANCE]
        colour = self._on_background(whole["colour"], through, whole["background"][:, :3], rays.directions)
        return {
            **{one.name: whole[one.name] for one in self.integrals},
            "rgb": colour if self.training else colour.nan_to_num().clamp(0.0, 1.0),
            "accumulation": 1 - through,
            "expected_depth": (whole["depth"] / (1 - through + 1e-10)).clip(rays.nears, rays.fars),
        }

    def _on_background(self, colour: Tensor, through: Tensor, last: Tensor, directions: Tensor) -> Tensor:
        """As `RGBRenderer.combine_rgb` does, of integrals."""
        behind = chosen(self.background, colour)
        if isinstance(behind, str):
            if behind in ("random", "mean"):  # what is random is blended in the loss, with the image
                return colour if behind == "random" else mean_colour(colour, through)
            behind = last if self.sky is None else self.sky.behind(directions, self.world)
        return colour + through * behind

    # ---- losses and metrics ----

    def truth(self, outputs: dict[str, Any], batch: dict[str, Any]) -> Tensor:
        """Return what the pixels of a batch should be."""
        return batch["image"].to(self.device)

    def get_metrics_dict(self, outputs: dict[str, Any], batch: dict[str, Any]) -> dict[str, Tensor]:
        """As `pixel_metrics`, and what the camera optimizer has to say, for which it waits for the device."""
        metrics = self.pixel_metrics(outputs, batch)
        self.camera_optimizer.get_metrics_dict(metrics)
        return metrics

    def pixel_metrics(self, outputs: dict[str, Any], batch: dict[str, Any]) -> dict[str, Tensor]:
        """PSNR of a batch of rays and, in training, its distortion; the same on every rank."""
        truth = blended(self.truth(outputs, batch), self.background)
        metrics = {"psnr": self.psnr(truth, outputs["rgb"])}
        if self.training:
            metrics["distortion"] = outputs["distortion"].mean()
        return metrics

    def get_loss_dict(
        self, outputs: dict[str, Any], batch: dict[str, Any], metrics_dict: dict[str, Tensor] | None = None
    ) -> dict[str, Tensor]:
        """The losses of a batch. All ranks have the whole of those of pixels, each with a graph of its own segments.

        The proposal loss is this rank's part, and what keeps poses near where they were is rank 0's, for its gradient
        is to be there once.
        """
        image = self.truth(outputs, batch)
        predicted, behind = outputs["rgb"], self.background
        if behind == "random":  # the same on every rank
            behind = self._random_colours(predicted)
            predicted = predicted + behind * (1 - outputs["accumulation"])
        losses = {"rgb_loss": self.rgb_loss(blended(image, behind), predicted)}
        if self.training:
            if "interlevel" in outputs:
                losses["interlevel_loss"] = self.config.interlevel_loss_mult * outputs["interlevel"]
            losses["distortion_loss"] = self.config.distortion_loss_mult * outputs["distortion"].mean()
            if self.world.is_main:
                self.camera_optimizer.get_loss_dict(losses)
        return losses

    def _random_colours(self, pixels: Tensor) -> Tensor:
        """Those behind the pixels [R, 3] of a step."""
        kept = None if self.fixed is None or not self.training else self.fixed.numbers(len(pixels)).background
        return background(torch.empty_like(pixels), self.seed, self.step) if kept is None else kept

    corrects_colours: ClassVar[bool] = False

    def compared(self, outputs: dict[str, Any], image: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """Return a photograph as the image that was rendered should be, and that image, both [H, W, 3]."""
        return self.renderer_rgb.blend_background(image["image"].to(self.device)), outputs["rgb"].to(self.device)

    def get_image_metrics_and_images(
        self, outputs: dict[str, Tensor], batch: dict[str, Any]
    ) -> tuple[dict[str, float], dict[str, Tensor]]:
        """PSNR, SSIM and LPIPS of an image, and pictures of it beside the truth, its opacity and its depth."""
        truth, rgb = self.compared(outputs, batch)
        true, seen = (image.moveaxis(-1, 0)[None] for image in (truth, rgb))
        ssim: Any = self.ssim(true, seen)
        measured = {"psnr": self.psnr(true, seen), "ssim": ssim, "lpips": self.lpips(true, seen)}
        if self.lpips.missing:
            del measured["lpips"]
        depth = colormaps.apply_depth_colormap(outputs["depth"], accumulation=outputs["accumulation"])
        images = {
            "img": torch.cat([truth, rgb], dim=1),
            "accumulation": colormaps.apply_colormap(outputs["accumulation"]),
            "depth": depth,
        }
        return {name: float(value) for name, value in measured.items()}, images
