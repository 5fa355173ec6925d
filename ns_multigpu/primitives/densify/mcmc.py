"""Gaussian splatting as Markov chain Monte Carlo (Kheradmand et al. 2024) for replicas.

The rules are gsplat's `MCMCStrategy`: dead Gaussians are relocated to living ones, the model grows towards a cap on the
whole model's Gaussians, and positions get noise. There are four differences. Copies are placed next to each other, not
at one position (`cuda_ext.share_out`). The clock counts images. Random numbers are keyed by (seed, image). Picks are
made in integers, because a floating-point running sum on a GPU may differ between runs, and replicas must pick the
same.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

import cuda_ext
from cuda_ext.reference.relocation import numbered
from ns_multigpu.core.dist.collectives import sum_in_place
from ns_multigpu.core.dist.world import World
from ns_multigpu.core.random import keyed_generator, seed_from
from ns_multigpu.primitives.densify.densifier import add_gradients, dues
from ns_multigpu.primitives.densify.gathering import gather_points, moments_of, zeros_there
from ns_multigpu.primitives.densify.index_map import IndexMap, Regrouping
from ns_multigpu.primitives.deterministic import sigmoid
from ns_multigpu.primitives.morton import interleaved_order

GROWTH = 1.05
"""Each refinement grows the model by a twentieth, up to the cap."""

NOISE_STEEPNESS, NOISE_OPACITY = 100.0, 0.005
"""k and t of equation 10: noise fades out as a Gaussian's opacity rises beyond t."""

NOISE = "mcmc noise"
"""Purpose key of the noise's random numbers."""

_QUANTA = 1 << 24
"""Opacities are picked by in units of 1 / this. 2^24 of 2^24 Gaussians still add up far inside an int64."""

STEEPEST = 0.0128
"""Mean gradients on screen, as densification counts them, from which on Gaussians are picked alike where gradients say
what is picked: sixteen times what splatfacto splits at. A bound, so that no Gaussian takes all picks."""


