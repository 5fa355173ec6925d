"""The photometric loss of a band of an image, and its whole gradient by the band's own pixels.

A pixel's gradient comes from windows up to five pixels away, whose own pixels reach five further: rendered with a halo
of one row of tiles, a band has all of them, so that no gradient of a pixel has to be sent to the rank that owns it.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

import cuda_ext
from ns_multigpu.core.types import SSIM_HALO, Patch, View


@dataclass(frozen=True)
class BandLoss:
    """What comes out of a band.

    Attributes:
        rgb: [h, w, 3] the rendered rectangle over its background.
        l1, ssim: [] sums over the band's own pixels and windows, as `cuda_ext.l1_ssim` has them.
        v_out, v_alpha: [h w, 3], [h w] the loss's gradient by what was blended; zero outside the band.
    """

    rgb: Tensor
    l1: Tensor
    ssim: Tensor
    v_out: Tensor
    v_alpha: Tensor


def band_loss(
    out: Tensor, alpha: Tensor, background: Tensor, target: Tensor, patch: Patch, view: View, v_l1: Tensor,
    v_ssim: Tensor,
) -> BandLoss:  # fmt: skip
    """The loss of one band of whole rows of a view.

    Args:
        out, alpha: [h w, 3], [h w] of the rendered rectangle, `patch.rendered(view)`.
        background: [3].
        target: [h, w, 3] the image there, uint8 or float in [0, 1].
        patch: as wide as the view; its halo reaches 2 SSIM_HALO wherever the view goes on.
        view: the view.
        v_l1, v_ssim: [] the loss's gradient by the sums over the whole view.
    """
    left, top, right, bottom = patch.rendered(view)
    height, width = bottom - top, right - left
    first, end = patch.y0 - top, patch.y1 - top  # the band's own rows
    rgb = cuda_ext.composite(out, alpha, background).view(height, width, 3)
    above, below = max(first - SSIM_HALO, 0), min(end + SSIM_HALO, height)
    wide = (0, above, width, below)
    l1, ssim, dssim = torch.ops.ns_multigpu.l1_ssim(rgb, target, wide)
    v_rgb = torch.ops.ns_multigpu.l1_ssim_backward(rgb, target, dssim, wide, v_l1, v_ssim)
    v_rgb[:first].zero_()
    v_rgb[end:].zero_()
    # The sums are of five rows more on each side: those are taken off again.
    for lo, hi in ((above, first), (end, below)):
        if lo < hi:
            start = max(lo - SSIM_HALO, 0)
            rows = slice(start, min(hi + SSIM_HALO, height))
            inner = (0, lo - start, width, hi - start)
            l1_strip, ssim_strip, _ = torch.ops.ns_multigpu.l1_ssim(rgb[rows], target[rows], inner)
            l1, ssim = l1 - l1_strip, ssim - ssim_strip
    v_out, v_alpha = torch.ops.ns_multigpu.composite_backward(out, alpha, background, v_rgb.view(-1, 3))
    return BandLoss(rgb, l1, ssim, v_out, v_alpha)
