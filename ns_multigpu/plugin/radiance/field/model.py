"""nerfacto in cells: this rank's cells, and their part in rendering rays."""

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
from torch import Tensor, nn

from ns_multigpu.core.dist.collectives import sum_in_place
from ns_multigpu.core.dist.world import World
from ns_multigpu.plugin.faults.errors import InputError
from ns_multigpu.plugin.launch.option_help import Only
from ns_multigpu.plugin.launch.removed_options import REMOVED_VALUES
from ns_multigpu.plugin.model.metrics import OptionalLpips, psnr
from ns_multigpu.plugin.radiance.field.backgrounds import Sky, blended, chosen, mean_colour
from ns_multigpu.plugin.radiance.field.draws import background
from ns_multigpu.plugin.radiance.field.fields import Cell, Head, shared_proposals
from ns_multigpu.plugin.radiance.field.figures import Figures
from ns_multigpu.plugin.radiance.field.fixed import FixedShapes, why_not
from ns_multigpu.plugin.radiance.field.marching import OccupancySampling
from ns_multigpu.plugin.radiance.field.sampling import CellSegments, Group, ProposalSampling, in_order, median_depth
from ns_multigpu.plugin.radiance.field.spread import SPREADS, Joint, Spread
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
_NEAREST = 1e-6
"""Distance that disparities are computed of at least; 0 has none."""
_STANDARD: tuple[Breakable, ...] = (COLOUR, DEPTH, MOMENT, Distortion(), BACKGROUND)