@dataclass
class McmcDensifier:
    """Relocation, growth and noise of Kheradmand et al. 2024, section 3, the same on every replica.

    Attributes:
        cap_max: most Gaussians of the whole model.
        noise_lr: noise in units of the means' learning rate; 0 adds none.
        refine_start_iter, refine_stop_iter, refine_every: when to relocate and grow, in images seen.
        min_opacity: a Gaussian of at most this opacity is dead.
        seed: the run's seed.
        morton: sort the Gaussians in the order of `morton` at every `order_every`th refinement. In between new ones
            are placed next to those that they come from; a few that were relocated lie far from their neighbours.
        picks: where relocated and added Gaussians go: onto those drawn by "opacity", as in the paper; by "gradient",
            their mean gradient on screen, to what default densification would split; or by the product of "both".
            (After a step that several refinements follow, the first alone goes by gradients: none has been counted
            since for the others.)
        world: the ranks whose statistics are summed, where each has all Gaussians.
    """

    kind: ClassVar[str] = "McmcDensifier"

    cap_max: int = 1_000_000
    noise_lr: float = 5e5
    refine_start_iter: int = 500
    refine_stop_iter: int = 25_000
    refine_every: int = 100
    min_opacity: float = 0.005
    seed: int = 0
    morton: bool = False
    order_every: int = 10
    picks: Literal["opacity", "gradient", "both"] = "opacity"
    world: World = field(default_factory=World.single)
    _begun: tuple[int, Tensor | None] | None = field(default=None, init=False, compare=False, repr=False)

    @property
    def noisy(self) -> bool:
        """See `Densifier`."""
        return self.noise_lr > 0

    def initialize_state(self) -> dict[str, Any]:
        """Return the initial state: empty."""
        return {}

    def counts(self, images: int) -> bool:
        """See `Densifier`: True until refining stops if gradients determine picks."""
        return self.picks != "opacity" and images < self.refine_stop_iter

    def statistics(self, params: Any, state: dict[str, Any]) -> dict[str, Tensor]:
        """See `Densifier`: gradient sums and counts if gradients determine picks."""
        if self.picks == "opacity":
            return {}
        for name in ("grad2d", "count"):
            if not isinstance(state.get(name), Tensor):
                state[name] = params["means"].new_zeros(len(params["means"]))
        return {name: state[name] for name in ("grad2d", "count")}

    def limit(self, cap: int | None, held_back: Callable[[int], None]) -> int | None:
        """See `Densifier`: `cap_max` limits it."""
        return self.cap_max

    def after_step(
        self, params: Any, optimizers: dict[str, torch.optim.Optimizer], state: dict[str, Any], step: int, images: int,
        rate: float, info: Callable[[], Mapping[str, Any]],
    ) -> None:  # fmt: skip
        """See `Densifier`."""
        if self.counts(step):
            self.statistics(params, state)
            add_gradients(state, info())
        self.step_post_backward(params, optimizers, step, images, rate, state)

    @torch.no_grad()
    def step_post_backward(
        self,
        params: Any,
        optimizers: dict[str, torch.optim.Optimizer],
        step: int,
        images: int,
        rate: float,
        state: dict[str, Any] | None = None,
    ) -> None:
        """Refine when due, then add noise.

        Args:
            params: means [N, 3], scales [N, 3] (log), quats [N, 4], opacities [N, 1] or [N] (logits), any others.
            optimizers: by parameter.
            step: images seen before this step.
            images: images in this step.
            rate: the means' learning rate that a step of one image would have.
            state: the statistics, where they are counted.
        """
        self.refine_when_due(params, optimizers, {} if state is None else state, step, images)
        self.move(params, step, images, rate)

    def due_after(self, step: int, images: int) -> bool:
        """Return True if a refinement follows a step of `images` images from number `step` on."""
        return bool(self._dues(step, images))

    def _dues(self, step: int, images: int) -> list[int]:
        due = dues(self.refine_every, step, images)
        return [image for image in due if self.refine_start_iter < image < self.refine_stop_iter]

    @torch.no_grad()
    def refine_when_due(
        self, params: Any, optimizers: dict[str, torch.optim.Optimizer], state: dict[str, Any], step: int, images: int
    ) -> None:
        """Relocate and grow for each due image, and reset the statistics; see `step_post_backward`."""
        for image in self._dues(step, images):
            begun, self._begun = self._begun, None
            if begun is not None and begun[0] == image:
                steep = begun[1]
            else:
                steep = self._steepness(params, state)
                self._relocate(params, optimizers, image, steep)
            num_new = self._num_new(params)
            if num_new or self._orders(image):
                self._rearrange(params, optimizers, self._growth(params, image, steep, num_new), self._orders(image))
            elif self._can_change_owners():
                self._send_to_owners(params, optimizers)
            count = len(params["means"])
            for name, sums in self.statistics(params, state).items():
                state[name] = sums.zero_() if len(sums) == count else zeros_there(sums, count)

    @torch.no_grad()
    def refine_ahead(
        self, params: Any, optimizers: dict[str, torch.optim.Optimizer], state: dict[str, Any], step: int, images: int,
        taken: Tensor,
    ) -> bool:  # fmt: skip
        """See `Densifier`: relocates on the device without readback. If growth follows, only the first image's
        relocation is done here, and `refine_when_due` does the rest."""
        due, self._begun = self._dues(step, images), None
        if not due or not self._prefetches():
            return False
        if self.replaces(params, step, images):
            steep = self._steepness(params, state)
            self._relocate(params, optimizers, due[0], steep, taken)
            self._begun = (due[0], steep)
            return False
        for image in due:
            self._relocate(params, optimizers, image, self._steepness(params, state), taken)
            for sums in self.statistics(params, state).values():
                sums.masked_fill_(taken, 0.0)
        return True

    def _prefetches(self) -> bool:
        """Return True if a relocation needs no readback."""
        return True

    def replaces(self, params: Any, step: int, images: int) -> bool:
        """See `Densifier`: relocation alone changes tensors in place."""
        due = self._dues(step, images)
        return bool(due) and (
            self._can_change_owners() or self._num_new(params) > 0 or any(self._orders(image) for image in due)
        )

    def _can_change_owners(self) -> bool:
        """Return True if Gaussians that only moved may have to change ranks."""
        return False

    def _send_to_owners(self, params: Any, optimizers: dict[str, Any]) -> None:
        """Move such Gaussians to their owners, in unchanged order."""

    def _orders(self, image: int) -> bool:
        """Return True if the refinement after that image sorts the Gaussians."""
        return self.morton and image % (self.order_every * self.refine_every) == 0

    def _steepness(self, params: Any, state: dict[str, Any]) -> Tensor | None:
        """Return pick weights by gradient, [N] in [0, 1]; None for picks by opacity."""
        if self.picks == "opacity":
            return None
        # On copies: the last counted step may have to be retried.
        sums = {name: value.clone() for name, value in self.statistics(params, state).items()}
        self._sum_over_ranks(sums)
        mean = sums["grad2d"] / sums["count"].clamp(min=1)
        return (mean / STEEPEST).clamp(max=1.0)

    def _sum_over_ranks(self, sums: dict[str, Tensor]) -> None:
        """Sum the statistics of replicas, each of which counts the rows that it draws."""
        if sums and self.world.size > 1:
            together = torch.stack(list(sums.values()))  # one collective for all
            sum_in_place(together, self.world)
            sums.update(zip(sums, together, strict=True))

    def _weights(self, opacities: Tensor, steep: Tensor | None) -> Tensor:
        """Return pick weights; 0 for dead Gaussians."""
        weights = opacities if steep is None else steep.to(opacities.dtype)
        if self.picks == "both" and steep is not None:
            weights = weights * opacities
        return weights.masked_fill(opacities <= self.min_opacity, 0.0)

    @torch.no_grad()
    def move(self, params: Any, step: int, images: int, rate: float, taken: Tensor | None = None) -> None:
        """Add a step's noise to the means.

        B steps of one image would add B independent noises of standard deviation `rate` * noise_lr * s, the covariance
        and gate in s hardly changing in between. Variances add, so the sum is one noise of sqrt(B) * rate * noise_lr
        * s. With the rule "sqrt" that is the batch's own learning rate times noise_lr * s.

        Args:
            params, step, images, rate: as in `step_post_backward`.
            taken: [] on the device, 0 or False to add nothing after all.
        """
        if not self.noisy:
            return
        means, quats, scales, logits = (params[name].data for name in ("means", "quats", "scales", "opacities"))
        first, rows = self._places(len(means))
        cuda_ext.add_noise(
            means, quats, scales, logits.flatten(), start=seed_from(self.seed, NOISE, step), first=first, rows=rows,
            scale=math.sqrt(images) * rate * self.noise_lr, taken=None if taken is None else taken.to(means.dtype),
            steepness=NOISE_STEEPNESS, threshold=NOISE_OPACITY,
        )  # fmt: skip

    def _places(self, count: int) -> tuple[int, Tensor | None]:
        """Return the global index of the first of `count` local Gaussians, and the indices of all [N] int64 if not
        contiguous."""
        return 0, None

    def _relocate(
        self, params: Any, optimizers: dict[str, Any], image: int, steep: Tensor | None, taken: Tensor | None = None
    ) -> None:
        """Move every dead Gaussian onto a living one, drawn by opacity or by `steep`; none if `taken` is False."""
        opacities = sigmoid(params["opacities"].detach().flatten())
        sums = quanta(self._weights(opacities, steep)).cumsum(0)
        start = seed_from(self.seed, "relocate", image)
        sources, copies = cuda_ext.draw_sources(sums, opacities <= self.min_opacity, start=start, taken=taken)
        cuda_ext.copy_rows([value.data for value in params.values()], sources)
        # As in gsplat, moments of moved Gaussians are unchanged.
        moments = all_moments(params, optimizers)
        self._share_out(params, copies, sources=sources, numbers=numbered(sources), cleared=moments)

    def _growth(self, params: Any, image: int, steep: Tensor | None, num_new: int) -> Tensor:
        """Return the Gaussians to copy, `num_new` in all, drawn by opacity or by `steep`."""
        opacities = sigmoid(params["opacities"].detach().flatten())
        weights = opacities if steep is None else self._weights(opacities, steep)
        return pick(weights, num_new, keyed_generator(self.seed, "grow", image))

    def _num_new(self, params: Any) -> int:
        """Return the growth of the whole model at a refinement; the same on every rank."""
        count = self._whole(len(params["means"]))
        return max(0, min(self.cap_max, int(GROWTH * count)) - count)

    def _whole(self, count: int) -> int:
        """Return the number of Gaussians of the whole model, of which `count` are local."""
        return count

    def _rearrange(self, params: Any, optimizers: dict[str, Any], sources: Tensor, orders: bool) -> None:
        """Append copies of `sources`, or with `morton` insert them next to their sources. If `orders`, sort all."""
        if len(sources) == 0 and not orders:
            return
        index_map = self._split(params, sources)
        regrouping = index_map
        if self.morton:
            by = interleaved_order(index_map.positions(params["means"])) if orders else index_map.source_order()
            regrouping = index_map.ordered(by)
        gather_points(params, optimizers, regrouping, lambda name, rows: move_copies(name, rows, regrouping))

    def _split(self, params: Any, sources: Tensor) -> IndexMap:
        """Make each of `sources` one of the parts that it is to become (`cuda_ext.share_out`); return the index map of
        its copies."""
        count, sources = len(params["means"]), torch.sort(sources).values
        copies, numbers = counted(sources, count), numbered(sources)
        shapes = {name: params[name] for name in ("means", "quats", "scales", "opacities")}
        means = self._copied(shapes, sources, copies, numbers)["means"]
        self._share_out(params, copies)
        return grown(count, sources, means - params["means"].data[sources])

    def _copied(self, params: Any, rows: Tensor, copies: Tensor, numbers: Tensor) -> dict[str, Tensor]:
        """Return copies of some rows [M] of the parameters, by name, each as the part of its source that it will be.

        Args:
            copies: [N] int32, how many each of the parameters' rows gets. numbers: [M] int32, see `numbered`.
        """
        copied = {name: value.data[rows] for name, value in params.items()}
        each = torch.arange(len(rows), dtype=torch.int32, device=rows.device)  # its own source
        self._share_out(copied, copies[rows], sources=each, numbers=numbers)
        return copied

    def _share_out(self, params: Any, copies: Tensor, **more: Any) -> None:
        """Run `cuda_ext.share_out` on the parameters."""
        means, quats, scales, logits = (params[name].data for name in ("means", "quats", "scales", "opacities"))
        cuda_ext.share_out(means, quats, scales, logits.view(-1), copies, min_opacity=self.min_opacity, **more)


