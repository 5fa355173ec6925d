"""Intersection of rays with boxes, roofs and blobs, and surface normals. Vectorised over (ray, solid) pairs."""

import torch
from torch import Tensor

from ns_multigpu.city.grid import FAR
from ns_multigpu.city.solids import Shape

Columns = list[Tensor]
"""Rows of a [k, n] table as contiguous [n] tensors: gathering those is many times faster than gathering rows."""

_TINY = 1e-9


def _slab(low: Tensor, high: Tensor, origin: Tensor, inverse: Tensor) -> tuple[Tensor, Tensor]:
    a, b = (low - origin) * inverse, (high - origin) * inverse
    return torch.minimum(a, b), torch.maximum(a, b)


def _box(g: Columns, o: Columns, inv: Columns) -> tuple[Tensor, Tensor]:
    near, far = _slab(g[0], g[3], o[0], inv[0])
    for axis in (1, 2):
        n, f = _slab(g[axis], g[3 + axis], o[axis], inv[axis])
        near, far = torch.maximum(near, n), torch.minimum(far, f)
    return near, far


def _slopes(g: Columns, o: Columns, d: Columns) -> list[tuple[Tensor, Tensor]]:
    """Return value and rate along the ray of each slope's plane function, negative inside; +x, -x, +y, -y."""
    planes: list[tuple[Tensor, Tensor]] = []
    above = o[2] - g[8]
    for axis in (0, 1):
        lean = g[6 + axis] * (o[axis] - 0.5 * (g[axis] + g[3 + axis]))
        rate = g[6 + axis] * d[axis]
        planes += [(above + lean, d[2] + rate), (above - lean, d[2] - rate)]
    return planes


def entry(shape: Shape, g: Columns, o: Columns, d: Columns, inv: Columns) -> tuple[Tensor, Tensor]:
    """Return the point at which each ray enters its solid.

    Args:
        shape: of the solids.
        g: geometry, shape.fields columns [n].
        o, d, inv: 3 columns [n] each of the rays' origin, unit direction and reciprocal direction.

    Returns:
        (t, hit): distance [n] in metres, and whether the ray meets the solid from outside, in front of its origin.
    """
    if shape is Shape.BLOB:
        scaled_o = [(o[k] - g[k]) / g[3 + k] for k in range(3)]
        scaled_d = [d[k] / g[3 + k] for k in range(3)]
        a = scaled_d[0] * scaled_d[0] + scaled_d[1] * scaled_d[1] + scaled_d[2] * scaled_d[2]
        b = scaled_o[0] * scaled_d[0] + scaled_o[1] * scaled_d[1] + scaled_o[2] * scaled_d[2]
        # The distance of the ray to the centre, from a difference that does not cancel far from the blob.
        closest = -b / a
        off = [scaled_o[k] + scaled_d[k] * closest for k in range(3)]
        discriminant = 1.0 - (off[0] * off[0] + off[1] * off[1] + off[2] * off[2])
        t = closest - (discriminant.clamp_min(0.0) / a).sqrt()
        return t, (discriminant > 0) & (t > 0)
    near, far = _box(g, o, inv)
    if shape is Shape.ROOF:
        for value, rate in _slopes(g, o, d):
            rate = rate + _TINY  # a ray along the plane: its crossing lies far away, on the right side
            t = -value / rate
            # Entering (falling rate): a lower bound; leaving: an upper bound.
            near = torch.maximum(near, torch.where(rate < 0, t, -FAR))
            far = torch.minimum(far, torch.where(rate < 0, FAR, t))
    return near, (near <= far) & (near > 0)


def normal(shape: Shape, g: Columns, o: Columns, d: Columns, inv: Columns, t: Tensor) -> Tensor:
    """Return the outward unit normal [3, n] at each ray's entry at distance t (arguments as for `entry`)."""
    if shape is Shape.BLOB:
        n = torch.stack([(o[k] + d[k] * t - g[k]) / (g[3 + k] * g[3 + k]) for k in range(3)])
        return n / n.norm(dim=0).clamp_min(1e-12)
    # The plane that was crossed last is the one whose crossing is the greatest of all entries.
    zero = torch.zeros_like(t)
    best = torch.full_like(t, -FAR)
    result = [zero, zero, zero]

    def offer(near: Tensor, candidate: list[Tensor]) -> None:
        nonlocal best, result
        later = near > best
        best = torch.maximum(best, near)
        result = [torch.where(later, c, r) for c, r in zip(candidate, result, strict=True)]

    for axis in range(3):
        near, _ = _slab(g[axis], g[3 + axis], o[axis], inv[axis])
        candidate = [zero, zero, zero]
        candidate[axis] = -torch.sign(d[axis])
        offer(near, candidate)
    if shape is Shape.ROOF:
        one = torch.ones_like(t)
        for index, (value, rate) in enumerate(_slopes(g, o, d)):
            rate = rate + _TINY
            slope = g[6 + index // 2] * (1.0 if index % 2 == 0 else -1.0)
            length = (1.0 + slope * slope).rsqrt()
            candidate = [zero, zero, one * length]
            candidate[index // 2] = slope * length
            offer(torch.where(rate < 0, -value / rate, -FAR), candidate)
    return torch.stack(result)
