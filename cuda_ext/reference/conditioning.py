"""The reference of `condition`. Shapes, units and sources: `cuda_ext.ops.project.conditioning`.

Axes are in the order (t, x, y, z), in which a vector is a quaternion. Sums are written out: a product of small matrices
may round one way for few rows and another for many.
"""

import torch
from torch import Tensor

from cuda_ext.reference.projection import _take


def rotations_4d(left: Tensor, right: Tensor) -> Tensor:
    """Return the rotations [..., 4, 4] that make of a quaternion v the product left v conj(right), both at length one.

    Args:
        left, right: [..., 4] quaternions (w, x, y, z) of any length but zero.
    """
    (a, b, c, d), (p, q, r, s) = _unit(left), _unit(right)
    by_left = ((a, -b, -c, -d), (b, a, -d, c), (c, d, a, -b), (d, -c, b, a))
    by_right = ((p, q, r, s), (-q, p, -s, r), (-r, s, p, -q), (-s, -r, q, p))
    rows = [
        torch.stack([w * p_ + x * q_ + y * r_ + z * s_ for p_, q_, r_, s_ in zip(*by_right, strict=True)], dim=-1)
        for w, x, y, z in by_left
    ]
    return torch.stack(rows, dim=-2)


def product(left: Tensor, right: Tensor) -> Tensor:
    """Return Hamilton's products [..., 4] of quaternions [..., 4] (w, x, y, z)."""
    a, b, c, d = left.unbind(-1)
    p, q, r, s = right.unbind(-1)
    parts = (
        a * p - b * q - c * r - d * s, a * q + b * p + c * s - d * r,
        a * r - b * s + c * p + d * q, a * s + b * r - c * q + d * p,
    )  # fmt: skip
    return torch.stack(parts, dim=-1)


def _unit(quats: Tensor) -> tuple[Tensor, ...]:
    """Return the components [...] of quaternions at length one."""
    w, x, y, z = quats.unbind(-1)
    length = (w * w + x * x + y * y + z * z).sqrt().clamp_min(1e-12)
    return w / length, x / length, y / length, z / length


def condition(
    means: Tensor,
    times: Tensor,
    left: Tensor,
    motions: Tensor,
    scales: Tensor,
    opacities: Tensor,
    view_times: Tensor,
    view_ids: Tensor,
    point_ids: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """See `cuda_ext.condition`."""
    point = point_ids.long()
    turn = _take(left, point)
    factor = rotations_4d(turn, product(turn, _take(motions, point))) * _take(scales, point)[:, None, :]
    in_time, in_space = factor[:, 0], factor[:, 1:]
    spread = in_time.square().sum(-1).sqrt()
    away = (view_times[view_ids.long()] - _take(times, point)) / spread
    unit = in_time / spread[:, None]
    sign = torch.where(unit[:, :1] < 0, -1.0, 1.0).to(unit.dtype)
    mirror = torch.cat([unit[:, :1] + sign, unit[:, 1:]], dim=-1)
    along = (in_space * unit[:, None]).sum(-1)
    across = (in_space * mirror[:, None]).sum(-1) / (1 + unit[:, :1].abs())
    axes = in_space[:, :, 1:] - across[:, :, None] * mirror[:, None, 1:]
    presence = torch.exp(-0.5 * away.square())
    return _take(means, point) + along * away[:, None], axes, _take(opacities, point) * presence
