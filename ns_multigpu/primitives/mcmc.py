"""Gaussian splatting as Markov chain Monte Carlo (Kheradmand et al. 2024) for replicas.

The rules are gsplat's `MCMCStrategy`: dead Gaussians move onto living ones, the model grows towards a cap that counts
the Gaussians of the whole model, and positions get noise. What differs is the clock, which counts images; the random
numbers, which are keyed by (seed, image); and the picks, which are made in integers: a floating-point running sum on a
GPU may come out differently twice, and replicas must pick the same.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from gsplat.utils import normalized_quat_to_rotmat
from torch import Tensor

from ns_multigpu.core.random import keyed_generator
from ns_multigpu.primitives.densifier import dues

MOST_COPIES = 51
"""A Gaussian that is to become more than this many is treated as if it became this many, as in gsplat."""

GROWTH = 1.05
"""Each refinement grows the model by a twentieth, up to the cap."""

NOISE_STEEPNESS, NOISE_OPACITY = 100.0, 0.005
"""k and t of equation 10: noise fades out as a Gaussian's opacity rises beyond t."""

_QUANTA = 1 << 24
"""Opacities are picked by in units of 1 / this. 2^24 of 2^24 Gaussians still add up far inside an int64."""


@dataclass
class McmcDensifier:
    """Relocation, growth and noise of Kheradmand et al. 2024, section 3, the same on every replica.

    Attributes:
        cap_max: most Gaussians of the whole model.
        noise_lr: noise in units of the means' learning rate.
        refine_start_iter, refine_stop_iter, refine_every: when to relocate and grow, in images seen.
        min_opacity: a Gaussian of at most this opacity is dead.
        seed: the run's seed.
    """

    cap_max: int = 1_000_000
    noise_lr: float = 5e5
    refine_start_iter: int = 500
    refine_stop_iter: int = 25_000
    refine_every: int = 100
    min_opacity: float = 0.005
    seed: int = 0

    def initialize_state(self) -> dict[str, Any]:
        """What must be kept between steps: nothing."""
        return {}

    @torch.no_grad()
    def step_post_backward(
        self,
        params: Any,
        optimizers: dict[str, torch.optim.Optimizer],
        step: int,
        images: int,
        rate: float,
    ) -> None:
        """Refines when due, then adds noise.

        B steps of one image would add B independent noises of standard deviation `rate` * noise_lr * s, the covariance
        and gate in s hardly changing in between. Variances add, so the sum is one noise of sqrt(B) * rate * noise_lr
        * s. With the rule "sqrt" that is the batch's own learning rate times noise_lr * s.

        Args:
            params: means [N, 3], scales [N, 3] (log), quats [N, 4], opacities [N, 1] or [N] (logits), any others.
            optimizers: by parameter.
            step: images seen before this step.
            images: images in this step.
            rate: the means' learning rate that a step of one image would have.
        """
        for image in dues(self.refine_every, step, images):
            if self.refine_start_iter < image < self.refine_stop_iter:
                self._relocate(params, optimizers, image)
                self._grow(params, optimizers, image)
        generator = keyed_generator(self.seed, "mcmc noise", step, device=params["means"].device)
        add_noise(params, math.sqrt(images) * rate * self.noise_lr, generator)

    def _relocate(self, params: Any, optimizers: dict[str, Any], image: int) -> None:
        """Moves every dead Gaussian onto a living one, drawn by opacity."""
        opacities = params["opacities"].flatten().sigmoid()
        dead = opacities <= self.min_opacity
        targets = torch.where(dead)[0]
        sources = pick(opacities.masked_fill(dead, 0.0), len(targets), keyed_generator(self.seed, "relocate", image))
        if len(sources) == 0:
            return
        self._share_out(params, sources)
        for name, value in params.items():
            value.data[targets] = value.data[sources]
            for moment in _moments(optimizers.get(name), value):
                # As in gsplat: those of the Gaussian that was moved here stay as they are.
                moment[sources] = 0

    def _grow(self, params: Any, optimizers: dict[str, Any], image: int) -> None:
        """Adds Gaussians on top of those that are there, drawn by opacity, up to the cap."""
        count = len(params["means"])
        wanted = max(0, min(self.cap_max, int(GROWTH * count)) - count)
        opacities = params["opacities"].flatten().sigmoid()
        sources = pick(opacities, wanted, keyed_generator(self.seed, "grow", image))
        if len(sources) == 0:
            return
        self._share_out(params, sources)
        for name, value in list(params.items()):
            grown = torch.nn.Parameter(torch.cat([value.data, value.data[sources]]))
            if name in optimizers:
                _replace(optimizers[name], value, grown, len(sources))
            params[name] = grown

    def _share_out(self, params: Any, sources: Tensor) -> None:
        """Makes each picked Gaussian so faint and small that it and its copies look as it did alone."""
        copies = torch.bincount(sources, minlength=len(params["means"]))
        chosen = torch.where(copies > 0)[0]
        logits = params["opacities"].data
        opacities, factors = relocated(logits[chosen].flatten().sigmoid(), copies[chosen] + 1)
        largest = 1.0 - torch.finfo(torch.float32).eps
        logits[chosen] = opacities.clamp(self.min_opacity, largest).logit().reshape(-1, *logits.shape[1:])
        params["scales"].data[chosen] += factors.log()[:, None]


