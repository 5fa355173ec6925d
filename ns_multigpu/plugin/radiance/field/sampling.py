"""Samples of segments by nerfacto's proposal networks, and how these learn."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import ceil
from typing import Any

import numpy as np
import torch
from nerfstudio.cameras.rays import Frustums, RayBundle, RaySamples
from nerfstudio.field_components.field_heads import FieldHeadNames
from nerfstudio.model_components.losses import lossfun_outer, scale_gradients_by_distance_squared
from nerfstudio.models.nerfacto import NerfactoModelConfig
from torch import Tensor

from ns_multigpu.plugin.radiance.field.draws import jitter
from ns_multigpu.plugin.radiance.field.fields import Cell
from ns_multigpu.plugin.radiance.field.levels import Bins, Ends, by_weights, evenly, weights_of
from ns_multigpu.radiance.integrals import TRANSMITTANCE, Samples, State
from ns_multigpu.radiance.partition import spacing
from ns_multigpu.radiance.segments import Segments
from ns_multigpu.radiance.sums import running_sum

_ALWAYS_UNTIL = 10
"""Until this step proposal networks learn in every step, as in nerfstudio."""


@dataclass(frozen=True)
class Lines:
    """Segments of one cell that are sampled together.

    Attributes:
        rows: which of this rank's segments they are, [n] or a slice.
        ray: [n] which rays of the batch they are of; None for all, in order. rays: how many rays there are.
        bundle: [n] their rays, with `nears` and `fars` of the segments.
        ends: [n, 1] each, where their whole rays begin and end.
        live: [n] bool, which of them there are; None for all.
    """

    rows: Tensor | slice
    ray: Tensor | None
    rays: int
    bundle: RayBundle
    ends: tuple[Tensor, Tensor]
    live: Tensor | None = None


@dataclass(frozen=True)
class Asked:
    """Segments of one cell that are to be sampled alike.

    Attributes:
        parts: how many segments share nerfacto's number of samples. lines: the segments.
        moved: of each level random numbers from 0 to 1, [n, 1 or its edges]; None to move no samples.
    """

    parts: int
    lines: Lines
    moved: Sequence[Tensor] | None


@dataclass
class Group:
    """Segments of one cell with their samples.

    Attributes:
        rows: which of this rank's segments they are, [n] or a slice.
        taken: their samples. count: how many samples a field was asked for.
        bins: where they are; None without proposals.
        proposals: of each level, weights [n, S] and where its samples are.
    """

    rows: Tensor | slice
    taken: Samples
    count: int
    bins: Bins | None = None
    proposals: list[tuple[Tensor, Bins]] = field(default_factory=list[tuple[Tensor, Bins]])


class ProposalSampling:
    """Nerfacto's proposals, of each cell by itself.

    Args:
        config: the model's. seed: that random numbers are drawn from.

    Raises:
        ValueError: there are to be no proposals.
    """

    def __init__(self, config: NerfactoModelConfig, seed: int) -> None:
        if config.num_proposal_iterations < 1:
            raise ValueError("num_proposal_iterations: one at least")
        self.config, self.seed, self.step = config, seed, 0
        self.since_update = 0
        """Steps since proposal networks have learnt."""
        self.anneal: float = 1.0
        """How sharp proposals are in this step: what weights are raised to (Mip-NeRF 360, equation 18)."""

    @property
    def learns(self) -> bool:
        """Whether proposal networks learn in this step; as in nerfstudio's sampler."""
        return self.since_update > self._pause() or self.step < _ALWAYS_UNTIL

    def begin_step(self, step: int) -> None:
        """How sharp proposals are in a step."""
        self.step, config = step, self.config
        if config.use_proposal_weight_anneal:
            done = min(step / config.proposal_weights_anneal_max_num_iters, 1.0)
            slope = config.proposal_weights_anneal_slope
            self.anneal = slope * done / ((slope - 1) * done + 1)

    def end_step(self, cells: dict[int, Cell]) -> None:
        """Counts the steps in which proposal networks have not learnt."""
        del cells
        if self.learns:
            self.since_update = 0
        self.since_update += 1

    def _pause(self) -> float:
        config = self.config
        steps = np.interp(self.step, [0, config.proposal_warmup], [0, config.proposal_update_every])
        return float(np.clip(steps, 1, config.proposal_update_every))

    def counts(self, parts: int = 1) -> list[int]:
        """Samples of each level of proposals and of the field, of a segment that is one of `parts` of its ray."""
        config = self.config
        wanted = list(config.num_proposal_samples_per_ray)[: config.num_proposal_iterations]
        return [ceil(count / parts) for count in (*wanted, config.num_nerf_samples_per_ray)]

    def widths(self, parts: int = 1) -> list[int]:
        """Random numbers that a ray's segment takes for each level."""
        return [1 if self.config.use_single_jitter else count + 1 for count in self.counts(parts)]

    def sample(self, cell: Cell, number: int, parts: int, lines: Lines, training: bool) -> Group:
        """The samples of some segments of a cell.

        Args:
            cell: it. number: its number, or what else random numbers are told apart by.
            parts: how many segments share nerfacto's number of samples.
            lines: the segments. training: whether samples are moved at random.
        """
        moved: list[Tensor] | None = None
        if training:
            widths, device = self.widths(parts), lines.bundle.origins.device
            numbers = torch.empty(lines.rays * sum(widths), device=device)
            moved = jitter(numbers, widths, lines.rays, self.seed, self.step, number, parts)
            if lines.ray is not None:
                moved = [part[lines.ray] for part in moved]
        return self.taken(cell, [Asked(parts, lines, moved)], self.anneal)[0]

    def taken(self, cell: Cell, asked: Sequence[Asked], anneal: float | Tensor) -> list[Group]:
        """The samples of several groups of a cell's segments, with one launch of each network for all of them. Nothing
        is read back, and no shape depends on values.

        Args:
            anneal: how sharp proposals are.
        """
        config = self.config
        counts = [self.counts(one.parts) for one in asked]
        numbers = [list(one.moved) if one.moved is not None else [None] * len(counts[0]) for one in asked]
        each = list(zip(asked, counts, numbers, strict=True))
        bins = [evenly(self._ends(one), count[0], moved[0]) for one, count, moved in each]
        proposals: list[list[tuple[Tensor, Bins]]] = [[] for _ in asked]
        for level, density_of in enumerate(cell.density_fns(config.num_proposal_iterations)):
            if level:
                bins = self._by_weights(each, level, bins, proposals, anneal)
            with torch.set_grad_enabled(torch.is_grad_enabled() and self.learns):
                places = [
                    one.lines.bundle.origins[:, None] + one.lines.bundle.directions[:, None] * (b.starts + b.ends) / 2
                    for one, b in zip(asked, bins, strict=True)
                ]
                for found, one, at, densities in zip(
                    proposals, asked, bins, _together(density_of, places), strict=True
                ):
                    found.append((weights_of(at, _of_live(densities, one.lines.live)), at))
        bins = self._by_weights(each, -1, bins, proposals, anneal)
        bins = [b.up_to_faces(self._ends(one)) for b, one in zip(bins, asked, strict=True)]
        samples = [_samples(one.lines.bundle, b) for one, b in zip(asked, bins, strict=True)]
        groups: list[Group] = []
        for one, at, sample, found, proposed in zip(
            asked, bins, samples, cell.field.together(samples), proposals, strict=True
        ):
            if config.use_gradient_scaling:
                found = scale_gradients_by_distance_squared(found, sample)
            taken = Samples(
                at.edges,
                _of_live(found[FieldHeadNames.DENSITY][..., 0], one.lines.live),
                self.coordinates(at.edges, *one.lines.ends),
                {"colour": found[FieldHeadNames.RGB]},
            )
            groups.append(Group(one.lines.rows, taken, taken.density.numel(), at, proposed))
        cell.forget()
        return groups

    def _ends(self, asked: Asked) -> Ends:
        bundle = asked.lines.bundle
        assert bundle.nears is not None and bundle.fars is not None
        return Ends(bundle.nears, bundle.fars, asked.lines.ends, self.config.proposal_initial_sampler == "uniform")

    def _by_weights(
        self,
        each: Sequence[tuple[Asked, list[int], list[Any]]],
        level: int,
        before: Sequence[Bins],
        proposals: Sequence[Sequence[tuple[Tensor, Bins]]],
        anneal: float | Tensor,
    ) -> list[Bins]:
        """Of each group, samples of a level by the last proposals' weights."""
        return [
            by_weights(self._ends(one), at, found[-1][0].detach() ** anneal, counts[level], moved[level])
            for (one, counts, moved), at, found in zip(each, before, proposals, strict=True)
        ]

    def coordinates(self, t: Tensor, near: Tensor, far: Tensor) -> Tensor:
        """Distances along whole rays in the coordinate of the first sampler, from 0 to 1: distortion is of these."""
        if self.config.proposal_initial_sampler != "uniform":
            t, near, far = spacing(t), spacing(near), spacing(far)
        return (t - near) / (far - near)

    def losses(self, groups: list[Group], before: Tensor, rays: int) -> dict[str, Tensor]:
        """This rank's part of nerfacto's proposal loss (Mip-NeRF 360, equation 13).

        Weights are a whole ray's: a segment counts by the light that reaches it, as its samples would in nerfacto.

        Args:
            before: [m, 1] that light, of this rank's segments, or whatever the groups' rows number.
            rays: how many rays all ranks have together.
        """
        total = before.new_zeros(())
        for group in groups:
            assert group.bins is not None
            reaches = before[group.rows]
            weights, edges = group.taken.weights.detach() * reaches, group.bins.spaced
            for proposed, bins in group.proposals:
                around = bins.spaced.expand_as(bins.edges)
                total = total + lossfun_outer(edges, weights, around, proposed * reaches).sum()
        return {"interlevel": total / max(rays * self.config.num_nerf_samples_per_ray, 1)}


