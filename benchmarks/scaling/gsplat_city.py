"""gsplat 1.4.0 over the views of a city: on one GPU, and in its distributed mode with a camera on each.

A whole step is what splatfacto takes: activations, `rasterization`, L1 and pytorch_msssim's SSIM, six
`torch.optim.Adam`. In the distributed mode each rank's optimizers hold its points, as in Grendel's scheme. A counting
step adds to the statistics of gsplat's `DefaultStrategy`: of absolute gradients, which the distributed mode lacks.
"""

import statistics
from collections.abc import Callable
from math import gcd
from typing import Any

import torch
from torch import Tensor

from benchmarks.lib.counting import GsplatCounts
from benchmarks.lib.lockstep import Clock, memory, over_ranks
from benchmarks.scaling.city_runs import SSIM_LAMBDA, CityViews
from benchmarks.scenes.city_model import DEGREE, CityModel
from ns_multigpu.core.dist.collectives import barrier
from ns_multigpu.core.dist.world import World
from ns_multigpu.primitives.gaussians.schema import ORDER

_RATE = 1e-12
"""Leaves the model as it is."""


class GsplatRun:
    """Steps of gsplat.

    Args:
        model: this rank's points, which the optimizers step in place; its moments are forgotten, for torch has its own.
        city_views: the views; rank r sees every size-th from the r-th on.
        world: with one rank gsplat's ordinary mode with `packed=False`, as nerfstudio calls it; with several the
            distributed one, packed.
        fused: Adam with `fused=True`. counting: steps add to densification's statistics.
    """

    def __init__(
        self, model: CityModel, city_views: CityViews, world: World, fused: bool, counting: bool = False
    ) -> None:
        from pytorch_msssim import SSIM

        model.forget_moments()
        self._city_views, self._world, self._fused = city_views, world, fused
        self._params = {name: torch.nn.Parameter(model.params[name]) for name in ORDER}
        options: dict[str, Any] = {"fused": True} if fused else {}
        self._optimizers = [torch.optim.Adam([p], lr=_RATE, eps=1e-15, **options) for p in self._params.values()]
        self._ssim = SSIM(data_range=1.0, size_average=True, channel=3)
        self._cameras = [(v.viewmat[None].to(world.device), v.K[None].to(world.device)) for v in city_views.views]
        self._turn = 0
        several = world.size > 1
        self._counts = GsplatCounts(absgrad=not several, packed=several) if counting else None

    def drawn(self, seen: int, loss: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """Render a view, run the backward pass, and return the loss."""
        from gsplat.rendering import rasterization

        for p in self._params.values():
            p.grad = None
        p, scene = self._params, self._city_views.scene
        harmonics = torch.cat([p["features_dc"][:, None], p["features_rest"]], dim=1)
        several = self._world.size > 1
        image, _, info = rasterization(
            p["means"], p["quats"], p["scales"].exp(), p["opacities"].sigmoid().squeeze(-1), harmonics,
            *self._cameras[seen], scene.width, scene.height, sh_degree=DEGREE, packed=several, distributed=several,
            absgrad=self._counts is not None and not several,
        )  # fmt: skip
        if self._counts is not None:
            self._counts.meet(info)
        result = loss(image[0].clamp(0.0, 1.0), self._city_views.images[seen].float() / 255)
        result.backward()
        if self._counts is not None:
            self._counts.add(p["means"])
        return result.detach()

    def step(self) -> Tensor:
        """Take a whole step and return its loss."""
        loss = self.drawn(self._next(), self._photometric)
        for optimizer in self._optimizers:
            optimizer.step()
        return loss

    def forward_backward(self) -> Tensor:
        """Rendering and its way back from the mean squared error."""
        return self.drawn(self._next(), lambda image, target: (image - target).square().mean())

    def loss_of(self, seen: int) -> float:
        """Return the loss of one view, for comparison."""
        return float(self.drawn(seen, self._photometric))

    def time(self, steps: int) -> dict[str, Any]:
        """Return times in ms: whole steps, and forward and backward passes without fused Adam; images_per_s; memory."""
        found: dict[str, Any] = {"ms": self._time(self.step, steps)}
        if not self._fused:
            found["forward_backward_ms"] = self._time(self.forward_backward, steps)
        per_second = 1e3 * self._world.size / found["ms"]
        return {**found, "images_per_s": per_second, "memory": memory(self._world)}

    def _time(self, way: Callable[[], Any], steps: int) -> float:
        """Return the slowest rank's milliseconds: the mean over batches of each batch's median step, as ours."""
        for _ in range(2):
            way()
        barrier(self._world)
        clock = Clock(self._world.device)
        clock.mark()
        for _ in range(steps):
            way()
            clock.mark()
        slowest = [max(column) for column in zip(*over_ranks(clock.intervals(), self._world), strict=True)]
        batches = len(self._city_views.views) // gcd(len(self._city_views.views), self._world.size)
        return statistics.mean(statistics.median(slowest[b::batches]) for b in range(min(batches, steps)))

    def _next(self) -> int:
        seen = (self._turn * self._world.size + self._world.rank) % len(self._city_views.views)
        self._turn += 1
        return seen

    def _photometric(self, image: Tensor, target: Tensor) -> Tensor:
        l1 = (target - image).abs().mean()
        unlike = 1 - self._ssim(target.permute(2, 0, 1)[None], image.permute(2, 0, 1)[None])
        return (1 - SSIM_LAMBDA) * l1 + SSIM_LAMBDA * unlike