def relocated(opacities: Tensor, ratios: Tensor) -> tuple[Tensor, Tensor]:
    """What a Gaussian must become for `ratio` coincident copies to look as it did alone (equation 9).

    With o the opacity and N the ratio, o' = 1 - (1 - o)^(1/N), and scales are multiplied by o / f, where
    f = sum_{i=1..N} sum_{k=0..i-1} C(i-1, k) (-1)^k o'^(k+1) / sqrt(k+1). Summing over i first (hockey stick) leaves
    f = sum_{j=1..N} C(N, j) (-1)^(j-1) o'^j / sqrt(j), which Horner's rule evaluates in float64: its terms cancel.

    Args:
        opacities: [M] in (0, 1).
        ratios: [M] integers; those above MOST_COPIES count as MOST_COPIES.

    Returns:
        new opacities [M] and the scales' factors [M], of the opacities' dtype.
    """
    ratios = ratios.clamp(1, MOST_COPIES)
    old = opacities.to(torch.float64).clamp(max=1.0 - torch.finfo(torch.float32).eps)
    new = -torch.expm1(torch.log1p(-old) / ratios)
    table = torch.tensor(
        [
            [(-1.0) ** (j - 1) * math.comb(n, j) / math.sqrt(j) for j in range(1, MOST_COPIES + 1)]
            for n in range(MOST_COPIES + 1)
        ],
        dtype=torch.float64,
        device=opacities.device,
    )
    f = torch.zeros_like(new)
    for j in range(MOST_COPIES - 1, -1, -1):
        f = (f + table[ratios, j]) * new
    return new.to(opacities.dtype), (old / f).to(opacities.dtype)


def pick(weights: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """`count` rows, [count] int64, drawn with replacement in proportion to `weights` [N] in [0, 1].

    Exact in integers, so that the same weights and generator (a host's) give the same rows everywhere, on any number
    of weights. None are drawn if no weight reaches 2^-24.
    """
    sums = (weights.to(torch.float64) * _QUANTA).long().cumsum(0)
    total = int(sums[-1]) if len(sums) and count else 0
    if total == 0:
        return torch.empty(0, dtype=torch.int64, device=weights.device)
    drawn = torch.randint(total, (count,), generator=generator).to(weights.device)
    return torch.searchsorted(sums, drawn, right=True)


def add_noise(params: Any, scale: float, generator: torch.Generator) -> None:
    """Moves means by scale * gate(opacity) * covariance @ normal noise (equation 10), in place.

    Args:
        params: as in `McmcDensifier.step_post_backward`.
        scale: learning rate times noise_lr.
        generator: on the means' device.
    """
    means = params["means"].data
    gate = torch.sigmoid(NOISE_STEEPNESS * (NOISE_OPACITY - params["opacities"].data.flatten().sigmoid()))
    noise = torch.randn(means.shape, generator=generator, device=means.device, dtype=means.dtype)
    rotations = normalized_quat_to_rotmat(torch.nn.functional.normalize(params["quats"].data, dim=-1))
    along = torch.einsum("nji,nj->ni", rotations, noise) * (2 * params["scales"].data).exp()
    means += scale * gate[:, None] * torch.einsum("nij,nj->ni", rotations, along)


def _moments(optimizer: torch.optim.Optimizer | None, param: Tensor) -> list[Tensor]:
    """What an optimizer keeps for each element of a parameter."""
    if optimizer is None or param not in optimizer.state:
        return []
    return [v for v in optimizer.state[param].values() if torch.is_tensor(v) and v.shape == param.shape]


def _replace(optimizer: torch.optim.Optimizer, old: Tensor, new: Tensor, added: int) -> None:
    """Puts `new`, which is `old` with `added` more rows, in its place; the new rows' moments start from zero."""
    for group in optimizer.param_groups:
        group["params"] = [new if p is old else p for p in group["params"]]
    if old not in optimizer.state:
        return
    state = optimizer.state.pop(old)
    for key, value in state.items():
        if torch.is_tensor(value) and value.shape == old.shape:
            state[key] = torch.cat([value, value.new_zeros(added, *value.shape[1:])])
    optimizer.state[new] = state
