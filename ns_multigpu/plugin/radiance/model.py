"""nerfacto in cells: what of it this rank has, and how it takes part in rendering rays."""

from dataclasses import dataclass, field
from math import ceil
from typing import Any

import numpy as np
import torch
import tyro
from nerfstudio.cameras.rays import RayBundle, RaySamples
from nerfstudio.engine.callbacks import TrainingCallback, TrainingCallbackAttributes, TrainingCallbackLocation
from nerfstudio.field_components.field_heads import FieldHeadNames
from nerfstudio.model_components import renderers
from nerfstudio.model_components.losses import (
    MSELoss,
    lossfun_outer,
    ray_samples_to_sdist,
    scale_gradients_by_distance_squared,
)
from nerfstudio.model_components.ray_samplers import ProposalNetworkSampler, UniformSampler
from nerfstudio.model_components.renderers import RGBRenderer
from nerfstudio.model_components.scene_colliders import NearFarCollider
from nerfstudio.models.nerfacto import NerfactoModel, NerfactoModelConfig
from nerfstudio.utils import colormaps, colors
from nerfstudio.utils.external import TCNN_EXISTS
from nerfstudio.utils.rich_utils import CONSOLE
from torch import Tensor, nn
from torchmetrics.functional import structural_similarity_index_measure

from ns_multigpu.core.collectives import sum_in_place
from ns_multigpu.core.world import World
from ns_multigpu.plugin.model.metrics import OptionalLpips, psnr
from ns_multigpu.plugin.radiance.draws import drawn
from ns_multigpu.plugin.radiance.fields import Cell, Shared, up_to_faces
from ns_multigpu.radiance.contraction import Domain
from ns_multigpu.radiance.exchange import all_segments, cells_of, segments_of_ranks
from ns_multigpu.radiance.integrals import (
    BACKGROUND,
    COLOUR,
    DEPTH,
    MOMENT,
    TRANSMITTANCE,
    Distortion,
    Family,
    Samples,
)
from ns_multigpu.radiance.partition import Partition, spacing
from ns_multigpu.radiance.segments import Segments, clip

_SAMPLES, _BACKGROUND = 3, 4
"""First numbers of the seeds of what is drawn in a step."""

FAMILY = Family([COLOUR, DEPTH, MOMENT, Distortion(), BACKGROUND])


@dataclass
class NerfactoXLModelConfig(NerfactoModelConfig):
    """nerfacto's options, and how space is cut."""

    _target: type = field(default_factory=lambda: NerfactoXLModel)
    cells: int = 0
    """Into how many cells space is cut, each with a hash grid, a density and proposal networks of its own; 0 for one a
    GPU. A run that goes on from a checkpoint keeps the checkpoint's."""
    predict_normals: tyro.conf.Suppress[bool] = False  # not there yet


@dataclass
class _Group:
    """Segments of one cell that are sampled together.

    Attributes:
        rows: [n] which of this rank's segments they are. samples: the last ones. weights: [n, S] from the segment's
            beginning on. proposals: of each level, weights and samples.
    """

    rows: Tensor
    samples: RaySamples
    weights: Tensor
    proposals: list[tuple[Tensor, RaySamples]]


@dataclass(frozen=True)
class Figures:
    """Of the last batch: segments of all cells, samples on this rank, and of all rays together if they are known."""

    segments: Segments
    samples: int


