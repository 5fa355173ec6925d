"""A training step through autograd, as splatfacto takes it: with gsplat and torch, or with our operators."""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from benchmarks.kernels.renderers import gsplat_render, operators_render
from benchmarks.lib.counting import GsplatCounts, OurCounts
from benchmarks.scenes.garden import Scene
from cuda_ext import FusedAdam, fused_step, l1_ssim
from ns_multigpu.core.types import View

RATE = 1e-8
"""Learning rate: the work is the same as with any other, and the scene stays as it is."""
SSIM_LAMBDA = 0.2

Loss = Callable[[Tensor], Tensor]
"""Of an image [H, W, 3]."""


class Kind(NamedTuple):
    """Operators of the measured step."""

    render: Literal["gsplat", "operators"]
    adam: Literal["default", "fused", "ours"]


def torch_loss(scene: Scene) -> Loss:
    """Return splatfacto's loss, by torch and pytorch_msssim."""
    from pytorch_msssim import SSIM

    target = scene.floats()
    ssim = SSIM(data_range=1.0, size_average=True, channel=3)

    def loss(image: Tensor) -> Tensor:
        l1 = (target - image).abs().mean()
        unlike = 1 - ssim(target.permute(2, 0, 1)[None], image.permute(2, 0, 1)[None])
        return (1 - SSIM_LAMBDA) * l1 + SSIM_LAMBDA * unlike

    return loss


def fused_loss(scene: Scene) -> Loss:
    """Return splatfacto's loss, by our operator."""
    width, height = scene.size
    windows = (width - 10) * (height - 10)

    def loss(image: Tensor) -> Tensor:
        l1, ssim, _ = l1_ssim(image, scene.target, (0, 0, width, height))
        l1_share, ssim_share = (1 - SSIM_LAMBDA) / (3 * width * height), SSIM_LAMBDA / (3 * windows)
        return l1_share * l1 + SSIM_LAMBDA - ssim_share * ssim

    return loss


class AutogradStep:
    """Steps of a copy of the scene's parameters.

    Args:
        scene: with one view.
        kind: with "operators" the loss is ours too.
        counting: sum up absolute gradients, too, and add to densification's statistics: gsplat's strategy, or ours.
    """

    def __init__(self, scene: Scene, kind: Kind, counting: bool = False) -> None:
        self._scene = scene
        self._params = [torch.nn.Parameter(p.clone()) for p in scene.raw()]
        options: dict[str, Any] = {"fused": True} if kind.adam == "fused" else {}
        adam = FusedAdam if kind.adam == "ours" else torch.optim.Adam
        self._optimizers = [adam([p], lr=RATE, eps=1e-15, **options) for p in self._params]
        ours = kind.render == "operators"
        view = View(scene.viewmats[0], scene.Ks[0], scene.width, scene.height)
        self._counts: OurCounts | GsplatCounts | None = None
        if counting:
            self._counts = OurCounts(view) if ours else GsplatCounts(absgrad=True, packed=False)
        meet = None if self._counts is None else self._counts.meet
        self._render = (operators_render if ours else gsplat_render)(scene, counting, meet)
        self._loss = fused_loss(scene) if ours else torch_loss(scene)
        self._background = scene.background()

    def __call__(self) -> tuple[Tensor, Tensor]:
        """Run a step and return the image [H W, 3] and the loss before it."""
        for optimizer in self._optimizers:
            optimizer.zero_grad()
        means, quats, log_scales, logits, dc, rest = self._params
        image, alpha = self._render([means, quats, log_scales.exp(), logits.sigmoid(), dc, rest])
        image = (image + (1 - alpha)[:, None] * self._background).clamp(0.0, 1.0)
        loss = self._loss(image.view(self._scene.height, self._scene.width, 3))
        loss.backward()
        if self._counts is not None:
            self._counts.add(means)
        fused_step(self._optimizers)
        return image.detach(), loss.detach()

    def moments(self) -> list[Tensor]:
        """Return Adam's first moments of the parameters."""
        return [o.state[p]["exp_avg"] for o, p in zip(self._optimizers, self._params, strict=True)]
