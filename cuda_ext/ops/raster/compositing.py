"""The colours of pixels over a background: the public operator, its gradient and its CPU form."""

from typing import Any

import torch
from torch import Tensor

from cuda_ext.dispatch.library import LIBRARY, NAMESPACE, fake
from cuda_ext.dispatch.load import kernels_serve

__all__ = ["composite"]


def composite(out: Tensor, alpha: Tensor, background: Tensor) -> Tensor:
    """Blend pixels over a background and clamp them to [0, 1], as splatfacto's loss does.

    Differentiable by `out` and `alpha`; as with torch.clamp, a colour outside [0, 1] has no gradient.

    Args:
        out: [S, D] blended features, colour first, D >= 3.
        alpha: [S] how much of each pixel they cover.
        background: [3].

    Returns:
        [S, 3].

    Raises:
        TypeError, ValueError: a tensor of the wrong shape, dtype or device.
        NativeBuildError: the CUDA operators cannot be compiled.
    """
    if out.dim() != 2 or out.shape[1] < 3 or alpha.shape != out.shape[:1] or background.shape != (3,):
        raise ValueError(
            "composite: need out [S,D], D >= 3, alpha [S] and background [3], got "
            f"{tuple(out.shape)}, {tuple(alpha.shape)} and {tuple(background.shape)}."
        )
    if kernels_serve(out):
        return torch.ops.ns_multigpu.composite(out, alpha, background)
    return _composite_torch(out, alpha, background)


def blend(out: Tensor, alpha: Tensor, background: Tensor) -> Tensor:
    """Return `composite` [S, 3] without the clamp."""
    return out[:, :3] + (1 - alpha)[:, None] * background


def _composite_torch(out: Tensor, alpha: Tensor, background: Tensor) -> Tensor:
    return blend(out, alpha, background).clamp(0.0, 1.0)


def composite_backward_torch(
    out: Tensor, alpha: Tensor, background: Tensor, v_rgb: Tensor, clamp: bool = True
) -> tuple[Tensor, Tensor]:
    """Return the gradients of `composite`, or of `blend`, by out and alpha."""
    value = blend(out, alpha, background)
    v = torch.where((value >= 0) & (value <= 1), v_rgb, torch.zeros_like(v_rgb)) if clamp else v_rgb
    return torch.nn.functional.pad(v, (0, out.shape[1] - 3)), -(v * background).sum(dim=1)


@fake("composite")
def _composite_fake(out: Tensor, *_: Any) -> Tensor:
    return out.new_empty(out.shape[0], 3)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _gradient(ctx: Any, v_rgb: Tensor) -> tuple[Tensor, Tensor, None]:
    return (*torch.ops.ns_multigpu.composite_backward(*ctx.saved_tensors, v_rgb.contiguous()), None)


torch.library.register_autograd(f"{NAMESPACE}::composite", _gradient, setup_context=_setup, lib=LIBRARY)
LIBRARY.impl("composite", _composite_torch, "CPU")
LIBRARY.impl("composite_backward", composite_backward_torch, "CPU")
