"""The photometric loss of a rendered rectangle and its whole gradient by what was blended, in one operator.

A pixel's gradient comes from SSIM windows up to five pixels away, whose own pixels extend five further: rendered with a
halo of ten pixels wherever the view goes on, a band of a view has all of them, so that no gradient of a pixel has to be
sent to the rank that owns it.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from cuda_ext.dispatch.library import LIBRARY
from cuda_ext.dispatch.load import compiled_serves, kernels_serve
from cuda_ext.ops.common.checks import check_floats, check_tensors
from cuda_ext.ops.loss.loss import SSIM_HALO, l1_ssim_backward_torch
from cuda_ext.ops.raster import compositing
from cuda_ext.reference.loss import l1_ssim

__all__ = ["Band", "band_loss_into"]


class Band(NamedTuple):
    """A rectangle among those of `band_loss_into`.

    Attributes:
        target: [h,w,3] the image there, uint8, or of out's type and in [0, 1].
        inner: (x0, y0, x1, y1) its own pixels, in pixels of the rectangle; may be empty.
        background: [3].
        v_l1, v_ssim: [] the loss's gradient by the view's two sums.
        rgb: [h,w,3] written: all of it over the background, clamped to [0, 1] if asked for. It must be contiguous.
        loss: [] to which `offset + scale * (v_l1 * l1 + v_ssim * ssim)` is added, of the sums over its own pixels, and
            over the windows centred there. offset: see there.
    """

    target: Tensor
    inner: Sequence[int]
    background: Tensor
    v_l1: Tensor
    v_ssim: Tensor
    rgb: Tensor
    loss: Tensor
    offset: float = 0.0


@torch.no_grad()
def band_loss_into(
    out: Tensor, alpha: Tensor, bands: Sequence[Band], *, scale: float, v_out: Tensor, v_alpha: Tensor,
    last: Tensor | None = None, clamp: bool = True,
) -> None:  # fmt: skip
    """Write L1 and SSIM of rectangles' own pixels, and the gradients of whole views' losses by them.

    The loss of a view is a function of two sums over it, those of `cuda_ext.l1_ssim`. Rectangles may tile a view by
    their own pixels, with halos of ten pixels except at the view's border. The sums over all rectangles are then the
    view's, and each pixel's gradient is that of the view's loss. Windows centred in the halo contribute to it. Where
    `inner` touches an edge of the rectangle, that edge is the view's border. Not differentiable: the gradients are
    results.

    Args:
        out: [P,3] blended colours, row by row, of one rectangle after the other. alpha: [P] how much of each pixel they
            cover.
        bands: the rectangles. Losses are added in their order. scale: see `Band.loss`.
        v_out, v_alpha: [P,3], [P] written: the gradient of the view's loss by what was blended; zero beyond own pixels.
            They must be contiguous, as must `last`.
        last: [P] int32, `rasterize`'s: set to -1 beyond the own pixels, where backward then skips pixels.
        clamp: colours to [0, 1]; those beyond have no gradient then.

    Raises:
        TypeError, ValueError: a tensor of the wrong shape, dtype or device, or `inner` beyond its rectangle.
        NativeBuildError: the operators cannot be compiled.
    """
    first, pixels = 0, len(alpha)
    for band in bands:
        piece = slice(first, first + band.target.shape[:2].numel())
        first = piece.stop
        _check(out[piece], alpha[piece], band.background, band.target, band.inner, band.v_l1, band.v_ssim)
        check_floats(out, rgb=(band.rgb, band.target.shape), loss=(band.loss, ()))
        if not band.rgb.is_contiguous():
            raise ValueError("band_loss_into: rgb is written in place and must be contiguous.")
    check_floats(out, out=(out, (first, 3)), v_out=(v_out, (pixels, 3)), v_alpha=(v_alpha, (pixels,)))
    if last is not None:
        check_tensors(torch.int32, out.device, last=(last, (pixels,)))
    for name, tensor in {"v_out": v_out, "v_alpha": v_alpha, "last": last}.items():
        if tensor is not None and not tensor.is_contiguous():
            raise ValueError(f"band_loss_into: {name} is written in place and must be contiguous.")
    if not bands:
        return
    operator = torch.ops.ns_multigpu.band_loss_into if kernels_serve(out) else _band_loss_into_composed
    targets, inners, backgrounds, v_l1, v_ssim, rgb, loss, offsets = zip(*bands, strict=True)
    operator(
        out, alpha, backgrounds, targets, [side for inner in inners for side in inner], v_l1, v_ssim, offsets, scale,
        rgb, loss, v_out, v_alpha, last, clamp,
    )  # fmt: skip


def _check(
    out: Tensor, alpha: Tensor, background: Tensor, target: Tensor, inner: Sequence[int], v_l1: Tensor, v_ssim: Tensor
) -> None:
    if target.dim() != 3 or target.shape[2] != 3:
        raise ValueError(f"band_loss_into: target must be [h,w,3], not {list(target.shape)}.")
    height, width = target.shape[:2]
    pixels = height * width
    check_floats(
        out,
        out=(out, (pixels, 3)),
        alpha=(alpha, (pixels,)),
        background=(background, (3,)),
        v_l1=(v_l1, ()),
        v_ssim=(v_ssim, ()),
    )
    check_tensors(torch.uint8 if target.dtype == torch.uint8 else out.dtype, out.device, target=(target, (-1, -1, 3)))
    if len(inner) != 4 or not (0 <= inner[0] <= inner[2] <= width and 0 <= inner[1] <= inner[3] <= height):
        raise ValueError(
            f"band_loss_into: inner (x0, y0, x1, y1) must lie in the {width}x{height} rectangle, got {tuple(inner)}."
        )


def _composed(
    out: Tensor, alpha: Tensor, background: Tensor, target: Tensor, inner: Sequence[int], v_l1: Tensor, v_ssim: Tensor,
    clamp: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return a rectangle's image, loss, and gradients by colours and alpha out of the other operators."""
    blended = compositing.composite if clamp else compositing.blend
    rgb = blended(out, alpha, background).view(target.shape)
    v_rgb, l1, ssim = torch.zeros_like(rgb), rgb.new_zeros(()), rgb.new_zeros(())
    (x0, y0, x1, y1), (height, width) = inner, target.shape[:2]
    if x0 < x1 and y0 < y1:
        native = compiled_serves(rgb)
        forward = torch.ops.ns_multigpu.l1_ssim if native else l1_ssim
        backward = torch.ops.ns_multigpu.l1_ssim_backward if native else l1_ssim_backward_torch
        own = (slice(y0, y1), slice(x0, x1))
        # The sums are of the own pixels, the gradient of all windows that contain them.
        l1, ssim, _ = forward(rgb, target, inner)
        halo = SSIM_HALO
        wide = (max(x0 - halo, 0), max(y0 - halo, 0), min(x1 + halo, width), min(y1 + halo, height))
        dssim = forward(rgb, target, wide)[2]
        v_rgb[own] = backward(rgb, target, dssim, wide, v_l1, v_ssim)[own]
    gradients = compositing.composite_backward_torch(out, alpha, background, v_rgb.view(-1, 3), clamp)
    return rgb, v_l1 * l1 + v_ssim * ssim, *gradients