def _samples(bundle: RayBundle, bins: Bins) -> RaySamples:
    """As nerfstudio's fields take them."""
    frustums = Frustums(
        bundle.origins[:, None], bundle.directions[:, None], bins.starts, bins.ends, bundle.pixel_area[:, None]
    )
    cameras = None if bundle.camera_indices is None else bundle.camera_indices[:, None]
    return RaySamples(frustums=frustums, camera_indices=cameras)


def _of_live(density: Tensor, live: Tensor | None) -> Tensor:
    """Densities [n, S] of segments that there are; nothing is in the others, and nothing of them is learnt from."""
    return density if live is None else torch.where(live[:, None], density, torch.zeros_like(density))


def _together(density_of: Any, places: Sequence[Tensor]) -> list[Tensor]:
    """Densities [n, S] at each of several [n, S, 3]: by one launch of a network."""
    if len(places) == 1:
        return [density_of(places[0])[..., 0]]
    sizes, flat = [x.shape[0] * x.shape[1] for x in places], torch.cat([x.flatten(0, 1) for x in places])
    found = density_of(flat)[..., 0].split(sizes)
    return [x.view(place.shape[:2]) for x, place in zip(found, places, strict=True)]


def in_order(parts: list[Tensor], groups: list[Group], none: Tensor) -> Tensor:
    """What groups have of their segments, in the segments' order; as in `none`, of segments without samples."""
    if not groups:
        return none
    rows: list[Any] = [group.rows for group in groups]
    return none.index_copy(0, torch.cat(rows), torch.cat(parts))