@dataclass
class NerfactoXLModelConfig(NerfactoModelConfig):
    """nerfacto's options, and those of the partition of space."""

    _target: type = field(default_factory=lambda: NerfactoXLModel)
    cells: int = 0
    """Number of cells that space is split into, each with its own hash grid and proposal networks; 0 for one per GPU. A
    resumed run keeps the checkpoint's number."""
    spread: Spread = "xl"
    """Distribution of the field. xl: cells trained together as one field, as in NeRF-XL. ddp: one field on every GPU,
    with the rays distributed round-robin into as many parts as cells."""
    sampling: Literal["proposals", "occupancy"] = "proposals"
    """Sampling method: nerfacto's proposal networks, or even steps through the occupied voxels of an occupancy grid
    (Instant-NGP)."""
    samples_per: Annotated[Literal["ray", "segment"], Only("pipeline.model.sampling", "proposals")] = "ray"
    """Unit of nerfacto's sample counts, with proposals. ray: the k segments of a ray have a k-th each. segment: each
    segment has all, so that a ray through k cells has k times as many. Occluded segments then have as many samples as
    visible ones and can overfit each view's background."""
    proposals: Annotated[Literal["cell", "shared"], Only("pipeline.model.sampling", "proposals")] = "cell"
    """Proposal networks. cell: each cell has its own, for its segments. shared: all cells share those of one field,
    which sample whole rays on every GPU; samples are cut at faces. With density shared it gave better held-out views of
    one capture and worse ones of another."""
    density: Annotated[Literal["cell", "shared"], Only("pipeline.model.spread", "xl")] = "shared"
    """Density networks. shared: all cells share one, and their hash grids have the voxels of one grid over all of
    space. cell: each cell has its own, and a hash grid over its box, as in NeRF-XL; held-out views were worse."""
    grid_resolution: Annotated[int, _GRID] = 128
    """Voxels of a cell's occupancy grid along each axis."""
    alpha_thre: Annotated[float, _GRID] = 0.01
    """Minimum opacity of an occupied voxel."""
    march_steps: Annotated[int, _GRID] = 512
    """Even steps of a whole ray, with an occupancy grid."""
    background_color: Literal["auto", "mean", "random", "last_sample", "sky", "black", "white"] = "auto"
    """Background behind transparent rays. auto: mean (the ray's own mean colour) with several cells of xl, else
    last_sample, as in nerfacto. random: in training. sky: a colour for each direction, which all cells share."""
    depth_loss: float | Literal["auto"] = "auto"
    """Weight of the loss by which rays' expected depth agrees with COLMAP's points where a view observes them: of
    disparities, in units of the scene; 0 for none. One ray in eight is then drawn at such a point. It needs COLMAP's
    tracks. auto: 0.01 if the capture has them."""
    implementation: tyro.conf.Suppress[Literal["torch"]] = "torch"
    """Networks run in torch, and hash grids in an operator of ours: CUDA graphs need it, cells begin differently."""
    predict_normals: tyro.conf.Suppress[bool] = False  # not supported

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Load a config.yml; where it is older than options, cells have density networks of their own, and no depths
        are learned."""
        vars(self).update({"density": "cell", "depth_loss": 0.0} | state)


class NerfactoXLModel(NerfactoModel):
    """nerfacto over cells. It has no cells before `place`."""

    config: NerfactoXLModelConfig
    integrals: ClassVar[tuple[Breakable, ...]] = ()
    """Additional integrals along rays, set by subclasses; each is an output of its name."""

    def populate_modules(self) -> None:
        """Create all modules that do not depend on cells."""
        super(NerfactoModel, self).populate_modules()
        config = self.config
        config.implementation = "torch"  # a config.yml of an earlier version may say tcnn
        self.family = Family([*_STANDARD, *self.integrals])
        self.seed = torch.initial_seed() & (1 << 62) - 1
        self.domain = Domain.box(self.scene_box.aabb) if config.disable_scene_contraction else Domain.unbounded()
        if config.spread not in SPREADS:  # from a run of an earlier version
            instead = REMOVED_VALUES["pipeline.model.spread", config.spread]
            raise InputError(f"--pipeline.model.spread {config.spread}: {instead}.")
        self.way: type[Joint] = SPREADS[config.spread]
        shares = config.density == "shared" and config.spread == "xl"
        self.shared: nn.Module = Head(config, self.num_train_data, self.seed, density=shares)
        self.depth_weight = 0.0 if config.depth_loss == "auto" else config.depth_loss
        """Weight of the depth loss; `RadiancePipeline` sets that of "auto"."""
        self.sky = Sky(self.seed) if config.background_color == "sky" else None
        self.camera_optimizer = config.camera_optimizer.setup(num_cameras=self.num_train_data, device="cpu")
        self.cells = nn.ModuleDict()
        self.partition: Partition | None = None
        self.world = World.single()
        shares = config.proposals == "shared" and config.sampling == "proposals" and config.spread == "xl"
        self.proposal_networks = shared_proposals(config, self.domain, self.seed) if shares else None
        self.sampling: ProposalSampling | OccupancySampling = ProposalSampling(
            config, self.seed, self.proposal_networks
        )
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
        self.may_fix, self.fixed = True, None  # True if training steps may have fixed shapes; their renderer
        self.render_override: RenderService | None = None  # renders for a viewer of several ranks

    def place(self, partition: Partition, world: World) -> None:
        """Create this rank's fields, with parameters seeded by the run's seed and the cell's number.

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
        # In the model's mode: a new module would use each image's own appearance in evaluation, not the mean.
        self.cells = nn.ModuleDict(made).to(self.device).train(self.training)
        fits = not why_not(config, self.integrals)
        self.fixed: FixedShapes | None = FixedShapes(self) if self.may_fix and fits else None

    def spread_over(self, partition: Partition) -> Joint:
        """Return the distribution of the field over a partition of space."""
        return self.way(partition, self.device)

    def made_cell(self, number: int, grid: int) -> Cell:
        """Return a new cell with an occupancy grid of this many voxels along each axis; 0 for none."""
        assert isinstance(self.shared, Head)
        coordinates = self.spread.coordinates(number)
        own = self.proposal_networks is None
        voxels = None if self.shared.density is None else self.spread.all_coordinates()
        return Cell(number, coordinates, self.config, self.shared, self.num_train_data, self.seed, grid, own, voxels)

    def cell(self, number: int) -> Cell:
        """Return one of this rank's cells."""
        cell = self.cells["0" if self.way.replicated else str(number)]
        assert isinstance(cell, Cell)
        return cell

    def _is_own(self, name: str) -> bool:
        return name.startswith("cells.") and not self.way.replicated

    def own_parameters(self) -> dict[str, nn.Parameter]:
        """Return the parameters of this rank's cells, by name."""
        return {name: p for name, p in self.named_parameters() if self._is_own(name)}

    def shared_parameters(self) -> dict[str, nn.Parameter]:
        """Return the parameters that are equal on every rank, by name: colour head, appearance and pose embeddings;
        with ddp all."""
        return {name: p for name, p in self.named_parameters() if not self._is_own(name) and p.numel()}

    def summed_parameters(self) -> list[nn.Parameter]:
        """Return the shared parameters whose gradients the ranks sum in this step: none of proposal networks that are
        not trained in it."""
        learns = isinstance(self.sampling, OccupancySampling) or self.sampling.learns
        named = self.shared_parameters().items()
        return [p for name, p in named if p.requires_grad and (learns or not _is_proposal(name))]

    def get_param_groups(self) -> dict[str, list[nn.Parameter]]:
        """Return nerfacto's groups for this rank's cells; the fields' group includes colour head and appearance
        embedding."""
        parts = [part for part in (self.shared, self.sky) if part is not None]
        proposals, fields = [], [p for part in parts for p in part.parameters()]
        if self.proposal_networks is not None:
            proposals += self.proposal_networks.parameters()
        for name, p in self.cells.named_parameters():
            if p.requires_grad:
                (proposals if _is_proposal(name) else fields).append(p)
        groups = {"fields": fields, **({"proposal_networks": proposals} if proposals else {})}
        self.camera_optimizer.get_param_groups(param_groups=groups)
        return groups

    def get_training_callbacks(
        self, training_callback_attributes: TrainingCallbackAttributes
    ) -> list[TrainingCallback]:
        """Return callbacks that anneal proposals before a step (Mip-NeRF 360, equation 18) and schedule their updates
        after it."""
        return [
            TrainingCallback([TrainingCallbackLocation.BEFORE_TRAIN_ITERATION], self.begin_step, 1),
            TrainingCallback([TrainingCallbackLocation.AFTER_TRAIN_ITERATION], self._end_step, 1),
        ]

    def begin_step(self, step: int) -> None:
        """Set the step, which determines proposal annealing and random numbers."""
        self.step = step
        self.sampling.begin_step(step)

    def _end_step(self, step: int) -> None:
        del step
        self.sampling.end_step({int(number): self.cell(int(number)) for number in self.cells})

    # ---- rays ----

    def get_outputs_for_camera(self, camera: Cameras, obb_box: OrientedBox | None = None) -> dict[str, Tensor]:
        """Return an image. All ranks call it with the same camera; for viewers only rank 0: see `RenderService`."""
        if self.render_override is not None and (asked := self.render_override.outputs(camera, obb_box)) is not None:
            return dict(asked)
        return super().get_outputs_for_camera(camera, obb_box)

    def get_outputs(self, ray_bundle: RayBundle) -> dict[str, Any]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Render rays with all ranks; every rank calls it with the same rays and gets the same pixels.

        In training, each rank's outputs have gradients through its own segments only: to its cells and the shared
        parameters.

        Args:
            ray_bundle: [R], with `nears` and `fars`.
        """
        assert self.partition is not None, "there are no cells yet"
        if self.render_override is not None and (asked := self.render_override.outputs_of_rays(ray_bundle)) is not None:
            return asked
        if self.training:
            self.camera_optimizer.apply_to_raybundle(ray_bundle)
            if self.fixed is not None:
                return self.fixed.outputs(ray_bundle)
        return self.rendered(ray_bundle)

    def rendered(self, rays: RayBundle) -> dict[str, Any]:
        """Render rays as `get_outputs` does, in shapes that depend on the rays."""
        return self.of_segments(rays, self.spread.take(rays))

    def of_segments(self, bundle: RayBundle, segments: Segments) -> dict[str, Any]:
        """Render rays from their segments in all ranks' cells."""
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
        """Return the samples of this rank's segments: nerfacto's number per ray in each or, of k segments of a ray, a
        k-th (`samples_per`)."""
        nears, fars = rays.nears, rays.fars
        assert nears is not None and fars is not None
        groups: list[Group] = []
        sampling = self.sampling
        whole = sampling.whole_of(rays, self.training) if isinstance(sampling, ProposalSampling) else None
        given = {} if whole is None else {"whole": whole}
        base = list(self.numbers)
        lines, ends = slice(first, segments.begins[base[-1] + 1]), segments.counts[segments.ray]
        longest = segments.order.shape[1]
        if self.config.samples_per == "segment" or whole is not None:
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
                lines = CellSegments(rows, ray, segments.rays, bundle, (nears[ray], fars[ray]))
                group = sampling.sample(self.cell(base[local]), base[local], parts, lines, self.training, **given)
                groups += [] if group is None else [group]
        return groups

    def held(self, segments: Segments) -> int:
        """Return the number of segments in this rank's cells."""
        return segments.begins[self.numbers[-1] + 1] - segments.begins[self.numbers[0]]

    def pixels(self, whole: State, rays: RayBundle) -> dict[str, Any]:
        """Return the pixel outputs of whole rays."""
        assert rays.nears is not None and rays.fars is not None
        through = whole[TRANSMITTANCE]
        colour = self._on_background(whole["colour"], through, whole["background"][:, :3], rays.directions)
        own = {"origins": rays.origins, "directions": rays.directions} if self.training else {}
        return {
            **own,
            **{one.name: whole[one.name] for one in self.integrals},
            "rgb": colour if self.training else colour.nan_to_num().clamp(0.0, 1.0),
            "accumulation": 1 - through,
            "expected_depth": (whole["depth"] / (1 - through + 1e-10)).clip(rays.nears, rays.fars),
        }

    def _on_background(self, colour: Tensor, through: Tensor, last: Tensor, directions: Tensor) -> Tensor:
        """Blend integrals with the background, as `RGBRenderer.combine_rgb` does."""
        behind = chosen(self.background, colour)
        if isinstance(behind, str):
            if behind in ("random", "mean"):  # random colours are blended in the loss, together with the image
                return colour if behind == "random" else mean_colour(colour, through)
            behind = last if self.sky is None else self.sky.behind(directions, self.world)
        return colour + through * behind

    # ---- losses and metrics ----

    def truth(self, outputs: dict[str, Any], batch: dict[str, Any]) -> Tensor:
        """Return the ground-truth pixels of a batch."""
        return batch["image"].to(self.device)

    def get_metrics_dict(self, outputs: dict[str, Any], batch: dict[str, Any]) -> dict[str, Tensor]:
        """Return `pixel_metrics` and the camera optimizer's metrics, which wait for the device."""
        metrics = self.pixel_metrics(outputs, batch)
        self.camera_optimizer.get_metrics_dict(metrics)
        return metrics

    def pixel_metrics(self, outputs: dict[str, Any], batch: dict[str, Any]) -> dict[str, Tensor]:
        """Return the PSNR of a batch of rays and, in training, its distortion; the same on every rank."""
        truth = blended(self.truth(outputs, batch), self.background)
        metrics = {"psnr": self.psnr(truth, outputs["rgb"])}
        if self.training:
            metrics["distortion"] = outputs["distortion"].mean()
        return metrics

    def get_loss_dict(
        self, outputs: dict[str, Any], batch: dict[str, Any], metrics_dict: dict[str, Tensor] | None = None
    ) -> dict[str, Tensor]:
        """Return the losses of a batch. Pixel losses are complete on all ranks, each with a graph of its own segments.

        The proposal loss is this rank's part. Only rank 0 has the pose regularisation, so that its gradient counts
        once.
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
            if self.depth_weight > 0:
                losses["depth_loss"] = self.depth_weight * depth_loss(outputs, batch)
            if self.world.is_main:
                self.camera_optimizer.get_loss_dict(losses)
        return losses

    def _random_colours(self, pixels: Tensor) -> Tensor:
        """Return the random colours behind the pixels [R, 3] of a step."""
        kept = None if self.fixed is None or not self.training else self.fixed.numbers(len(pixels)).background
        return background(torch.empty_like(pixels), self.seed, self.step) if kept is None else kept

    corrects_colours: ClassVar[bool] = False

    def compared(self, outputs: dict[str, Any], image: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """Return a photograph as ground truth of a rendered image, and that image, both [H, W, 3]."""
        return self.renderer_rgb.blend_background(image["image"].to(self.device)), outputs["rgb"].to(self.device)

    def get_image_metrics_and_images(
        self, outputs: dict[str, Tensor], batch: dict[str, Any]
    ) -> tuple[dict[str, float], dict[str, Tensor]]:
        """Return PSNR, SSIM and LPIPS of an image, and pictures of image and truth, opacity and depth."""
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


def depth_loss(outputs: dict[str, Any], batch: dict[str, Any]) -> Tensor:
    """Return the mean over keypoints of |disparity rendered - disparity observed|, times the scene's size, [].

    It is the loss of splats (`core.step.depth_loss`), of distances along rays. A point's distance is along the ray as
    its camera is corrected, and no gradient flows to it.

    Args:
        outputs: "expected_depth" [R, 1], "origins" and "directions" [R, 3] of the rays.
        batch: "points" [R, 3] and "scales" [R, 1]; see `ImageSplit.pixels`.
    """
    scales, apart = batch["scales"], batch["points"] - outputs["origins"].detach()
    observed = (apart * outputs["directions"].detach()).sum(1, keepdim=True)
    rendered, observed = (distance.clamp_min(_NEAREST) for distance in (outputs["expected_depth"], observed))
    return (scales * (1 / rendered - 1 / observed).abs()).sum() / (scales > 0).sum().clamp_min(1)


def _is_proposal(name: str) -> bool:
    """Return True if a parameter is one of proposal networks."""
    return "proposal_networks." in name