def _band_loss_into_composed(
    out: Tensor, alpha: Tensor, backgrounds: Sequence[Tensor], targets: Sequence[Tensor], inners: Sequence[int],
    v_l1: Sequence[Tensor], v_ssim: Sequence[Tensor], offsets: Sequence[float], scale: float, rgb: Sequence[Tensor],
    loss: Sequence[Tensor], v_out: Tensor, v_alpha: Tensor, last: Tensor | None = None, clamp: bool = True,
) -> None:  # fmt: skip
    first = 0
    for k, target in enumerate(targets):
        piece, inner = slice(first, first + target.shape[:2].numel()), inners[4 * k : 4 * k + 4]
        first = piece.stop
        view = (out[piece], alpha[piece], backgrounds[k], target, inner, v_l1[k], v_ssim[k])
        shown, lost, v_out[piece], v_alpha[piece] = _composed(*view, clamp)
        rgb[k].copy_(shown)
        loss[k].add_(offsets[k] + scale * lost)
        if last is not None:
            beyond = torch.ones(target.shape[:2], dtype=torch.bool, device=last.device)
            beyond[inner[1] : inner[3], inner[0] : inner[2]] = False
            last[piece].masked_fill_(beyond.view(-1), -1)


LIBRARY.impl("band_loss_into", _band_loss_into_composed, "CPU")
