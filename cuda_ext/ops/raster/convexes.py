"""3D smooth convexes (Held et al. 2024, "3D Convex Splatting"): `project_convexes` and `rasterize_convexes`.

A convex is the hull of six points. In a view its corners are projected, and the lines through the edges of their 2D
hull say how far outside a pixel is (section 3.3 there): with L_j the signed distance of a pixel from line j times the
edge's length, positive outside, and d the size of a pixel at the centre's depth in world units,

    phi = log sum_j exp(d delta L_j),    I = sigmoid(-d sigma phi),    alpha = opacity I.

d is the paper's scaling with depth. The published code takes the depth itself, so that a convex looks otherwise at
another resolution; here d is the depth divided by the focal length in pixels, and delta and sigma are so many times
larger. Edges' lengths in L are the published code's: by them and by d, what I is at the centre does not depend on the
depth.

Rows, views, ids, sizes and padding are as in `cuda_ext.ops.project.projection`, patches and lists as in
`cuda_ext.ops.raster.rasterization`: `intersect` makes the lists, by boxes (`box_lists`).
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from cuda_ext.dispatch.load import compiled_serves
from cuda_ext.ops.common.checks import check_cameras, check_floats, check_rows
from cuda_ext.ops.raster.primitives import register
from cuda_ext.ops.raster.rasterization import _check_ints, _check_patches
from cuda_ext.reference import convexes as reference

CORNERS, LINES = reference.CORNERS, reference.LINES


class ConvexProjection(NamedTuple):
    """Projected convexes of the rows.

    Attributes:
        means2d: [M, 2] projected centre (x, y) in pixels.
        lines: [M, 18] of each corner the line (a_x, a_y, b) of the hull's edge that starts there, or zeros:
            d delta L = a (p - means2d) + b at pixel p.
        sharpness: [M] d sigma.
        depths: [M] camera-space z of the centre, world units.
        row_opacities: [M].
        radii: [M, 2] int32, half extents in pixels around `means2d` outside of which alpha is below 1/255, rounded
            outward; 0 for a row that is not drawn.
    """

    means2d: Tensor
    lines: Tensor
    sharpness: Tensor
    depths: Tensor
    row_opacities: Tensor
    radii: Tensor


class ConvexPixels(NamedTuple):
    """Rendered pixels without a background.

    Attributes:
        colors: [P, 3], premultiplied.
        depths: [P] depth of the convexes' centres times alpha.
        alphas: [P], negative where the pixel was closed before a convex.
    """

    colors: Tensor
    depths: Tensor
    alphas: Tensor


def project_convexes(
    means: Tensor, corners: Tensor, deltas: Tensor, sigmas: Tensor, opacities: Tensor, viewmats: Tensor, Ks: Tensor,
    sizes: Sequence[int], view_ids: Tensor, point_ids: Tensor, near: float = 0.01, far: float = 1e10,
) -> ConvexProjection:  # fmt: skip
    """Project convexes into views and take their 2D hulls (Held et al. 2024, section 3.2).

    A row that is not drawn in its whole view is dead: zero in all outputs, and without a gradient. Dead is also a
    convex of which a corner lies before the near plane, one whose corners project onto one line or nearly, and one of
    an opacity below 1.001/255.

    Of corners that coincide on the screen the first counts, of corners on one line the outermost.

    Differentiable with respect to all floats but `Ks`; not where the hull changes its corners.

    Args:
        means: [N, 3] centres, world coordinates. corners: [N, 18] x, y, z of six points, from the centre.
        deltas: [N] smoothness, above 0: edges are the rounder the smaller it is. sigmas: [N] sharpness, above 0.
        opacities: [N]. viewmats: [V, 4, 4]. Ks: [V, 3, 3], or [V, 7, 3] with lenses.
        sizes: (width, height) of each view, 2 V ints.
        view_ids, point_ids: [M] int32.
        near, far: depths of centres between which convexes are drawn, world units.

    Raises:
        TypeError, ValueError, IndexError: as `project`.
        NativeBuildError: the operators cannot be compiled.
    """
    points = means.shape[0]
    check_floats(
        means,
        means=(means, (-1, 3)),
        corners=(corners, (points, LINES)),
        deltas=(deltas, (points,)),
        sigmas=(sigmas, (points,)),
        opacities=(opacities, (points,)),
    )
    check_rows(means, view_ids, point_ids)
    sizes = check_cameras(means, viewmats, Ks, sizes, near, far)
    op = torch.ops.ns_multigpu.project_convexes if compiled_serves(means) else reference.project_convexes
    cameras = (viewmats, Ks, sizes)
    return ConvexProjection(
        *op(means, corners, deltas, sigmas, opacities, *cameras, view_ids, point_ids, near, far)
    )  # fmt: skip


def rasterize_convexes(
    rows: ConvexProjection, colors: Tensor, tile_offsets: Tensor, row_ids: Tensor, patches: Sequence[int],
    tile_size: int = 16,
) -> ConvexPixels:  # fmt: skip
    """Composite convexes over the pixels of the patches, front to back by the depths of their centres.

    Constants and stopping are those of `rasterize`. Differentiable with respect to all floats of `rows` and to
    `colors`. On CPU the gradients have the same bits on any number of threads.

    Args:
        rows: `project_convexes`'s.
        colors: [M, 3].
        tile_offsets, row_ids: `box_lists`'s, with the same patches and tile_size.
        patches: 5 integers a patch (view, x0, y0, x1, y1).

    Raises:
        TypeError, ValueError: types, shapes, patches or tile_size are wrong; on CUDA a tile_size other than 16.
    """
    means2d, lines, sharpness, depths, opacities, _ = rows
    count = means2d.shape[0]
    _check_patches(patches, tile_size)
    check_floats(
        means2d,
        means2d=(means2d, (-1, 2)),
        lines=(lines, (count, LINES)),
        sharpness=(sharpness, (count,)),
        row_opacities=(opacities, (count,)),
        colors=(colors, (count, 3)),
        depths=(depths, (count,)),
    )
    _check_ints(means2d, tile_offsets=(tile_offsets, (-1,)), row_ids=(row_ids, (-1,)))
    op = torch.ops.ns_multigpu.rasterize_convexes if compiled_serves(means2d) else reference.rasterize_convexes
    floats = (means2d, lines, sharpness, opacities, colors, depths)
    color, depth, alpha, *_ = op(*floats, tile_offsets, row_ids, list(patches), tile_size)
    return ConvexPixels(color, depth, alpha)


register("convexes", points=5, projected=(2, LINES, 1, 1, 1), extra=1, quads=7)
