"""Segment sampling by nerfacto's proposal networks, and their loss."""

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
from torch import Tensor, nn

from ns_multigpu.plugin.radiance.field.draws import jitter
from ns_multigpu.plugin.radiance.field.fields import Cell, forget
from ns_multigpu.plugin.radiance.field.levels import Bins, Ends, by_weights, evenly, weights_of
from ns_multigpu.radiance.integrals import TRANSMITTANCE, Samples, State
from ns_multigpu.radiance.partition import spacing
from ns_multigpu.radiance.segments import Segments
from ns_multigpu.radiance.sums import running_sum

_ALWAYS_UNTIL = 10
"""Until this step proposal networks are trained in every step, as in nerfstudio."""


@dataclass(frozen=True)
class CellSegments:
    """Segments of one cell that are sampled together.

    Attributes:
        rows: indices among this rank's segments, [n] or a slice.
        ray: [n] ray indices in the batch; None for all, in order. rays: number of rays.
        bundle: [n] their rays, with `nears` and `fars` of the segments.
        ends: [n, 1] each, begin and end of their whole rays.
        live: [n] bool, False for padding; None if there is none.
    """

    rows: Tensor | slice
    ray: Tensor | None
    rays: int
    bundle: RayBundle
    ends: tuple[Tensor, Tensor]
    live: Tensor | None = None


@dataclass(frozen=True)
class WholeRays:
    """Samples of whole rays by the proposal networks that all cells share.

    Attributes:
        bins: [R, S + 1] of the field. proposals: of each level, weights [R, S] and sample positions.
    """

    bins: Bins
    proposals: Sequence[tuple[Tensor, Bins]]

    def of(self, ray: Tensor) -> "WholeRays":
        """Return those of some rays [n]."""
        chosen = [(weights.index_select(0, ray), _rows(bins, ray)) for weights, bins in self.proposals]
        return WholeRays(_rows(self.bins, ray), chosen)


@dataclass(frozen=True)
class Asked:
    """Sampling request: segments of one cell with the same number of samples.

    Attributes:
        parts: number of segments that share nerfacto's number of samples. lines: the segments.
        moved: of each level, random offsets from 0 to 1, [n, 1 or its edges]; None for no offsets.
        whole: [n] samples of their whole rays; None if the cell has proposal networks of its own.
    """

    parts: int
    lines: CellSegments
    moved: Sequence[Tensor] | None
    whole: WholeRays | None = None


@dataclass
class Group:
    """Segments of one cell with their samples.

    Attributes:
        rows: indices among this rank's segments, [n] or a slice.
        taken: their samples. count: number of samples evaluated by a field.
        bins: positions of the samples; None without proposals.
        proposals: of each level, weights [n, S] and sample positions.
    """

    rows: Tensor | slice
    taken: Samples
    count: int
    bins: Bins | None = None
    proposals: list[tuple[Tensor, Bins]] = field(default_factory=list[tuple[Tensor, Bins]])


