"""Lenses: the numbers that `cull`, `project`, `box_views` and the fused operators read behind a view's matrix.

With lenses `Ks` is [V, 7, 3] instead of [V, 3, 3], for all views of a call. A view's last four rows are:

    the kind, the largest angle from the axis that is drawn in radians, the square of its tangent
    k1, k2, k3
    k4, k5, k6
    p1, p2, 0

The kind is 0 for a perspective lens, 1 for a fisheye, and 2 for an equirectangular picture, whose focal lengths are
pixels per radian. cuda_ext/csrc/common/lens.h has the formulas.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from cuda_ext.reference.projection import KIND_FISHEYE, KIND_PANORAMA, KIND_PERSPECTIVE

PERSPECTIVE, FISHEYE = 8, 4
"""Numbers of coefficients: k1 to k6, p1, p2 of OpenCV's rational model; k1 to k4 of its fisheye."""

_BEYOND = 1.3
"""Points are drawn up to so many times the slope, or a fisheye's angle, of the image's farthest corner."""

_SAMPLES, _WIDEST, _WIDEST_FISHEYE = 8192, 1.5, 3.0


def lens_intrinsics(K: Tensor, size: tuple[int, int], coefficients: Sequence[float], *, fisheye: bool) -> Tensor:
    """Return a view's intrinsics with its lens [7, 3].

    Args:
        K: [3, 3] intrinsics in pixels.
        size: width and height in pixels.
        coefficients: OpenCV's, k1, k2, k3, k4, k5, k6, p1, p2, or a fisheye's k1, k2, k3, k4.

    Raises:
        ValueError: another number of coefficients, or a lens that folds back at its axis.
    """
    wanted = FISHEYE if fisheye else PERSPECTIVE
    if len(coefficients) != wanted:
        raise ValueError(f"a {'fisheye' if fisheye else 'lens'} has {wanted} coefficients, not {len(coefficients)}.")
    radial, tangential = ([*coefficients, 0.0, 0.0], [0.0, 0.0]) if fisheye else (coefficients[:6], coefficients[6:])
    angle = _last_angle(K, size, radial, fisheye=fisheye)
    kind = KIND_FISHEYE if fisheye else KIND_PERSPECTIVE
    rows = [kind, angle, math.tan(angle) ** 2, *radial, *tangential, 0.0]
    return torch.cat([K, K.new_tensor(rows).view(4, 3)])


def panorama_intrinsics(K: Tensor) -> Tensor:
    """Return the intrinsics of an equirectangular picture [7, 3].

    Args:
        K: [3, 3] pixels per radian of longitude and latitude, and the pixel of the axis z.
    """
    return torch.cat([K, K.new_tensor([KIND_PANORAMA, math.pi, *[0.0] * 10]).view(4, 3)])


def _last_angle(K: Tensor, size: tuple[int, int], k: Sequence[float], *, fisheye: bool) -> float:
    """Return the largest angle up to which the lens is monotonic, and not far outside of the image."""
    angles = torch.linspace(0, _WIDEST_FISHEYE if fisheye else _WIDEST, _SAMPLES, dtype=torch.float64)
    radius = angles if fisheye else angles.tan()
    t = radius.square()
    if fisheye:
        bent = radius * (1 + t * (k[0] + t * (k[1] + t * (k[2] + t * k[3]))))
    else:
        divisor = 1 + t * (k[3] + t * (k[4] + t * k[5]))
        bent = torch.where(divisor > 0, radius * (1 + t * (k[0] + t * (k[1] + t * k[2]))) / divisor, -1.0)
    folds = (bent.diff() <= 0).nonzero()
    last = int(folds[0]) if len(folds) else _SAMPLES - 1
    if last == 0:
        raise ValueError(f"the lens with the coefficients {[*k]} folds back at its axis.")
    (fx, _, cx), (_, fy, cy), _ = K.double().tolist()
    corner = math.hypot(max(cx, size[0] - cx) / fx, max(cy, size[1] - cy) / fy)
    covering = (bent[: last + 1] >= corner).nonzero()
    if len(covering) == 0:
        return float(angles[last])
    beyond = _BEYOND * float(radius[int(covering[0])])
    return min(float(angles[last]), beyond if fisheye else math.atan(beyond))
