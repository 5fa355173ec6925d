"""Pure-torch 2D Gaussians: the plain statement of what `project_surfels` and `rasterize_surfels` compute.

2D Gaussian Splatting (Huang et al. 2024, sections 4.1 and 4.2), with the conventions of gsplat 1.4.0's
`rasterization_2dgs`. Differentiable by autograd alone, on any device and float type; see `cuda_ext.ops.raster.surfels`.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from cuda_ext.reference.projection import _take, cutoff_squared, local_pinholes, outward, rotation_matrices
from cuda_ext.reference.rasterization import ALPHA_MAX, ALPHA_MIN, TRANSMITTANCE_MIN
from cuda_ext.reference.tiles import composite_tiles

EXTENT_MARGIN = 1e-4
GEOMETRY = 6
"""Numbers of a pixel besides its colour: depth, normal (3), distortion, median depth."""
FRONT = 1e-6
"""The disc of one standard deviation must lie in front of the camera's plane by this, relative to its depth squared."""


def project_surfels(
    means: Tensor, quats: Tensor, scales: Tensor, opacities: Tensor, viewmats: Tensor, Ks: Tensor,
    sizes: Sequence[int], view_ids: Tensor, point_ids: Tensor, near: float, far: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """See `cuda_ext.ops.raster.surfels`. Dead rows are computed on harmless stand-ins."""
    view, point = view_ids.long(), point_ids.long()
    size = means.new_tensor(list(sizes)).view(-1, 2)[view]
    R, t, K = viewmats[view, :3, :3], viewmats[view, :3, 3], Ks[view]
    focal, center = torch.stack([K[:, 0, 0], K[:, 1, 1]], dim=-1), K[:, :2, 2]
    seen = (R @ _take(means, point)[..., None]).squeeze(-1) + t
    mean, maps, in_depth = local_pinholes(K, seen, near, far)
    in_depth = in_depth & (point >= 0)
    axes = R @ rotation_matrices(_take(quats, point))
    edges = maps @ (axes[:, :, :2] * _take(scales, point)[:, None, :])  # [M, 3, 2]
    seen = (maps @ mean[..., None]).squeeze(-1)
    z = seen[:, 2]
    in_front = edges[:, 2].square().sum(-1) - z * z < -FRONT * z * z
    regular = in_depth & in_front
    edges = torch.where(regular[:, None, None], edges, torch.zeros_like(edges))
    frame = torch.cat([edges, seen[..., None]], dim=-1)  # H: splat coordinates (u, v, 1) to the camera's
    rows = focal[..., None] * frame[:, :2] + center[..., None] * frame[:, 2:]
    transforms = torch.cat([rows, frame[:, 2:]], dim=1)

    # The splat's two axes on the screen, seen from its projected centre: nothing cancels there.
    slope = seen[:, :2] / z[:, None]
    turned = focal[..., None] * (edges[:, :2] - slope[..., None] * edges[:, 2:])  # [M, 2, 2]
    tilt = edges[:, 2]
    at = slope * focal + center
    shift, extent = _box(turned, tilt, z, torch.ones_like(z))
    means2d = at + shift
    with torch.no_grad():
        row_opacity = _take(opacities, point)
        cutoff2 = cutoff_squared(row_opacity)
        wide_shift, wide = _box(turned, tilt, z, cutoff2)
        bounded = cutoff2 * tilt.square().sum(-1) - z * z < -FRONT * z * z
        disc = torch.sqrt(0.5 * cutoff2)[:, None]
        close = torch.maximum((wide_shift - shift).abs() + wide, disc)
        everywhere = torch.maximum(means2d.abs(), (size - means2d).abs()) + 1
        radii = outward(torch.where(bounded[:, None], close, everywhere), EXTENT_MARGIN)
        square = three_sigma_of(extent)[:, None].expand(-1, 2)
        regular = regular & torch.isfinite(means2d).all(-1) & torch.isfinite(square).all(-1)

        def touches(half: Tensor) -> Tensor:
            return ((means2d + half > 0) & (means2d - half < size)).all(-1)

        counted = regular & touches(square)
        # Unlike a 3D Gaussian's, the bound may extend beyond the square of 3 sigma: what can show is drawn.
        alive = regular & (row_opacity >= ALPHA_MIN) & touches(radii)
        radii = torch.where(alive[:, None], radii, torch.where(counted[:, None], -square, torch.zeros_like(square)))
    facing = torch.where((axes[:, :, 2] * mean).sum(-1) < 0, 1.0, -1.0).to(axes.dtype)
    normals = axes[:, :, 2] * facing[:, None]
    none = torch.zeros((), dtype=means.dtype, device=means.device)
    return (
        torch.where(alive[:, None], means2d, none),
        torch.where(alive[:, None], transforms.flatten(1), none),
        torch.where(alive[:, None], normals, none),
        torch.where(alive, z, none),
        torch.where(alive, _take(opacities, point), none),
        radii.int(),
    )


def three_sigma_of(extent: Tensor) -> Tensor:
    """Return gsplat 1.4.0's radius in pixels, [M], of half extents [M, 2] of one standard deviation."""
    return torch.ceil(3 * torch.sqrt(extent.square().amax(-1).clamp(min=1e-4)))


def _box(turned: Tensor, tilt: Tensor, z: Tensor, cutoff2: Tensor) -> tuple[Tensor, Tensor]:
    """Return the centre, from the projected mean, and the half extents [M, 2] of the image of a disc of the splat's
    plane.

    `turned` [M, 2, 2] is by screen axis; reach2 [M] is the disc's radius squared. (Huang et al. 2024, section 4.2 and
    appendix; Weyrich et al. 2007.)
    """
    denominator = cutoff2 * tilt.square().sum(-1) - z * z
    denominator = torch.where(denominator < 0, denominator, -torch.ones_like(denominator))[:, None]
    shift = cutoff2[:, None] * (turned * tilt[:, None]).sum(-1) / denominator
    height2 = shift.detach() ** 2 - cutoff2[:, None] * turned.detach().square().sum(-1) / denominator.detach()
    return shift, height2.clamp(min=0).sqrt()


def surfel_radii(transforms: Tensor) -> Tensor:
    """Return gsplat 1.4.0's radii in pixels of rows that are drawn, [M] whole numbers, from [M, 9] transforms."""
    frame = transforms.detach().view(-1, 3, 3)
    z = torch.where(frame[:, 2, 2] > 0, frame[:, 2, 2], 1.0)
    turned = frame[:, :2, :2] - (frame[:, :2, 2:] / z[:, None, None]) * frame[:, 2:, :2]
    return three_sigma_of(_box(turned, frame[:, 2, :2], z, torch.ones_like(z))[1])


def _composite(rows: Tensor, centres: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return colours [p, 3], geometry [p, 6], signed alpha [p] and last index [p] of p pixels under n sorted rows.

    rows [n, 19]: mean (2), transform (9), normal (3), opacity, colour (3), depth. centres [p, 2].
    """
    mean, frame, normal, opacity, color, depth = rows.split([2, 9, 3, 1, 3, 1], dim=1)
    opacity, depth = opacity[:, 0], depth[:, 0]
    u, v, w = frame.view(-1, 3, 3).unbind(1)
    x, y = centres[:, None, 0, None], centres[:, None, 1, None]
    h_u, h_v = x * w - u, y * w - v
    intersection = torch.linalg.cross(h_u, h_v)
    meets = intersection[..., 2] != 0
    place = intersection[..., :2] / torch.where(meets, intersection[..., 2], 1.0)[..., None]
    ahead = (place.detach() * w[:, :2]).sum(-1) + w[:, 2] > 0
    on_plane = torch.where(meets & ahead, place.square().sum(-1), torch.inf)
    on_screen = 2 * (mean - centres[:, None]).square().sum(-1)
    sigma = 0.5 * torch.where(on_plane <= on_screen, on_plane, on_screen)
    alpha = (opacity * torch.exp(-sigma)).clamp(max=ALPHA_MAX)
    alpha = torch.where(meets & (alpha >= ALPHA_MIN), alpha, torch.zeros_like(alpha))
    after = torch.cumprod(1 - alpha, dim=1)
    before = torch.cat([torch.ones_like(after[:, :1]), after[:, :-1]], dim=1)
    weights = torch.where(after > TRANSMITTANCE_MIN, before * alpha, torch.zeros_like(alpha))
    index = torch.arange(len(rows), device=rows.device).expand_as(weights)
    last = torch.where(weights > 0, index, -1).amax(dim=1)
    deep = weights * depth
    distortion = 2 * (deep * (weights.cumsum(1) - weights) - weights * (deep.cumsum(1) - deep)).sum(1)
    halfway = torch.where((weights > 0) & (before > 0.5), index, -1).amax(dim=1)
    median = torch.where(halfway >= 0, depth[halfway.clamp(min=0)], 0.0)
    geometry = torch.cat([deep.sum(1)[:, None], weights @ normal, distortion[:, None], median[:, None]], dim=1)
    covered = weights.sum(dim=1)
    covered = torch.where((after <= TRANSMITTANCE_MIN).any(dim=1), -covered, covered)
    return weights @ color, geometry, covered, last


def rasterize_surfels(
    means2d: Tensor, transforms: Tensor, normals: Tensor, row_opacities: Tensor, colors: Tensor, depths: Tensor,
    tile_offsets: Tensor, row_ids: Tensor, patches: Sequence[int], tile_size: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Rasterize one tile after the other, as `cuda_ext.ops.raster.surfels`; alpha is signed."""
    table = torch.cat([means2d, transforms, normals, row_opacities[:, None], colors, depths[:, None]], dim=1)
    return composite_tiles(table, tile_offsets, row_ids, patches, tile_size, GEOMETRY, _composite)