@torch.no_grad()
def median_depth(
    groups: list[Group], before: Tensor, whole: State, segments: Segments, first: int, background: str
) -> Tensor:
    """[R, 1] where a ray's weights reach one half, or its last sample; 0 where that is in none of these groups.

    Args:
        groups: samples of segments from number `first` on. before: [M, 1] the light that reaches segments.
        whole: the states of rays.
        background: what is behind rays. Where that is their mean colour, light that comes through costs nothing, and
            weights of what is solid may add up to less than one half: then it is one half of their sum.
    """
    depth = torch.zeros_like(whole[TRANSMITTANCE])
    place = segments.counts - 1
    last = segments.order.gather(1, place.clamp_min(0)[:, None])[:, 0] if segments.order.shape[1] else place
    for group in groups:
        assert isinstance(group.rows, Tensor)
        at = first + group.rows
        ray = segments.ray[at]
        sums = 1 - before[at] * (1 - running_sum(group.taken.weights))
        sum_of_all = 1 - whole[TRANSMITTANCE][ray] if background == "mean" else torch.ones_like(before[at])
        half = (0.5 * sum_of_all).clamp_min(1e-6)  # where there is nothing, the last sample
        index = torch.searchsorted(sums.contiguous(), half)
        ends = (last[ray] == at)[:, None]
        here = (before[at] > 1 - half) & ((index < sums.shape[1]) | ends)
        edges = group.taken.edges
        middles = (edges[:, 1:] + edges[:, :-1]) / 2
        found = middles.gather(1, index.clamp_max(sums.shape[1] - 1))
        depth.index_add_(0, ray, torch.where(here, found, 0.0))
    return depth
