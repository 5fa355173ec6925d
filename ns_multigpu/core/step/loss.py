"""Losses of a patch: its share of the photometric loss of the whole image, and of the loss of the sky."""

import torch
from torch import Tensor

import cuda_ext
from ns_multigpu.core.types import SSIM_HALO, Patch, View

_CLEAR = 1e-4
"""Transmittance at which drawing stops. It bounds the gradient by alpha of the loss of the sky."""


def sky_loss(alpha: Tensor, sky: Tensor, patch: Patch, view: View) -> Tensor:
    """Return the patch's share of the mean over the whole view's pixels of -log(1 - alpha) where there is sky, [].

    It is the cross entropy of alpha with an empty sky. By log(1 - alpha), the sum of what splats block, each splat of a
    ray has a gradient, also behind an opaque one. 1 - alpha is counted from `_CLEAR` on.

    Args:
        alpha: [h, w, 1] the rendered rectangle, halo included.
        sky: [h, w, 1] the part of each pixel there that is sky, or bool.
        patch: the patch. view: the view it is cut from.
    """
    x0, y0, x1, y1 = patch.inner(view)
    clear = torch.log((1 - alpha + _CLEAR) / (1 + _CLEAR))
    return -(clear * sky.to(alpha.dtype))[y0:y1, x0:x1].sum() / (view.width * view.height)


def photometric_loss(rgb: Tensor, target: Tensor, patch: Patch, view: View, ssim_lambda: float) -> Tensor:
    """Return the patch's share of (1 - lambda) * L1 + lambda * (1 - SSIM) of the whole view.

    The shares of patches that tile the view, each with a halo of `SSIM_HALO`, add up to the whole image's loss. Their
    gradients add up to its gradient. L1 is the mean over pixels and channels. SSIM (Wang et al. 2004) has an 11 x 11
    Gaussian window of sigma 1.5 and is the mean over the windows that lie inside the image.

    Args:
        rgb: [h, w, 3] the rendered rectangle, halo included, in [0, 1].
        target: [h, w, 3] the image there, uint8 or float in [0, 1].
        patch: the patch; `patch.halo` must be at least SSIM_HALO wherever the patch does not end at the image's border.
        view: the view it is cut from.
        ssim_lambda: weight of the SSIM term.

    Raises:
        ValueError: the view is smaller than the window, or the patch lacks the halo.
    """
    windows = (view.width - 2 * SSIM_HALO) * (view.height - 2 * SSIM_HALO)
    if ssim_lambda != 0 and (view.width <= 2 * SSIM_HALO or view.height <= 2 * SSIM_HALO):
        raise ValueError(
            f"view {view.index} is {view.width}x{view.height} pixels; SSIM needs more than {2 * SSIM_HALO} each way. "
            "Set --pipeline.model.ssim-lambda 0 or use larger images (fewer downscales)."
        )
    left, top, right, bottom = patch.rendered(view)
    if right <= left or bottom <= top:
        return rgb.sum() * 0.0
    short = (
        (patch.x0 > 0 and patch.x0 - left < min(SSIM_HALO, patch.x0))
        or (patch.y0 > 0 and patch.y0 - top < min(SSIM_HALO, patch.y0))
        or (patch.x1 < view.width and right - patch.x1 < min(SSIM_HALO, view.width - patch.x1))
        or (patch.y1 < view.height and bottom - patch.y1 < min(SSIM_HALO, view.height - patch.y1))
    )
    if short and ssim_lambda != 0:
        raise ValueError(f"a patch that ends inside its view needs a halo of {SSIM_HALO} pixels: {patch}")
    if right - left <= 2 * SSIM_HALO or bottom - top <= 2 * SSIM_HALO:
        # No window of the view has its centre in the patch: it lies at the border, or the view itself is that small.
        x0, y0, x1, y1 = patch.inner(view)
        scale = 255.0 if not target.dtype.is_floating_point else 1.0
        difference = (rgb - target.to(rgb.dtype) / scale)[y0:y1, x0:x1]
        return (1 - ssim_lambda) * difference.abs().sum() / (3 * view.width * view.height)
    l1_sum, ssim_sum, _ = cuda_ext.l1_ssim(rgb, target, patch.inner(view))
    l1 = l1_sum / (3 * view.width * view.height)
    if ssim_lambda == 0:
        return l1
    inside_x = min(patch.x1, view.width - SSIM_HALO) - max(patch.x0, SSIM_HALO)
    inside_y = min(patch.y1, view.height - SSIM_HALO) - max(patch.y0, SSIM_HALO)
    share = max(inside_x, 0) * max(inside_y, 0) / windows
    return (1 - ssim_lambda) * l1 + ssim_lambda * (share - ssim_sum / (3 * windows))
