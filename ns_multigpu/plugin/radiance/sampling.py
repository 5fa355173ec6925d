"""Samples of segments by nerfacto's proposal networks, and how these learn."""

from dataclasses import dataclass, field
from math import ceil

import numpy as np
import torch
from nerfstudio.cameras.rays import RayBundle, RaySamples
from nerfstudio.field_components.field_heads import FieldHeadNames
from nerfstudio.model_components.losses import lossfun_outer, ray_samples_to_sdist, scale_gradients_by_distance_squared
from nerfstudio.model_components.ray_samplers import ProposalNetworkSampler, UniformSampler
from nerfstudio.models.nerfacto import NerfactoModelConfig
from torch import Tensor

from ns_multigpu.plugin.radiance.draws import drawn
from ns_multigpu.plugin.radiance.fields import Cell, up_to_faces
from ns_multigpu.radiance.integrals import TRANSMITTANCE, Samples, State
from ns_multigpu.radiance.partition import spacing
from ns_multigpu.radiance.segments import Segments

_SAMPLES = 3
"""First number of the seeds of what is drawn."""


@dataclass
class Group:
    """Segments of one cell that are sampled together.

    Attributes:
        rows: [n] which of this rank's segments they are.
        taken: their samples. count: how many samples a field was asked for.
        proposals: of each level, weights and samples; the last ones are `samples`.
    """

    rows: Tensor
    taken: Samples
    count: int
    samples: RaySamples | None = None
    proposals: list[tuple[Tensor, RaySamples]] = field(default_factory=list)


class ProposalSampling:
    """Nerfacto's proposals, of each cell by itself.

    Args:
        config: the model's. seed: that random numbers are drawn from.
    """

    def __init__(self, config: NerfactoModelConfig, seed: int) -> None:
        self.config, self.seed, self.step = config, seed, 0
        self.since_update = 0
        """Steps since proposal networks have learnt."""
        uniform = config.proposal_initial_sampler == "uniform"
        self.sampler = ProposalNetworkSampler(
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

    def begin_step(self, step: int) -> None:
        """How sharp proposals are in a step (Mip-NeRF 360, equation 18)."""
        self.step, config = step, self.config
        if config.use_proposal_weight_anneal:
            done = min(step / config.proposal_weights_anneal_max_num_iters, 1.0)
            slope = config.proposal_weights_anneal_slope
            self.sampler.set_anneal(slope * done / ((slope - 1) * done + 1))

    def end_step(self, cells: dict[int, Cell]) -> None:
        """Counts the steps in which proposal networks have not learnt."""
        del cells
        if self.since_update > self.sampler.update_sched(self.step) or self.step < 10:  # as nerfstudio's sampler
            self.since_update = 0
        self.since_update += 1

    def sample(
        self, cell: Cell, number: int, parts: int, rows: Tensor, bundle: RayBundle, ends: tuple[Tensor, Tensor],
        training: bool,
    ) -> Group:  # fmt: skip
        """The samples of some segments of a cell.

        Args:
            cell: it. number: its number, or what else random numbers are told apart by.
            parts: how many segments share nerfacto's number of samples.
            rows: [n] which of this rank's segments they are.
            bundle: [n] their rays, with `nears` and `fars` of the segments.
            ends: [n, 1] each, where their whole rays begin and end.
            training: whether samples are moved at random.
        """
        config, sampler = self.config, self.sampler
        assert bundle.nears is not None and bundle.fars is not None
        sampler.train(training)
        sampler.num_nerf_samples_per_ray = ceil(config.num_nerf_samples_per_ray / parts)
        sampler.num_proposal_samples_per_ray = tuple(ceil(n / parts) for n in config.num_proposal_samples_per_ray)
        sampler._step, sampler._steps_since_update = self.step, self.since_update  # it would count calls
        fns = cell.density_fns(config.num_proposal_iterations)
        if training:
            with drawn(bundle.origins.device, self.seed, _SAMPLES, self.step, number, parts):
                samples, weights, proposed = sampler(bundle, density_fns=fns)
        else:
            samples, weights, proposed = sampler(bundle, density_fns=fns)
        samples = up_to_faces(samples, bundle, (bundle.nears > ends[0])[:, 0], (bundle.fars < ends[1])[:, 0])
        found = cell.field(samples)
        if config.use_gradient_scaling:
            found = scale_gradients_by_distance_squared(found, samples)
        edges = torch.cat([samples.frustums.starts[..., 0], samples.frustums.ends[:, -1:, 0]], 1)
        taken = Samples(
            edges,
            found[FieldHeadNames.DENSITY][..., 0],
            self.coordinates(edges, *ends),
            {"colour": found[FieldHeadNames.RGB]},
        )
        return Group(rows, taken, taken.density.numel(), samples, list(zip(weights, proposed, strict=True)))

    def coordinates(self, t: Tensor, near: Tensor, far: Tensor) -> Tensor:
        """Distances along whole rays in the coordinate of the first sampler, from 0 to 1: distortion is of these."""
        if self.config.proposal_initial_sampler != "uniform":
            t, near, far = spacing(t), spacing(near), spacing(far)
        return (t - near) / (far - near)

    def losses(self, groups: list[Group], before: Tensor, rays: int) -> dict[str, Tensor]:
        """This rank's part of nerfacto's proposal loss (Mip-NeRF 360, equation 13).

        Weights are a whole ray's: a segment counts by the light that reaches it, as its samples would in nerfacto.

        Args:
            before: [m, 1] that light, of this rank's segments.
            rays: how many rays all ranks have together.
        """
        total = before.new_zeros(())
        for group in groups:
            assert group.samples is not None
            reaches = before[group.rows]
            weights, edges = group.taken.weights.detach() * reaches, ray_samples_to_sdist(group.samples).detach()
            for proposed, samples in group.proposals:
                bound = proposed[..., 0] * reaches
                total = total + lossfun_outer(edges, weights, ray_samples_to_sdist(samples), bound).sum()
        return {"interlevel": total / max(rays * self.config.num_nerf_samples_per_ray, 1)}


def in_order(parts: list[Tensor], groups: list[Group], none: Tensor) -> Tensor:
    """What groups have of their segments, in the segments' order; as in `none`, of segments without samples."""
    if not groups:
        return none
    return none.index_copy(0, torch.cat([group.rows for group in groups]), torch.cat(parts))


@torch.no_grad()
def median_depth(groups: list[Group], before: Tensor, whole: State, segments: Segments, first: int) -> Tensor:
    """[R, 1] where a ray's weights reach one half, or its last sample; 0 where that is in none of these groups.

    Args:
        groups: samples of segments from number `first` on. before: [M, 1] the light that reaches segments.
        whole: the states of rays.
    """
    depth = torch.zeros_like(whole[TRANSMITTANCE])
    place = segments.counts - 1
    last = segments.order.gather(1, place.clamp_min(0)[:, None])[:, 0] if segments.order.shape[1] else place
    for group in groups:
        at = first + group.rows
        ray = segments.ray[at]
        sums = 1 - before[at] * (1 - group.taken.weights.cumsum(1))
        half = torch.full_like(before[at], 0.5)
        index = torch.searchsorted(sums.contiguous(), half)
        ends = (last[ray] == at)[:, None]
        here = (before[at] > 0.5) & ((index < sums.shape[1]) | ends)
        edges = group.taken.edges
        middles = (edges[:, 1:] + edges[:, :-1]) / 2
        found = middles.gather(1, index.clamp_max(sums.shape[1] - 1))
        depth.index_add_(0, ray, torch.where(here, found, 0.0))
    return depth
