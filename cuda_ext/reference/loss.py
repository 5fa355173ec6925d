"""Pure-torch L1 and SSIM of a patch: the plain statement of what the native operator computes."""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

WINDOW = 11
HALF = WINDOW // 2
C1, C2 = 0.01**2, 0.03**2


def gaussian_filter(images: Tensor) -> Tensor:
    """Filter images [n,h,w] with the 11x11 Gaussian window (sigma 1.5) at every place it fits: [n,h-10,w-10]."""
    taps = [math.exp(-((k - HALF) ** 2) / (2 * 1.5**2)) for k in range(WINDOW)]
    maps = images.shape[0]
    window = images.new_tensor([tap / sum(taps) for tap in taps]).expand(maps, 1, WINDOW)
    # TF32 keeps 10 bits of the mantissa: SSIM subtracts nearly equal second moments and would lose them.
    with torch.backends.cudnn.flags(enabled=torch.backends.cudnn.enabled, allow_tf32=False):
        columns = F.conv2d(images[None], window[..., None], groups=maps)
        return F.conv2d(columns, window[:, :, None], groups=maps)[0]


def centres(inner: Sequence[int], height: int, width: int) -> tuple[int, int, int, int]:
    """Return the inner pixels whose whole window lies in the patch, as (x0, y0, x1, y1)."""
    x0, y0 = max(inner[0], HALF), max(inner[1], HALF)
    return x0, y0, max(x0, min(inner[2], width - HALF)), max(y0, min(inner[3], height - HALF))


def as_floats(target: Tensor, like: Tensor) -> Tensor:
    """Return the target in `like`'s float type; bytes are 255ths."""
    return target.to(like.dtype) / 255 if target.dtype == torch.uint8 else target


def l1_ssim(pred: Tensor, target: Tensor, inner: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `cuda_ext.l1_ssim`."""
    target = as_floats(target, pred)
    x0, y0, x1, y1 = inner
    l1_sum = (pred[y0:y1, x0:x1] - target[y0:y1, x0:x1]).abs().sum()
    x0, y0, x1, y1 = centres(inner, pred.shape[0], pred.shape[1])
    if x1 == x0 or y1 == y0:
        return l1_sum, 0 * pred.sum(), torch.zeros_like(pred)
    differentiable = torch.is_grad_enabled() and pred.requires_grad
    with torch.enable_grad():
        leaf = pred if differentiable else pred.detach().requires_grad_()
        ssim_sum = _ssim_sum(leaf, target, (x0, y0, x1, y1))
        (gradient,) = torch.autograd.grad(ssim_sum, leaf, retain_graph=differentiable)
    return l1_sum, ssim_sum if differentiable else ssim_sum.detach(), gradient


def _ssim_sum(pred: Tensor, target: Tensor, rectangle: tuple[int, int, int, int]) -> Tensor:
    x0, y0, x1, y1 = rectangle
    window = (slice(y0 - HALF, y1 + HALF), slice(x0 - HALF, x1 + HALF))
    x, y = pred[window].permute(2, 0, 1), target[window].permute(2, 0, 1)
    mu_x, mu_y, xx, yy, xy = gaussian_filter(torch.cat([x, y, x * x, y * y, x * y])).split(3)
    luminance = (2 * mu_x * mu_y + C1) / (mu_x**2 + mu_y**2 + C1)
    contrast = (2 * (xy - mu_x * mu_y) + C2) / (xx - mu_x**2 + yy - mu_y**2 + C2)
    return (luminance * contrast).sum()
