"""Pure-torch 3D smooth convexes: the plain statement of what `project_convexes` and `rasterize_convexes` compute.

3D Convex Splatting (Held et al. 2024, section 3). Differentiable by autograd alone, on any device and float type; see
`cuda_ext.ops.raster.convexes`.
"""

from collections.abc import Sequence
from itertools import combinations, permutations

import torch
from torch import Tensor

from cuda_ext.reference.projection import _take, local_pinholes, outward
from cuda_ext.reference.rasterization import ALPHA_MAX, ALPHA_MIN, TRANSMITTANCE_MIN
from cuda_ext.reference.tiles import composite_tiles

CORNERS = 6
"""Points of a convex, and so the most edges of its hull."""
LINES = 3 * CORNERS
OPAQUE = 1.001 * ALPHA_MIN
"""Opacity below which a convex is not drawn: alpha is below the opacity everywhere."""
EXTENT_MARGIN = 2e-3
FLAT = 1e-4
"""Sine of the angle between two lines below which they bound nothing together."""
THIN = 1e-5
"""Twice a hull's area in units of the sum of its edges' squares, below which there is none: rounding makes such."""


def project_convexes(
    means: Tensor, corners: Tensor, deltas: Tensor, sigmas: Tensor, opacities: Tensor, viewmats: Tensor, Ks: Tensor,
    sizes: Sequence[int], view_ids: Tensor, point_ids: Tensor, near: float, far: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """See `cuda_ext.ops.raster.convexes`. Dead rows are computed on harmless stand-ins."""
    view, point = view_ids.long(), point_ids.long()
    size = means.new_tensor(list(sizes)).view(-1, 2)[view]
    R, t, K = viewmats[view, :3, :3], viewmats[view, :3, 3], Ks[view]
    focal, center = torch.stack([K[:, 0, 0], K[:, 1, 1]], dim=-1), K[:, :2, 2]
    seen = (R @ _take(means, point)[..., None]).squeeze(-1) + t
    mean, maps, regular = local_pinholes(K, seen, near, far)
    seen = (maps @ mean[..., None]).squeeze(-1)
    # From the centre, in camera space.
    arms = _take(corners, point).view(-1, CORNERS, 3) @ (maps @ R).transpose(1, 2)
    regular = regular & (point >= 0) & (seen[:, 2:] + arms[..., 2] >= near).all(-1)
    arms = torch.where(regular[:, None, None], arms, torch.zeros_like(arms))
    z = seen[:, 2]
    slope = seen[:, :2] / z[:, None]
    means2d = slope * focal + center
    # Of the corners on the screen, seen from the projected centre: nothing cancels there.
    apart = focal[:, None] * (arms[..., :2] - slope[:, None] * arms[..., 2:]) / (z[:, None] + arms[..., 2])[..., None]
    pixel = z / focal.prod(-1).sqrt()
    scale = pixel * _take(deltas, point)
    lines, edges = hull_lines(apart, scale)
    sharpness, opacity = pixel * _take(sigmas, point), _take(opacities, point)
    with torch.no_grad():
        by_corner = lines.view(-1, CORNERS, 3)
        area, squares = -scale * by_corner[..., 2].sum(-1), by_corner[..., :2].square().sum((1, 2))
        regular = (
            regular
            & (edges >= 3)
            & (area > THIN * squares)
            & torch.isfinite(lines).all(-1)
            & torch.isfinite(means2d).all(-1)
        )
        regular = regular & torch.isfinite(sharpness) & (sharpness > 0) & (opacity >= OPAQUE)
        everywhere = torch.maximum(means2d.abs(), (size - means2d).abs()) + 1
        level = torch.log(255 * opacity.clamp(min=OPAQUE) - 1) / torch.where(regular, sharpness, 1.0)
        radii = outward(_extents(lines, level, everywhere), EXTENT_MARGIN).clamp(min=0)
        touches = ((means2d + radii > 0) & (means2d - radii < size) & (radii > 0)).all(-1)
        alive = regular & touches
        radii = torch.where(alive[:, None], radii, torch.zeros_like(radii))
    none = torch.zeros((), dtype=means.dtype, device=means.device)
    return (
        torch.where(alive[:, None], means2d, none),
        torch.where(alive[:, None], lines, none),
        torch.where(alive, sharpness, none),
        torch.where(alive, z, none),
        torch.where(alive, opacity, none),
        radii.int(),
    )


def hull_edges(places: Tensor) -> Tensor:
    """Return which of a corner's connections are edges of the convex hull: [M, 6, 6] bool, from [M, 6, 2] places.

    Edge (i, j) has all other corners on the side where the cross product with j - i is positive. Of corners at one
    place the first counts; of corners on one line the outermost two.
    """
    found = torch.ones(len(places), CORNERS, CORNERS, dtype=torch.bool, device=places.device)
    found[:, range(CORNERS), range(CORNERS)] = False
    twins = torch.zeros(len(places), CORNERS, dtype=torch.bool, device=places.device)
    for i, j in combinations(range(CORNERS), 2):
        twins[:, j] |= (places[:, i] == places[:, j]).all(-1)
    found &= ~twins[:, :, None] & ~twins[:, None]
    for triple in combinations(range(CORNERS), 3):
        a, b, c = (places[:, k] for k in triple)
        ab, ac = b - a, c - a
        # One sign for the triple, whichever edge asks: so no two corners contradict each other.
        turn = ab[:, 0] * ac[:, 1] - ab[:, 1] * ac[:, 0]
        skip = twins[:, triple].any(-1)
        for order in permutations(range(3)):
            i, j, k = (triple[one] for one in order)
            even = order in ((0, 1, 2), (1, 2, 0), (2, 0, 1))
            start, end, third = places[:, i], places[:, j], places[:, k]
            between = ((third - start) * (end - start)).sum(-1) >= 0
            between = between & (((third - end) * (start - end)).sum(-1) >= 0)
            inside = (turn > 0 if even else turn < 0) | ((turn == 0) & between)
            found[:, i, j] &= inside | skip
    return found


def hull_lines(places: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Return the lines [M, 18] through the hull's edges, and how many there are [M], of places [M, 6, 2].

    Of each corner the line (a_x, a_y, b) of the edge that starts there, zero where none does: scale times the edge's
    length times the signed distance of q from it is a q + b, positive outside.
    """
    with torch.no_grad():
        edges = hull_edges(places)
        starts = edges.any(-1)
        ends = edges.to(torch.uint8).argmax(-1)
    along = places.gather(1, ends[..., None].expand(-1, -1, 2)) - places
    outwards = torch.stack([along[..., 1], -along[..., 0]], dim=-1) * scale[:, None, None]
    offsets = -(outwards * places).sum(-1, keepdim=True)
    lines = torch.cat([outwards, offsets], dim=-1)
    return torch.where(starts[..., None], lines, torch.zeros_like(lines)).flatten(1), starts.sum(-1)


def _extents(lines: Tensor, level: Tensor, most: Tensor) -> Tensor:
    """Return how far from the centre, [M, 2] by axis, a place can be at which no line is above its row's level [M];
    `most` if no pair of lines says.

    A pair of lines whose normals have a direction between them bounds it: the least of these is the bound (the dual of
    a linear program).
    """
    by_corner = lines.view(-1, CORNERS, 3)
    normals, rest = by_corner[..., :2], level[:, None] - by_corner[..., 2]
    lengths = normals.norm(dim=-1)
    found = [most.clone() for _ in range(2)]  # towards positive and negative pixels
    for i, j in combinations(range(CORNERS), 2):
        (ix, iy), (jx, jy) = normals[:, i].unbind(-1), normals[:, j].unbind(-1)
        det = ix * jy - iy * jx
        wide = det.abs() > FLAT * lengths[:, i] * lengths[:, j]
        inverse = 1 / torch.where(wide, det, 1.0)
        shares = torch.stack([torch.stack([jy, -jx], -1), torch.stack([-iy, ix], -1)]) * inverse[:, None]  # [2, M, 2]
        bound = shares[0] * rest[:, i, None] + shares[1] * rest[:, j, None]
        for way, sign in enumerate((1, -1)):
            counts = wide[:, None] & (sign * shares >= 0).all(0)
            found[way] = torch.where(counts, torch.minimum(found[way], sign * bound), found[way])
    return torch.maximum(*found)


def indicator(rows: Tensor, centres: Tensor) -> Tensor:
    """Return the indicator I [p, n] of n rows [n, 21] at p pixels [p, 2] (Held et al. 2024, section 3.3).

    A row is mean (2), lines (18), sharpness (1).
    """
    mean, lines, sharpness = rows.split([2, LINES, 1], dim=1)
    by_corner = lines.view(-1, CORNERS, 3)
    q = centres[:, None] - mean
    distances = (by_corner[None, ..., :2] * q[:, :, None]).sum(-1) + by_corner[..., 2]
    empty = (by_corner[..., :2] == 0).all(-1)
    phi = torch.logsumexp(distances.masked_fill(empty, -torch.inf), dim=-1)
    return torch.sigmoid(-sharpness[:, 0] * phi)


def _composite(rows: Tensor, centres: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return colours [p, 3], depth [p], signed alpha [p] and last index [p] of p pixels under n sorted rows.

    rows [n, 26]: mean (2), lines (18), sharpness, opacity, colour (3), depth. centres [p, 2].
    """
    shape, opacity, color, depth = rows.split([2 + LINES + 1, 1, 3, 1], dim=1)
    alpha = (opacity[:, 0] * indicator(shape, centres)).clamp(max=ALPHA_MAX)
    alpha = torch.where(alpha >= ALPHA_MIN, alpha, torch.zeros_like(alpha))
    after = torch.cumprod(1 - alpha, dim=1)
    before = torch.cat([torch.ones_like(after[:, :1]), after[:, :-1]], dim=1)
    weights = torch.where(after > TRANSMITTANCE_MIN, before * alpha, torch.zeros_like(alpha))
    index = torch.arange(len(rows), device=rows.device).expand_as(weights)
    last = torch.where(weights > 0, index, -1).amax(dim=1)
    covered = weights.sum(dim=1)
    covered = torch.where((after <= TRANSMITTANCE_MIN).any(dim=1), -covered, covered)
    return weights @ color, (weights @ depth)[:, 0], covered, last


def rasterize_convexes(
    means2d: Tensor, lines: Tensor, sharpness: Tensor, row_opacities: Tensor, colors: Tensor, depths: Tensor,
    tile_offsets: Tensor, row_ids: Tensor, patches: Sequence[int], tile_size: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Rasterize one tile after the other, as `cuda_ext.ops.raster.convexes`; alpha is signed."""
    table = torch.cat([means2d, lines, sharpness[:, None], row_opacities[:, None], colors, depths[:, None]], dim=1)
    return composite_tiles(table, tile_offsets, row_ids, patches, tile_size, 1, _composite)
