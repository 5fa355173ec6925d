"""L1 and SSIM of a patch in one operator: the public function, its gradient, fake kernels and torch forms."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from cuda_ext.dispatch.library import LIBRARY, NAMESPACE, fake
from cuda_ext.dispatch.load import compiled_serves
from cuda_ext.reference import loss as reference

__all__ = ["SSIM_HALO", "l1_ssim"]

SSIM_HALO = reference.HALF  # pixels a patch must show around its inner rectangle (fewer at the image's border)


def l1_ssim(pred: Tensor, target: Tensor, inner: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Sum |pred - target| and SSIM over a patch's inner rectangle.

    SSIM (Wang et al. 2004, equation 13) has an 11x11 Gaussian window of sigma 1.5, C1 = 0.01^2, C2 = 0.03^2, and
    counts at window centres whose window lies in the patch ("valid"). When patches with a halo of 5 px (less at the
    image's border) tile an image with their inner rectangles, both sums and the gradients add up to those of the
    whole image, and `ssim_sum / (3 (w - 10) (h - 10))` of the whole is pytorch_msssim's value.

    Args:
        pred: [h,w,3] in [0,1]. The sums are differentiable by it, not by target.
        target: [h,w,3] uint8, or of pred's type and in [0,1].
        inner: (x0, y0, x1, y1) in pixels of the patch.

    Returns:
        l1_sum [], ssim_sum [] (over pixels and channels) and dssim_dpred [h,w,3] (the gradient of
        ssim_sum, a constant).

    Raises:
        TypeError, ValueError: a wrong type, shape or inner rectangle, or an image narrower than the window.
    """
    _check(pred, target, inner)
    operator = torch.ops.ns_multigpu.l1_ssim if compiled_serves(pred) else reference.l1_ssim
    l1_sum, ssim_sum, gradient = operator(pred, target, inner)
    return l1_sum, ssim_sum, gradient.detach()


def _check(pred: Tensor, target: Tensor, inner: Sequence[int]) -> None:
    if pred.dim() != 3 or pred.shape[2] != 3 or target.shape != pred.shape:
        raise ValueError(
            f"l1_ssim: pred and target must be [h,w,3] of one size, got {tuple(pred.shape)} and {tuple(target.shape)}."
        )
    if target.dtype not in (torch.uint8, pred.dtype):
        raise TypeError(f"l1_ssim: target must be uint8 or {pred.dtype} as pred, got {target.dtype}.")
    height, width = pred.shape[:2]
    if len(inner) != 4 or not (0 <= inner[0] <= inner[2] <= width and 0 <= inner[1] <= inner[3] <= height):
        raise ValueError(f"l1_ssim: inner (x0, y0, x1, y1) must lie in the {width}x{height} patch, got {tuple(inner)}.")
    if inner[0] == inner[2] or inner[1] == inner[3]:
        return
    # A patch with its halo is smaller than the window only at the image's border, where the halo is on one side.
    for name, size, whole in (
        ("width", width, inner[2] - inner[0] == width),
        ("height", height, inner[3] - inner[1] == height),
    ):
        if whole and size < reference.WINDOW:
            raise ValueError(
                f"l1_ssim: an image of {name} {size} px is smaller than the {reference.WINDOW} px window of SSIM. Use "
                f"images of at least {reference.WINDOW} px a side (a smaller downscale factor), or a loss without SSIM."
            )


def l1_ssim_backward_torch(
    pred: Tensor, target: Tensor, dssim_dpred: Tensor, inner: Sequence[int], v_l1: Tensor, v_ssim: Tensor
) -> Tensor:
    """Return the gradient by pred, from those of the two sums, in torch calls."""
    x0, y0, x1, y1 = inner
    v_pred = dssim_dpred * v_ssim
    inside = (slice(y0, y1), slice(x0, x1))
    sign = (pred[inside] - reference.as_floats(target[inside], pred)).sign_()
    v_pred[inside].addcmul_(sign, v_l1)
    return v_pred


@fake("l1_ssim")
def _l1_ssim_fake(pred, target, inner):
    return pred.new_empty(()), pred.new_empty(()), torch.empty_like(pred, memory_format=torch.contiguous_format)


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    pred, target, ctx.inner = inputs
    ctx.save_for_backward(pred, target, output[2])
    ctx.mark_non_differentiable(output[2])


def _l1_ssim_backward(ctx: Any, v_l1: Tensor, v_ssim: Tensor, _v_gradient: Any) -> tuple[Tensor, None, None]:
    pred, target, gradient = ctx.saved_tensors
    return torch.ops.ns_multigpu.l1_ssim_backward(pred, target, gradient, ctx.inner, v_l1, v_ssim), None, None


torch.library.register_autograd(
    f"{NAMESPACE}::l1_ssim", _l1_ssim_backward, setup_context=_save_for_backward, lib=LIBRARY
)
LIBRARY.impl("l1_ssim_backward", l1_ssim_backward_torch, "CPU")