class NerfactoXLModel(NerfactoModel):
    """nerfacto over cells. It has no cells before `place`."""

    config: NerfactoXLModelConfig

    def populate_modules(self) -> None:
        """Sets up all that does not depend on cells."""
        super(NerfactoModel, self).populate_modules()
        config = self.config
        if config.implementation == "tcnn" and not TCNN_EXISTS:
            CONSOLE.print("tiny-cuda-nn is not installed: fields run in torch, which is slower.")
            config.implementation = "torch"  # nerfstudio would do so, and say it of each part of each cell
        self.seed = torch.initial_seed() & (1 << 62) - 1
        self.domain = Domain.box(self.scene_box.aabb) if config.disable_scene_contraction else Domain.unbounded()
        self.shared = Shared(config, self.num_train_data, self.seed)
        self.camera_optimizer = config.camera_optimizer.setup(num_cameras=self.num_train_data, device="cpu")
        self.cells = nn.ModuleDict()
        self.partition: Partition | None = None
        self.world = World.single()
        uniform = config.proposal_initial_sampler == "uniform"
        self.proposal_sampler = ProposalNetworkSampler(
            num_nerf_samples_per_ray=config.num_nerf_samples_per_ray,
            num_proposal_samples_per_ray=config.num_proposal_samples_per_ray,
            num_proposal_network_iterations=config.num_proposal_iterations,
            single_jitter=config.use_single_jitter,
            update_sched=lambda step: np.clip(
                np.interp(step, [0, config.proposal_warmup], [0, config.proposal_update_every]),
                1,
                config.proposal_update_every,
            ),
            initial_sampler=UniformSampler(single_jitter=config.use_single_jitter) if uniform else None,
        )
        self.since_update = 0
        """Steps since proposal networks have learnt."""
        self.collider = NearFarCollider(near_plane=config.near_plane, far_plane=config.far_plane)
        self.renderer_rgb = RGBRenderer(background_color=config.background_color)
        self.rgb_loss = MSELoss()
        self.psnr, self.ssim, self.lpips = psnr, structural_similarity_index_measure, OptionalLpips()
        self.step = 0
        self.figures: Figures | None = None

    def place(self, partition: Partition, world: World) -> None:
        """Makes this rank's cells, with parameters that follow from the seed and a cell's number."""
        self.partition, self.world = partition, world
        own = cells_of(world.rank, partition.cells, world.size)
        extents, images = partition.extents(), self.num_train_data
        made = {str(c): Cell(c, extents[c], partition.domain, self.config, self.shared, images, self.seed) for c in own}
        self.cells = nn.ModuleDict(made).to(self.device)
        self._boxes = partition.boxes().to(self.device)

    def own_parameters(self) -> dict[str, nn.Parameter]:
        """By name, those of this rank's cells."""
        return {name: p for name, p in self.named_parameters() if name.startswith("cells.")}

    def shared_parameters(self) -> dict[str, nn.Parameter]:
        """By name, those that are equal on every rank: the colour head, and embeddings of appearance and pose."""
        return {name: p for name, p in self.named_parameters() if not name.startswith("cells.") and p.numel()}

    def get_param_groups(self) -> dict[str, list[nn.Parameter]]:
        """As nerfacto's, of this rank's cells; the colour head and the appearance embedding are with the fields."""
        own = self.own_parameters().items()
        groups = {
            "proposal_networks": [p for name, p in own if ".proposal_networks." in name],
            "fields": [*self.shared.parameters(), *(p for name, p in own if ".field." in name)],
        }
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
        self.step, config = step, self.config
        if config.use_proposal_weight_anneal:
            done = min(step / config.proposal_weights_anneal_max_num_iters, 1.0)
            slope = config.proposal_weights_anneal_slope
            self.proposal_sampler.set_anneal(slope * done / ((slope - 1) * done + 1))

    def _end_step(self, step: int) -> None:
        if self._learns():
            self.since_update = 0
        self.since_update += 1

    def _learns(self) -> bool:
        """Whether proposal networks learn in this step, as nerfstudio's sampler decides."""
        return self.since_update > self.proposal_sampler.update_sched(self.step) or self.step < 10

    # ---- rays ----

    def get_outputs(self, ray_bundle: RayBundle) -> dict[str, Any]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Renders rays with all ranks together; every rank calls it with the same rays, and gets the same pixels.

        In training each rank's outputs have gradients to its own cells and to what is shared, of its own segments.

        Args:
            ray_bundle: [R], with `nears` and `fars`.
        """
        assert self.partition is not None, "there are no cells yet"
        if self.training:
            self.camera_optimizer.apply_to_raybundle(ray_bundle)
        nears, fars = ray_bundle.nears, ray_bundle.fars
        assert nears is not None and fars is not None
        segments = clip(ray_bundle.origins, ray_bundle.directions, nears[:, 0], fars[:, 0], self._boxes)
        first = segments_of_ranks(segments, self.world.size)[self.world.rank]
        own, groups = self._own_segments(ray_bundle, segments, first)
        rows = all_segments(own, segments, self.world)
        whole, before = FAMILY.fold(rows, segments.order)
        through = whole[TRANSMITTANCE]
        outputs: dict[str, Any] = {
            "rgb": self._on_background(whole["colour"], through, whole["background"][:, :3]),
            "accumulation": 1 - through,
            "expected_depth": (whole["depth"] / (1 - through + 1e-10)).clip(nears, fars),
        }
        if self.training:
            outputs["distortion"] = whole["distortion"]
            outputs["interlevel"] = self._interlevel(groups, before[first:], segments.rays)
            self.figures = Figures(segments, sum(group.weights.numel() for group in groups))
        else:
            outputs["rgb"] = outputs["rgb"].nan_to_num().clamp(0.0, 1.0)
            outputs["depth"] = self._median_depth(groups, before, through, segments, first)
        return outputs

    def _own_segments(self, rays: RayBundle, segments: Segments, first: int) -> tuple[Tensor, list[_Group]]:
        """The states [m, F] of this rank's segments, in their order; and what their losses and depths are made of.

        A ray has as many samples as nerfacto's, or a few more: each of its k segments has a k-th of them.
        """
        groups: list[_Group] = []
        states: list[Tensor] = []
        longest, base = segments.order.shape[1], [int(c) for c in self.cells]
        lines, ends = slice(first, segments.begins[base[-1] + 1]), segments.counts[segments.ray]
        # Cells begin where host numbers say, so that nothing is read back for it; the sizes below are the one wait.
        cells = torch.cat(
            [ends.new_full((segments.begins[c + 1] - segments.begins[c],), i) for i, c in enumerate(base)]
        )
        key = cells * (longest + 1) + ends[lines]
        sizes = key.new_zeros(len(base) * (longest + 1)).index_add_(0, key, torch.ones_like(key)).tolist()
        for number, rows in enumerate(key.argsort(stable=True).split(sizes)):
            local, parts = divmod(number, longest + 1)
            if len(rows):
                state, group = self._sampled(base[local], parts, rows, rays, segments, first)
                states.append(state)
                groups.append(group)
        if not groups:
            return rays.origins.new_zeros(0, FAMILY.width), groups
        back = torch.cat([group.rows for group in groups]).argsort()
        return torch.cat(states)[back], groups

    def _sampled(
        self, number: int, parts: int, rows: Tensor, rays: RayBundle, segments: Segments, first: int
    ) -> tuple[Tensor, _Group]:
        """The states of some segments of a cell, of rays that have `parts` segments each."""
        config, cell, sampler = self.config, self.cells[str(number)], self.proposal_sampler
        assert isinstance(cell, Cell)
        at, ray = first + rows, segments.ray[first + rows]
        bundle = rays[ray]
        bundle.nears, bundle.fars = segments.near[at, None], segments.far[at, None]
        sampler.num_nerf_samples_per_ray = ceil(config.num_nerf_samples_per_ray / parts)
        sampler.num_proposal_samples_per_ray = tuple(ceil(n / parts) for n in config.num_proposal_samples_per_ray)
        sampler._step, sampler._steps_since_update = self.step, self.since_update  # it would count calls
        fns = cell.density_fns(config.num_proposal_iterations)
        if self.training:
            with drawn(self.device, self.seed, _SAMPLES, self.step, number, parts):
                samples, weights, proposed = sampler(bundle, density_fns=fns)
        else:
            samples, weights, proposed = sampler(bundle, density_fns=fns)
        assert rays.nears is not None and rays.fars is not None
        begins, stops = rays.nears[ray], rays.fars[ray]
        samples = up_to_faces(samples, bundle, (bundle.nears > begins)[:, 0], (bundle.fars < stops)[:, 0])
        found = cell.field(samples)
        if config.use_gradient_scaling:
            found = scale_gradients_by_distance_squared(found, samples)
        edges = torch.cat([samples.frustums.starts[..., 0], samples.frustums.ends[:, -1:, 0]], 1)
        density, colour = found[FieldHeadNames.DENSITY][..., 0], found[FieldHeadNames.RGB]
        taken = Samples(edges, density, self._coordinates(edges, begins, stops), {"colour": colour})
        group = _Group(rows, samples, taken.weights, list(zip(weights, proposed, strict=True)))
        return FAMILY.within(taken), group

    def _coordinates(self, t: Tensor, near: Tensor, far: Tensor) -> Tensor:
        """Distances along whole rays in the coordinate of the first sampler, from 0 to 1: distortion is of these."""
        if self.config.proposal_initial_sampler != "uniform":
            t, near, far = spacing(t), spacing(near), spacing(far)
        return (t - near) / (far - near)

    def _on_background(self, colour: Tensor, through: Tensor, last: Tensor) -> Tensor:
        """As `RGBRenderer.combine_rgb` does, of integrals."""
        chosen: Any = renderers.BACKGROUND_COLOR_OVERRIDE
        chosen = self.config.background_color if chosen is None else chosen
        if isinstance(chosen, str):
            if chosen == "random":  # blended with the image in the loss
                return colour
            chosen = last if chosen == "last_sample" else colors.COLORS_DICT[chosen]
        return colour + through * chosen.to(colour)

    def _interlevel(self, groups: list[_Group], before: Tensor, rays: int) -> Tensor:
        """This rank's part of nerfacto's proposal loss (Mip-NeRF 360, equation 13).

        Weights are a whole ray's: a segment counts by the light that reaches it, as its samples would in nerfacto.
        """
        total = before.new_zeros(())
        for group in groups:
            reaches = before[group.rows]
            weights, edges = group.weights.detach() * reaches, ray_samples_to_sdist(group.samples).detach()
            for proposed, samples in group.proposals:
                bound = proposed[..., 0] * reaches
                total = total + lossfun_outer(edges, weights, ray_samples_to_sdist(samples), bound).sum()
        return total / max(rays * self.config.num_nerf_samples_per_ray, 1)

    @torch.no_grad()
    def _median_depth(
        self, groups: list[_Group], before: Tensor, through: Tensor, segments: Segments, first: int
    ) -> Tensor:
        """[R, 1] where a ray's weights reach one half, or its last sample. Every rank calls it: one more exchange."""
        depth = torch.zeros_like(through)
        place = segments.counts - 1
        last = segments.order.gather(1, place.clamp_min(0)[:, None])[:, 0] if segments.order.shape[1] else place
        for group in groups:
            at = first + group.rows
            ray = segments.ray[at]
            sums = 1 - before[at] * (1 - group.weights.cumsum(1))
            half = torch.full_like(before[at], 0.5)
            index = torch.searchsorted(sums.contiguous(), half)
            ends = (last[ray] == at)[:, None]
            here = (before[at] > 0.5) & ((index < sums.shape[1]) | ends)
            middles = (group.samples.frustums.starts + group.samples.frustums.ends)[..., 0] / 2
            found = middles.gather(1, index.clamp_max(sums.shape[1] - 1))
            depth.index_add_(0, ray, torch.where(here, found, 0.0))
        sum_in_place(depth, self.world)
        return depth

    # ---- losses and metrics ----

    def get_metrics_dict(self, outputs: dict[str, Any], batch: dict[str, Any]) -> dict[str, Tensor]:
        """PSNR of a batch of rays, its distortion, and what the camera optimizer has to say; the same on every rank."""
        truth = self.renderer_rgb.blend_background(batch["image"].to(self.device))
        metrics = {"psnr": self.psnr(truth, outputs["rgb"])}
        if self.training:
            metrics["distortion"] = outputs["distortion"].mean()
        self.camera_optimizer.get_metrics_dict(metrics)
        return metrics

    def get_loss_dict(
        self, outputs: dict[str, Any], batch: dict[str, Any], metrics_dict: dict[str, Tensor] | None = None
    ) -> dict[str, Tensor]:
        """The losses of a batch. All ranks have the whole of those of pixels, each with a graph of its own segments.

        The proposal loss is this rank's part, and what keeps poses near where they were is rank 0's, for its gradient
        is to be there once.
        """
        image = batch["image"].to(self.device)
        with drawn(self.device, self.seed, _BACKGROUND, self.step):  # a random background, the same on every rank
            predicted, truth = self.renderer_rgb.blend_background_for_loss_computation(
                pred_image=outputs["rgb"], pred_accumulation=outputs["accumulation"], gt_image=image
            )
        losses = {"rgb_loss": self.rgb_loss(truth, predicted)}
        if self.training:
            losses["interlevel_loss"] = self.config.interlevel_loss_mult * outputs["interlevel"]
            losses["distortion_loss"] = self.config.distortion_loss_mult * outputs["distortion"].mean()
            if self.world.is_main:
                self.camera_optimizer.get_loss_dict(losses)
        return losses

    def get_image_metrics_and_images(
        self, outputs: dict[str, Tensor], batch: dict[str, Any]
    ) -> tuple[dict[str, float], dict[str, Tensor]]:
        """PSNR, SSIM and LPIPS of an image, and pictures of it beside the truth, its opacity and its depth."""
        truth = self.renderer_rgb.blend_background(batch["image"].to(self.device))
        true, seen = (image.moveaxis(-1, 0)[None] for image in (truth, outputs["rgb"].to(self.device)))
        ssim: Any = self.ssim(true, seen)
        measured = {"psnr": self.psnr(true, seen), "ssim": ssim, "lpips": self.lpips(true, seen)}
        if self.lpips.missing:
            del measured["lpips"]
        depth = colormaps.apply_depth_colormap(outputs["depth"], accumulation=outputs["accumulation"])
        images = {
            "img": torch.cat([truth, outputs["rgb"].to(truth)], dim=1),
            "accumulation": colormaps.apply_colormap(outputs["accumulation"]),
            "depth": depth,
        }
        return {name: float(value) for name, value in measured.items()}, images
