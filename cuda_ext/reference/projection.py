"""The reference of `cull`, `project`, `project_axes` and `sh_colors`. Shapes, units and sources:
`cuda_ext.ops.project.projection` and `cuda_ext.ops.project.conditioning`."""

from collections.abc import Sequence

import torch
from torch import Tensor

MIN_ALPHA = 1.0 / 255.0
MAX_RADIUS = float(1 << 30)
EXTENT_MARGIN = 1e-4  # relative, on a row's own half extents
BOUND_MARGIN = 1e-3  # relative, on the bound by which points are culled: cull keeps a little more
KIND_PERSPECTIVE, KIND_FISHEYE, KIND_PANORAMA = 0, 1, 2
"""Kinds of lenses: see `cuda_ext.ops.project.lens`."""
POLE = 0.01
"""Angle in radians around the poles of a panorama where no mean is drawn."""
_NEWTON_STEPS, _LEAST_SLOPE = 10, 0.05
"""Of `lens_rays`: the slope falls to 0 where a lens folds back."""


def rotation_matrices(quats: Tensor) -> Tensor:
    """Return rotation matrices [..., 3, 3] of quaternions (w, x, y, z) [..., 4] of any length but zero."""
    w, x, y, z = torch.nn.functional.normalize(quats, dim=-1).unbind(-1)
    rows = (
        (1 - 2 * (y * y + z * z), 2 * (x * y - w * z), 2 * (x * z + w * y)),
        (2 * (x * y + w * z), 1 - 2 * (x * x + z * z), 2 * (y * z - w * x)),
        (2 * (x * z - w * y), 2 * (y * z + w * x), 1 - 2 * (x * x + y * y)),
    )
    return torch.stack([torch.stack(row, dim=-1) for row in rows], dim=-2)


def cutoff_squared(opacities: Tensor) -> Tensor:
    """Return the squared Mahalanobis distance at which a splat's alpha falls to 1/255 (0 if it is always below)."""
    return (2 * torch.log(255 * opacities)).clamp_min(0)


def three_sigma(xx: Tensor, xy: Tensor, yy: Tensor) -> Tensor:
    """Return half the side, before rounding up, of the square outside of which gsplat 1.4.0 ignores a splat."""
    middle, apart = 0.5 * (xx + yy), 0.5 * (xx - yy)
    return 3 * torch.sqrt(middle + torch.sqrt((apart * apart + xy * xy).clamp_min(0.01)))


def outward(extents: Tensor, margin: float) -> Tensor:
    """Round half extents in pixels up to whole numbers, with a margin for earlier rounding errors."""
    return torch.ceil(extents * (1 + margin) + 0.01).clamp_max(MAX_RADIUS)


def is_lens(Ks: Tensor) -> bool:
    """Return whether these intrinsics have lenses: see `cuda_ext.ops.project.lens`."""
    return Ks.shape[1] > 3


def _polynomial(x: Tensor, *k: Tensor | float) -> tuple[Tensor, Tensor]:
    """Return 1 + k1 x + k2 x^2 + .. and its derivative."""
    value, slope = torch.zeros_like(x), torch.zeros_like(x)
    for factor in (*reversed(k), 1.0):
        slope, value = slope * x + value, value * x + factor
    return value, slope


def _axis(like: Tensor) -> Tensor:
    """Return (0, 0, 1). Unlike `new_tensor`, it can be captured in a CUDA graph."""
    return torch.eye(3, dtype=like.dtype, device=like.device)[2]