def grown(count: int, sources: Tensor, offsets: Tensor) -> IndexMap:
    """Return the index map of `count` Gaussians, and after them copies of `sources` [G] int64, ascending, `offsets`
    [G, 3] away from them.

    In this order copies that share a code stand as their sources do, whatever they were drawn in.
    """
    here = torch.arange(count, device=sources.device)
    return IndexMap(torch.cat([here, sources]), count, offsets)


def move_copies(name: str, rows: Tensor, regrouping: Regrouping | IndexMap) -> None:
    """Move the copies among a parameter's rows [T, ...], if it is the means: see `Edit`."""
    if name == "means":
        rows[regrouping.children] += regrouping.offsets


def quanta(weights: Tensor) -> Tensor:
    """Return weights [N] in [0, 1] in units of 2^-24, [N] int64."""
    return (weights.to(torch.float64) * _QUANTA).long()


def pick(weights: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Draw `count` rows, [count] int64, with replacement in proportion to `weights` [N] in [0, 1].

    The arithmetic is exact in integers. The same weights and generator (a host's) give the same rows on every device,
    for any number of weights. Draws none if all weights are below 2^-24.
    """
    sums = quanta(weights).cumsum(0)
    total = int(sums[-1]) if len(sums) and count else 0
    if total == 0:
        return torch.empty(0, dtype=torch.int64, device=weights.device)
    drawn = torch.randint(total, (count,), generator=generator).to(weights.device)
    return torch.searchsorted(sums, drawn, right=True)


def counted(rows: Tensor, count: int) -> Tensor:
    """Return the number of occurrences of each of `count` rows in `rows` [M] int64: [count] int32."""
    found = torch.zeros(count, dtype=torch.int32, device=rows.device)
    return found.index_add_(0, rows, torch.ones_like(rows, dtype=torch.int32))


def all_moments(params: Any, optimizers: dict[str, Any]) -> list[Tensor]:
    """Return the optimizers' per-row state of all parameters."""
    return [x for name, value in params.items() for x in moments_of(value, optimizers.get(name)).values()]