class ProposalSampling:
    """Nerfacto's proposal sampling, separate for each cell or along whole rays.

    Args:
        config: the model's. seed: of random numbers.
        networks: the proposal networks that all cells share; None if each cell has its own.

    Raises:
        ValueError: the number of proposal levels is below one.
    """

    def __init__(self, config: NerfactoModelConfig, seed: int, networks: nn.ModuleList | None = None) -> None:
        if config.num_proposal_iterations < 1:
            raise ValueError("num_proposal_iterations: one at least")
        self.config, self.seed, self.step, self.networks = config, seed, 0, networks
        self.since_update = 0
        """Steps since the last training step of proposal networks."""
        self.anneal: float = 1.0
        """Exponent of proposal weights in this step (annealing; Mip-NeRF 360, equation 18)."""

    @property
    def learns(self) -> bool:
        """True if proposal networks are trained in this step, as in nerfstudio's sampler."""
        return self.since_update > self._pause() or self.step < _ALWAYS_UNTIL

    def begin_step(self, step: int) -> None:
        """Set the step and its annealing exponent."""
        self.step, config = step, self.config
        if config.use_proposal_weight_anneal:
            done = min(step / config.proposal_weights_anneal_max_num_iters, 1.0)
            slope = config.proposal_weights_anneal_slope
            self.anneal = slope * done / ((slope - 1) * done + 1)

    def end_step(self, cells: dict[int, Cell]) -> None:
        """Count the steps since the last training of proposal networks."""
        del cells
        if self.learns:
            self.since_update = 0
        self.since_update += 1

    def _pause(self) -> float:
        config = self.config
        steps = np.interp(self.step, [0, config.proposal_warmup], [0, config.proposal_update_every])
        return float(np.clip(steps, 1, config.proposal_update_every))

    def counts(self, parts: int = 1) -> list[int]:
        """Return the samples of each proposal level and of the field, for one of `parts` segments of a ray."""
        config = self.config
        wanted = list(config.num_proposal_samples_per_ray)[: config.num_proposal_iterations]
        return [ceil(count / parts) for count in (*wanted, config.num_nerf_samples_per_ray)]

    def widths(self, parts: int = 1) -> list[int]:
        """Return the number of random numbers per segment for each level."""
        return [1 if self.config.use_single_jitter else count + 1 for count in self.counts(parts)]

    def whole(self, rays: RayBundle, moved: Sequence[Tensor] | None, anneal: float | Tensor) -> WholeRays:
        """Sample whole rays [R] by the shared networks. See `taken`."""
        assert self.networks is not None and rays.nears is not None and rays.fars is not None
        asked = [Asked(1, CellSegments(slice(None), None, len(rays), rays, (rays.nears, rays.fars)), moved)]
        bins, proposals = self._proposed(asked, self.networks, anneal)
        forget(self.networks)
        return WholeRays(bins[0], proposals[0])

    def whole_of(self, rays: RayBundle, training: bool) -> WholeRays | None:
        """Sample whole rays as of `whole`, with this step's random numbers; None without shared networks."""
        if self.networks is None:
            return None
        widths, moved = self.widths(), None
        if training:
            numbers = torch.empty(len(rays) * sum(widths), device=rays.origins.device)
            moved = jitter(numbers, widths, len(rays), self.seed, self.step, 0, 1)
        return self.whole(rays, moved, self.anneal)

    def sample(
        self, cell: Cell, number: int, parts: int, lines: CellSegments, training: bool, whole: WholeRays | None = None
    ) -> Group:
        """Return the samples of some segments of a cell.

        Args:
            cell: the cell. number: its number, or another seed of random numbers.
            parts: number of segments that share nerfacto's number of samples.
            lines: the segments. training: True to move samples at random. whole: of all rays.
        """
        moved: list[Tensor] | None = None
        if whole is not None:
            assert lines.ray is not None
            return self.taken(cell, [Asked(parts, lines, None, whole.of(lines.ray))], self.anneal)[0]
        if training:
            widths, device = self.widths(parts), lines.bundle.origins.device
            numbers = torch.empty(lines.rays * sum(widths), device=device)
            moved = jitter(numbers, widths, lines.rays, self.seed, self.step, number, parts)
            if lines.ray is not None:
                moved = [part[lines.ray] for part in moved]
        return self.taken(cell, [Asked(parts, lines, moved)], self.anneal)[0]

    def taken(self, cell: Cell, asked: Sequence[Asked], anneal: float | Tensor) -> list[Group]:
        """Sample several groups of a cell's segments with one launch of each network. Nothing is read back, and no
        shape depends on values.

        Args:
            anneal: exponent of proposal weights.
        """
        config = self.config
        if self.networks is None:
            bins, proposals = self._proposed(asked, cell.proposal_networks, anneal)
            bins = [b.up_to_faces(self._ends(one)) for b, one in zip(bins, asked, strict=True)]
        else:
            bins, proposals = [self._cut(one) for one in asked], [one.whole.proposals for one in asked if one.whole]
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
            groups.append(Group(one.lines.rows, taken, taken.density.numel(), at, list(proposed)))
        cell.forget()
        return groups

    def _cut(self, asked: Asked) -> Bins:
        """Return the parts of whole rays' samples that are inside segments."""
        ends, whole = self._ends(asked), asked.whole
        assert whole is not None
        near, far = (self.coordinates(t, *asked.lines.ends) for t in (ends.near, ends.far))
        return whole.bins.within(ends, near, far)

    def _proposed(
        self, asked: Sequence[Asked], networks: nn.ModuleList, anneal: float | Tensor
    ) -> tuple[list[Bins], list[list[tuple[Tensor, Bins]]]]:
        """Return the field's sample positions of each request, and the proposals of each level."""
        counts = [self.counts(one.parts) for one in asked]
        numbers = [list(one.moved) if one.moved is not None else [None] * len(counts[0]) for one in asked]
        each = list(zip(asked, counts, numbers, strict=True))
        bins = [evenly(self._ends(one), count[0], moved[0]) for one, count, moved in each]
        proposals: list[list[tuple[Tensor, Bins]]] = [[] for _ in asked]
        for level in range(self.config.num_proposal_iterations):
            density_of: Any = networks[min(level, len(networks) - 1)].density_fn
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
        return self._by_weights(each, -1, bins, proposals, anneal), proposals

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
        """Draw each group's samples of a level by the last proposals' weights."""
        return [
            by_weights(self._ends(one), at, found[-1][0].detach() ** anneal, counts[level], moved[level])
            for (one, counts, moved), at, found in zip(each, before, proposals, strict=True)
        ]

    def coordinates(self, t: Tensor, near: Tensor, far: Tensor) -> Tensor:
        """Normalise distances to [0, 1] along whole rays, in the first sampler's coordinate, for distortion."""
        if self.config.proposal_initial_sampler != "uniform":
            t, near, far = spacing(t), spacing(near), spacing(far)
        return (t - near) / (far - near)

    def losses(self, groups: list[Group], before: Tensor, rays: int) -> dict[str, Tensor]:
        """Return this rank's part of nerfacto's proposal loss (Mip-NeRF 360, equation 13).

        Weights are those of the whole ray: a segment counts by the transmittance before it, as its samples would in
        nerfacto.

        Args:
            before: [m, 1] transmittance before each of this rank's segments, indexed by the groups' rows.
            rays: number of rays of all ranks together.
        """
        total = before.new_zeros(())
        for group in groups:
            assert group.bins is not None
            transmittance = before[group.rows]
            weights, edges = group.taken.weights.detach() * transmittance, group.bins.spaced
            for proposed, bins in group.proposals:
                around = bins.spaced.expand_as(bins.edges)
                seen = proposed * transmittance if self.networks is None else proposed  # of whole rays as they are
                total = total + lossfun_outer(edges, weights, around, seen).sum()
        return {"interlevel": total / max(rays * self.config.num_nerf_samples_per_ray, 1)}