def lens_map(lenses: Tensor, seen: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Map points in camera space through lenses; cuda_ext/csrc/common/lens.h has the formulas.

    Args:
        lenses: [M, 4, 3] rows behind the matrices. seen: [M, 3].

    Returns:
        The images of the points in focal lengths [M, 2], the Jacobians [M, 2, 3], the depths [M], and whether the rays
        are drawn [M].
    """
    kind, angle, slope2 = lenses[:, 0].unbind(-1)
    is_fisheye, is_panorama = kind == KIND_FISHEYE, kind == KIND_PANORAMA
    k1, k2, k3, k4, k5, k6 = lenses[:, 1:3].flatten(1).unbind(-1)
    p1, p2, _ = lenses[:, 3].unbind(-1)
    around, turning, level = _panorama_map(seen, is_panorama)
    ray = torch.where((kind != KIND_PERSPECTIVE)[:, None], seen, 1.0).norm(dim=-1)
    # What the other ways compute has harmless stand-ins.
    seen = torch.where(is_panorama[:, None], _axis(seen), seen)
    flat, z = seen[:, :2], seen[:, 2]
    rho2 = flat.square().sum(-1)
    near = ~is_fisheye | ((z > 0) & (rho2 < 2.5e-3 * z.square()))
    front = torch.where(near & (z > 0), z, 1.0)
    t = torch.where(near, rho2, 0.0) / front.square()
    # Perspective, or near a fisheye's axis: s = g(t) / z, g with its derivative by t.
    (above, by_above), (below, by_below) = _polynomial(t, k1, k2, k3), _polynomial(t, k4, k5, k6)
    ratio, by_ratio = _polynomial(t, -1 / 3, 1 / 5, -1 / 7, 1 / 9)
    bent, by_bent = _polynomial(t * ratio.square(), k1, k2, k3, k4)
    by_bent = by_bent * (ratio.square() + 2 * t * ratio * by_ratio)
    g = torch.where(is_fisheye, ratio * bent, above / below)
    by_g = torch.where(is_fisheye, by_ratio * bent + ratio * by_bent, (by_above - g * by_below) / below)
    # A fisheye: s = theta (1 + ..) / rho.
    rho, ahead = torch.where(near, 1.0, rho2).sqrt(), torch.where(near, 1.0, z)
    theta = torch.atan2(rho, ahead)
    bent, by_bent = _polynomial(theta.square(), k1, k2, k3, k4)
    p, ray2 = bent + 2 * theta.square() * by_bent, rho.square() + ahead.square()
    s = torch.where(near, g / front, theta * bent / rho)
    a = torch.where(near, 2 * by_g / front**3, (p * ahead / ray2 - theta * bent / rho) / rho.square())
    b = torch.where(near, -(g + 2 * t * by_g) / front.square(), -p / ray2)

    x, y = flat.unbind(-1)
    i = torch.where(is_fisheye, 0.0, 1 / front)
    Q = torch.stack([2 * p1 * x * y + p2 * (3 * x * x + y * y), p1 * (x * x + 3 * y * y) + 2 * p2 * x * y], -1)
    mixed = 2 * (p1 * x + p2 * y)
    by_Q = torch.stack([2 * p1 * y + 6 * p2 * x, mixed, mixed, 6 * p1 * y + 2 * p2 * x], -1).view(-1, 2, 2)
    within = s[:, None, None] * torch.eye(2, dtype=s.dtype, device=s.device) + by_Q * (i**2)[:, None, None]
    within = within + a[:, None, None] * flat[:, :, None] * flat[:, None, :]
    along = b[:, None] * flat - 2 * Q * (i**3)[:, None]
    depth = torch.where(kind == KIND_PERSPECTIVE, z, ray)
    drawn = torch.where(is_fisheye, torch.where(near, t / angle.square(), theta / angle), t / slope2) <= 1
    image = s[:, None] * flat + Q * (i**2)[:, None]
    drawn = torch.where(is_panorama, POLE * depth <= level, drawn & (is_fisheye | (z > 0)))
    J = torch.where(is_panorama[:, None, None], turning, torch.cat([within, along[:, :, None]], dim=-1))
    return torch.where(is_panorama[:, None], around, image), J, depth, drawn


def lens_rays(lens: Tensor, image: Tensor) -> Tensor:
    """Return the rays [.., 3] in camera space, to depth 1, that a lens maps to positions: the inverse of `lens_map`.

    Nothing is read back. A ray is 0 where the lens draws none, and within `POLE` of a panorama's poles.

    Args:
        lens: [4, 3] rows behind the matrix, or [.., 4, 3] of each position. image: [.., 2] in focal lengths.
    """
    (kind, angle, slope2), (k1, k2, k3), (k4, k5, k6), (p1, p2, _) = (row.unbind(-1) for row in lens.unbind(-2))
    is_fisheye, none = kind == KIND_FISHEYE, torch.zeros_like(k4)
    above, below = (k1, k2, k3, torch.where(is_fisheye, k4, none)), (torch.where(is_fisheye, none, k4), k5, k6)
    last = torch.where(is_fisheye, angle, slope2.sqrt())
    # Newton's steps on the tangent of the angle from the axis, or a fisheye's angle. The tangential part is subtracted.
    radius, flat = image.norm(dim=-1).minimum(last), image
    way = flat
    for _ in range(_NEWTON_STEPS):
        x, y = flat.unbind(-1)
        bent = [2 * p1 * x * y + p2 * (3 * x * x + y * y), p1 * (x * x + 3 * y * y) + 2 * p2 * x * y]
        radial, t = image - torch.stack(bent, -1), radius.square()
        wanted = radial.norm(dim=-1)
        way = radial / wanted.clamp(min=torch.finfo(wanted.dtype).tiny)[..., None]
        (top, by_top), (divisor, by_divisor) = _polynomial(t, *above), _polynomial(t, *below)
        g = top / divisor
        slope = g + 2 * t * (by_top - g * by_divisor) / divisor
        radius = (radius - (radius * g - wanted) / slope.clamp(min=_LEAST_SLOPE)).clamp(min=0).minimum(last)
        flat = radius[..., None] * way
    sine, ahead = torch.where(is_fisheye, radius.sin(), radius), torch.where(is_fisheye, radius.cos(), 1.0)
    drawn, is_panorama, (around, up) = radius < last, kind == KIND_PANORAMA, image.unbind(-1)
    level = up.cos()
    drawn = torch.where(is_panorama, level > POLE, drawn)[..., None]
    globe = torch.stack([around.sin() * level, up.sin(), around.cos() * level], -1)
    rays = torch.cat([sine[..., None] * way, ahead[..., None]], -1)
    return torch.where(drawn, torch.where(is_panorama[..., None], globe, rays), 0.0)


def _panorama_map(seen: Tensor, there: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return longitude and latitude [M, 2] of points, their Jacobians [M, 2, 3], and the distances from the vertical
    axis [M]. Rows without a panorama have harmless values."""
    x, y, z = torch.where(there[:, None], seen, _axis(seen)).unbind(-1)
    level2 = x * x + z * z
    level, ray2, none = level2.sqrt(), level2 + y * y, torch.zeros_like(x)
    by_longitude = torch.stack([z / level2, none, -x / level2], -1)
    by_latitude = torch.stack([-x * y / level, level, -z * y / level], -1) / ray2[:, None]
    image = torch.stack([torch.atan2(x, z), torch.atan2(y, level)], -1)
    return image, torch.stack([by_longitude, by_latitude], 1), level


def local_pinholes(K: Tensor, seen: Tensor, near: float, far: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return how cameras see the surroundings of means: as pinhole cameras do behind a linear map of camera space.

    Args:
        K: [M, 3, 3], or [M, 7, 3] with lenses. seen: [M, 3] means in camera space. near, far: range of depths.

    Returns:
        The means [M, 3], of which those that are not drawn are harmless stand-ins; the maps [M, 3, 3], of lenses to
        first order (LocalPinhole of cuda_ext/csrc/common/lens.h); and which means may be drawn [M].
    """
    ahead = torch.tensor([0.0, 0.0, 1.0], dtype=seen.dtype, device=seen.device)
    if not is_lens(K):
        may = (seen[:, 2] >= near) & (seen[:, 2] <= far)
        return torch.where(may[:, None], seen, ahead), torch.eye(3).to(seen).expand(len(seen), 3, 3), may
    with torch.no_grad():
        _, _, depth, drawn = lens_map(K[:, 3:], seen)
        may = (depth >= near) & (depth <= far) & drawn
    mean = torch.where(may[:, None], seen, ahead)
    image, J, depth, _ = lens_map(K[:, 3:], mean)
    normal = torch.where(K[:, 3, :1] == KIND_PERSPECTIVE, ahead, mean / depth[:, None])
    maps = torch.cat([depth[:, None, None] * J + image[:, :, None] * normal[:, None], normal[:, None]], 1)
    return mean, maps, may


def in_lens(lens: Tensor, seen: Tensor, near: float, far: float) -> Tensor:
    """Return whether points [N, 3] in camera space may be drawn by a lens [4, 3], by their rays and depths; it may keep
    too many."""
    away = torch.atan2(seen[:, :2].norm(dim=-1), seen[:, 2])
    depth = torch.where(lens[0, 0] == KIND_PERSPECTIVE, seen[:, 2], seen.norm(dim=-1))
    return (away <= lens[0, 1] + 1e-3) & (depth >= near * (1 - 1e-5)) & (depth <= far * (1 + 1e-5))


def _clamps(Ks: Tensor, sizes: Tensor) -> tuple[Tensor, Tensor]:
    """Return the x/z, y/z (lower [V, 2], upper [V, 2]) at which the Jacobian is clamped: the image and 15 % more a
    side."""
    focal = torch.stack([Ks[:, 0, 0], Ks[:, 1, 1]], dim=-1)
    center = Ks[:, :2, 2]
    margin = 0.15 * sizes / focal
    return -(center / focal + margin), (sizes - center) / focal + margin


def cull(
    means: Tensor,
    scales: Tensor,
    opacities: Tensor,
    viewmats: Tensor,
    Ks: Tensor,
    sizes: Sequence[int],
    rects: Sequence[int],
    eps2d: float,
    near: float,
    far: float,
) -> tuple[Tensor, Tensor]:
    """See `cuda_ext.cull`."""
    lower, upper = _clamps(Ks, means.new_tensor(list(sizes)).view(-1, 2))
    largest = scales.amax(dim=-1)
    cutoff2 = cutoff_squared(opacities)[:, None]
    hits: list[Tensor] = []
    for view, (R, t, K) in enumerate(zip(viewmats[:, :3, :3], viewmats[:, :3, 3], Ks, strict=True)):
        x0, y0, x1, y1 = rects[4 * view : 4 * view + 4]
        if x1 <= x0 or y1 <= y0:
            hits.append(torch.empty(0, dtype=torch.int64, device=means.device))
            continue
        seen = (means[:, None, :] * R).sum(-1) + t
        z = seen[:, 2]
        if is_lens(Ks):
            keep = _lens_touches(means, largest, cutoff2, R, t, K, (x0, y0, x1, y1), eps2d, near, far)
            hits.append(torch.nonzero(keep).squeeze(-1))
            continue
        # The depth's own rounding error: a point on the near plane must not be lost to it.
        slack = 1e-6 * ((means * R[2]).abs().sum(-1) + t[2].abs())
        focal, center = torch.stack([K[0, 0], K[1, 1]]), K[:2, 2]
        slope = seen[:, :2] / z[:, None]
        clamped = slope.clamp(lower[view], upper[view])
        scale = largest[:, None] * focal / z[:, None]
        variance = scale**2 * (1 + clamped**2) + eps2d
        square = three_sigma(variance[:, 0], (scale * clamped).prod(-1), variance[:, 1])
        extent = outward(torch.maximum(torch.sqrt(cutoff2 * variance), square[:, None]), BOUND_MARGIN)
        at = slope * focal + center
        touches = ((at + extent > at.new_tensor([x0, y0])) & (at - extent < at.new_tensor([x1, y1]))).all(-1)
        hits.append(torch.nonzero(touches & (z >= near - slack) & (z <= far + slack)).squeeze(-1))
    counts = torch.tensor([len(hit) for hit in hits], dtype=torch.int64, device=means.device)
    views = torch.arange(len(hits), dtype=torch.int32, device=means.device)
    points = torch.cat(hits) if hits else torch.empty(0, dtype=torch.int64, device=means.device)
    return torch.repeat_interleave(views, counts), points.to(torch.int32)


def _lens_touches(
    means: Tensor, largest: Tensor, cutoff2: Tensor, R: Tensor, t: Tensor, K: Tensor, rect: Sequence[int],
    eps2d: float, near: float, far: float,
) -> Tensor:  # fmt: skip
    """Return which points `cull` keeps of a view with a lens [N]."""
    seen = (means[:, None, :] * R).sum(-1) + t
    image, J, depth, drawn = lens_map(K[None, 3:].expand(len(means), 4, 3), seen)
    focal, slack = torch.stack([K[0, 0], K[1, 1]]), 1e-6 * ((means[:, None, :] * R).abs().sum((1, 2)) + t.abs().sum())
    a = largest[:, None, None] * focal[:, None] * J
    variance = a.square().sum(-1) + eps2d
    square = three_sigma(variance[:, 0], a.prod(1).sum(-1), variance[:, 1])
    extent = outward(torch.maximum(torch.sqrt(cutoff2 * variance), square[:, None]), BOUND_MARGIN)
    at = image * focal + K[:2, 2]
    touches = ((at + extent > at.new_tensor(rect[:2])) & (at - extent < at.new_tensor(rect[2:]))).all(-1)
    return touches & drawn & (depth >= near - slack) & (depth <= far + slack)


def _take(rows: Tensor, ids: Tensor) -> Tensor:
    """Return rows[ids]; padding, whose id is -1, gets the first row, or zeros where there is none."""
    if rows.shape[0] == 0:
        return rows.new_zeros(ids.shape[0], *rows.shape[1:]) + rows.sum()  # the sum, 0, for autograd
    return rows[ids.clamp_min(0)]


def project(
    means: Tensor,
    quats: Tensor,
    scales: Tensor,
    opacities: Tensor,
    viewmats: Tensor,
    Ks: Tensor,
    sizes: Sequence[int],
    view_ids: Tensor,
    point_ids: Tensor,
    eps2d: float,
    near: float,
    far: float,
    antialiased: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """See `cuda_ext.project`."""
    point = point_ids.long()
    axes = rotation_matrices(_take(quats, point)) * _take(scales, point)[:, None, :]
    return _project(
        _take(means, point), axes, _take(opacities, point), viewmats, Ks, sizes, view_ids, point >= 0,
        eps2d, near, far, antialiased,
    )  # fmt: skip


def project_axes(
    means: Tensor,
    axes: Tensor,
    opacities: Tensor,
    viewmats: Tensor,
    Ks: Tensor,
    sizes: Sequence[int],
    view_ids: Tensor,
    eps2d: float,
    near: float,
    far: float,
    antialiased: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """See `cuda_ext.project_axes`."""
    there = torch.ones_like(view_ids, dtype=torch.bool)
    return _project(means, axes, opacities, viewmats, Ks, sizes, view_ids, there, eps2d, near, far, antialiased)


def _project(
    means: Tensor, points_axes: Tensor, row_opacities: Tensor, viewmats: Tensor, Ks: Tensor, sizes: Sequence[int],
    view_ids: Tensor, there: Tensor, eps2d: float, near: float, far: float, antialiased: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the projections of rows, by their mean [M, 3], axes [M, 3, 3] and opacity [M], where they are no padding.

    Dead rows are computed on harmless stand-ins, so that their gradient is zero, not NaN.
    """
    view = view_ids.long()
    size = means.new_tensor(list(sizes)).view(-1, 2)
    lower, upper = _clamps(Ks, size)
    R, t, K = viewmats[view, :3, :3], viewmats[view, :3, 3], Ks[view]
    focal, center = torch.stack([K[:, 0, 0], K[:, 1, 1]], dim=-1), K[:, :2, 2]

    seen = (R @ means[..., None]).squeeze(-1) + t
    axes = R @ points_axes
    # a: the two rows of (Jacobian of the camera) times axes; the covariance is their Gram matrix.
    if is_lens(Ks):
        with torch.no_grad():
            _, _, depths, drawn = lens_map(K[:, 3:], seen)
            in_depth = (depths >= near) & (depths <= far) & drawn & there
        ahead = torch.where(in_depth[:, None], seen, seen.new_tensor([0.0, 0.0, 1.0]))
        image, J, depths, _ = lens_map(K[:, 3:], ahead)
        means2d, a = image * focal + center, focal[:, :, None] * (J @ axes)
    else:
        depths = seen[:, 2]
        in_depth = (depths >= near) & (depths <= far) & there
        z = torch.where(in_depth, depths, 1.0)
        slope = seen[:, :2] / z[:, None]
        means2d = slope * focal + center
        clamped = slope.clamp(lower[view], upper[view])
        a = (focal / z[:, None])[..., None] * (axes[:, :2] - clamped[..., None] * axes[:, 2:])
    xx, xy, yy = (a[:, 0] ** 2).sum(-1), (a[:, 0] * a[:, 1]).sum(-1), (a[:, 1] ** 2).sum(-1)
    sharp_det = torch.linalg.cross(a[:, 0], a[:, 1]).square().sum(-1)
    det = sharp_det + eps2d * (xx + yy + eps2d)
    invertible = (det > 0) & torch.isfinite(det)
    det = torch.where(invertible, det, 1.0)
    xx, yy = xx + eps2d, yy + eps2d
    conics = torch.stack([yy / det, -xy / det, xx / det], dim=-1)

    if antialiased:
        visible = sharp_det > 0
        ratio = torch.where(visible, sharp_det / det, 1.0)
        row_opacities = torch.where(visible, row_opacities * torch.sqrt(ratio), 0.0)

    with torch.no_grad():
        regular = in_depth & invertible
        alive = regular & (row_opacities >= MIN_ALPHA)
        spread = torch.where(alive, cutoff_squared(row_opacities), 0.0)[:, None] * torch.stack([xx, yy], dim=-1)
        extents = outward(torch.sqrt(spread), EXTENT_MARGIN)
        square = torch.ceil(three_sigma(xx, xy, yy)).clamp_max(MAX_RADIUS)[:, None]
        counts = regular & ((means2d + square > 0) & (means2d - square < size[view])).all(-1)
        alive &= counts & ((means2d + extents > 0) & (means2d - extents < size[view])).all(-1)
        radii = torch.where(alive[:, None], extents, torch.where(counts[:, None], -square, 0.0)).to(torch.int32)
    outputs = (means2d, conics, depths, row_opacities)
    kept = [torch.where(alive.view(-1, *[1] * (out.dim() - 1)), out, 0.0) for out in outputs]
    return kept[0], kept[1], kept[2], kept[3], radii


def sh_basis(degree: int, directions: Tensor) -> Tensor:
    """Return the (degree + 1)^2 real spherical harmonics [..., (degree + 1)^2] at unit directions [..., 3]; degree 0 to
    3."""
    x, y, z = directions.unbind(-1)
    basis = [torch.full_like(x, 0.28209479177387814)]
    if degree >= 1:
        basis += [-0.4886025119029199 * y, 0.4886025119029199 * z, -0.4886025119029199 * x]
    if degree >= 2:
        basis += [
            1.0925484305920792 * x * y,
            -1.0925484305920792 * y * z,
            0.31539156525252005 * (3 * z * z - 1),
            -1.0925484305920792 * x * z,
            0.5462742152960396 * (x * x - y * y),
        ]
    if degree >= 3:
        basis += [
            -0.5900435899266435 * y * (3 * x * x - y * y),
            2.890611442640554 * x * y * z,
            -0.4570457994644658 * y * (5 * z * z - 1),
            0.3731763325901154 * z * (5 * z * z - 3),
            -0.4570457994644658 * x * (5 * z * z - 1),
            1.445305721320277 * z * (x * x - y * y),
            -0.5900435899266435 * x * (x * x - 3 * y * y),
        ]
    return torch.stack(basis, dim=-1)


def sh_colors(
    degree: int,
    means: Tensor,
    camera_centers: Tensor,
    sh_dc: Tensor,
    sh_rest: Tensor,
    view_ids: Tensor,
    point_ids: Tensor,
) -> Tensor:
    """See `cuda_ext.sh_colors`."""
    point = point_ids.long()
    way = _take(means, point) - camera_centers[view_ids.long()]
    apart = (way != 0).any(-1, keepdim=True)
    unit = torch.where(apart, way, 1.0)
    unit = torch.where(apart, unit / unit.norm(dim=-1, keepdim=True), 0.0)
    basis = sh_basis(degree, unit)
    color = basis[:, :1] * _take(sh_dc, point)
    color = color + (basis[:, 1:, None] * _take(sh_rest[:, : basis.shape[-1] - 1], point)).sum(-2)
    return torch.where(point[:, None] >= 0, torch.relu(color + 0.5), 0.0)
