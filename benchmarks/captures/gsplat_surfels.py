"""gsplat 1.4.0's 2D Gaussians under nerfstudio's splatfacto: what `benchmarks.captures.recipes` compares ours with.

`rasterization_2dgs` in the place of `rasterization`, its DefaultStrategy with the gradient that gsplat has for 2D
Gaussians, and the loss of normals of gsplat's `simple_trainer_2dgs.py`. All else is splatfacto's: views, rates, loss,
harmonics, resolutions, when to refine.

splatfacto's Gaussians have three scales, and gsplat draws the first two. The third is made so small that it decides
nothing, as if it were not there; gsplat's own trainer leaves it as large as the others were at first.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

FLAT = math.log(1e-8)
"""The third scale, a natural logarithm."""


def gsplats_rasterization_2dgs(*args: Any, **options: Any) -> Any:
    """Call gsplat's function, which needs a GPU."""
    from gsplat.rendering import rasterization_2dgs

    return rasterization_2dgs(*args, **options)


class Peer:
    """Draws and refines 2D Gaussians in a trainer of splatfacto.

    Args:
        normal_loss: weight of the loss of normals. start: images before it counts.
        draw: gsplat's function.
    """

    def __init__(self, normal_loss: float, start: int, draw: Callable[..., Any] = gsplats_rasterization_2dgs) -> None:
        self._weight, self._start, self._draw = normal_loss, start, draw
        self._normals: tuple[Tensor, Tensor, Tensor] | None = None

    def rasterization(
        self, means: Tensor, quats: Tensor, scales: Tensor, opacities: Tensor, colors: Tensor, viewmats: Tensor,
        Ks: Tensor, width: int, height: int, *, near_plane: float, far_plane: float, sh_degree: int | None,
        render_mode: str, rasterize_mode: str, packed: bool, sparse_grad: bool, absgrad: bool, **_: Any,
    ) -> tuple[Tensor, Tensor, dict[str, Any]]:  # fmt: skip
        """Render one view by 2D Gaussians, with the interface of gsplat's `rasterization` as nerfstudio calls it.

        Raises:
            NotImplementedError: asked for what 2D Gaussians have not here.
        """
        if rasterize_mode != "classic" or packed or sparse_grad or absgrad:
            raise NotImplementedError("2D Gaussians: classic, not packed, without sparse gradients and absgrad")
        drawn, alpha, normals, surface, _distortion, _median, info = self._draw(
            means, quats, scales, opacities, colors, viewmats, Ks, width, height,
            near_plane=near_plane, far_plane=far_plane, sh_degree=sh_degree, render_mode="RGB+ED",
        )  # fmt: skip
        self._normals = (normals.reshape(height, width, 3), surface.reshape(height, width, 3), alpha[0])
        return drawn if render_mode == "RGB+ED" else drawn[..., :3], alpha, info

    def join(self, trainer: Any) -> None:
        """Turn the model of a trainer, which is set up and has not begun, into one of 2D Gaussians."""
        model = trainer.pipeline.model
        with torch.no_grad():
            model.gauss_params["scales"][:, 2] = FLAT
        model.strategy.key_for_gradient = "gradient_2dgs"
        usual = model.get_loss_dict

        def losses(*args: Any, **options: Any) -> dict[str, Tensor]:
            found = usual(*args, **options)
            if model.training and self._weight > 0 and model.step >= self._start:
                found["normals_loss"] = self._weight * self.normal_loss()
            return found

        model.get_loss_dict = losses

    def normal_loss(self) -> Tensor:
        """Return the mean of 1 - <normal, normal of the depth> (Huang et al. 2024) of the view drawn last."""
        assert self._normals is not None, "no view has been drawn"
        normals, surface, alpha = self._normals
        return (1 - (normals * surface * alpha.detach()).sum(-1)).mean()