def _rows(bins: Bins, ray: Tensor) -> Bins:
    """Return the bins of some rays [n]."""
    return Bins(bins.spaced.expand_as(bins.edges).index_select(0, ray), bins.edges.index_select(0, ray))


def _samples(bundle: RayBundle, bins: Bins) -> RaySamples:
    """Return samples in the form that nerfstudio's fields read."""
    frustums = Frustums(
        bundle.origins[:, None], bundle.directions[:, None], bins.starts, bins.ends, bundle.pixel_area[:, None]
    )
    cameras = None if bundle.camera_indices is None else bundle.camera_indices[:, None]
    return RaySamples(frustums=frustums, camera_indices=cameras)


def _of_live(density: Tensor, live: Tensor | None) -> Tensor:
    """Set the densities [n, S] of padding segments to zero, without gradients."""
    return density if live is None else torch.where(live[:, None], density, torch.zeros_like(density))


def _together(density_of: Any, places: Sequence[Tensor]) -> list[Tensor]:
    """Return densities [n, S] at several position tensors [n, S, 3] with one launch of a network."""
    if len(places) == 1:
        return [density_of(places[0])[..., 0]]
    sizes, flat = [x.shape[0] * x.shape[1] for x in places], torch.cat([x.flatten(0, 1) for x in places])
    found = density_of(flat)[..., 0].split(sizes)
    return [x.view(place.shape[:2]) for x, place in zip(found, places, strict=True)]


def in_order(parts: list[Tensor], groups: list[Group], none: Tensor) -> Tensor:
    """Scatter the groups' values into the segments' order; segments without samples have the values of `none`."""
    if not groups:
        return none
    rows: list[Any] = [group.rows for group in groups]
    return none.index_copy(0, torch.cat(rows), torch.cat(parts))


@torch.no_grad()
def median_depth(
    groups: list[Group], before: Tensor, whole: State, segments: Segments, first: int, background: str
) -> Tensor:
    """Return median depths [R, 1], at which a ray's weights sum to one half, or its last sample; 0 if it is in none of
    these groups.

    Args:
        groups: samples of segments from number `first` on. before: [M, 1] transmittance before segments.
        whole: the states of rays.
        background: kind of background. With the rays' mean colour, transmitted light costs nothing, so that weights of
            solid surfaces may sum to less than one half. The threshold is then half of their sum.
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
        half = (0.5 * sum_of_all).clamp_min(1e-6)  # an empty ray gets its last sample
        index = torch.searchsorted(sums.contiguous(), half)
        ends = (last[ray] == at)[:, None]
        here = (before[at] > 1 - half) & ((index < sums.shape[1]) | ends)
        edges = group.taken.edges
        middles = (edges[:, 1:] + edges[:, :-1]) / 2
        found = middles.gather(1, index.clamp_max(sums.shape[1] - 1))
        depth.index_add_(0, ray, torch.where(here, found, 0.0))
    return depth
