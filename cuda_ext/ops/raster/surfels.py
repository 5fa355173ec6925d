"""2D Gaussians (Huang et al. 2024, "2D Gaussian Splatting"): `project_surfels` and `rasterize_surfels`.

A surfel is a flat Gaussian in the plane of its first two axes. Its `transform` takes (u, v, 1), a place in that plane
in standard deviations, to homogeneous pixels: T = K [s_u a_u, s_v a_v, mean], all in camera space (section 4.1).
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
from cuda_ext.reference import surfels as reference

GEOMETRY = reference.GEOMETRY


class SurfelProjection(NamedTuple):
    """Projected surfels of the rows.

    Attributes:
        means2d: [M, 2] centre (x, y) in pixels of the box around the disc of one standard deviation, which is not
            quite where the mean is; the low-pass filter on the screen is around it.
        transforms: [M, 9] T by rows, pixels and world units.
        normals: [M, 3] unit normals in camera space, towards the camera.
        depths: [M] camera-space z of the mean, world units.
        row_opacities: [M].
        radii: [M, 2] int32. Of a row that is drawn, half extents in pixels around `means2d` outside of which alpha is
            below 1/255, rounded outward. Of one that is not, minus gsplat 1.4.0's radius where that square touches the
            view: densification counts it as seen. Otherwise 0.
    """

    means2d: Tensor
    transforms: Tensor
    normals: Tensor
    depths: Tensor
    row_opacities: Tensor
    radii: Tensor


class SurfelPixels(NamedTuple):
    """Rendered pixels without a background.

    Attributes:
        colors: [P, 3], premultiplied.
        depths: [P] depth of the splats' centres times alpha.
        normals: [P, 3] sum of the splats' normals by their weights, in camera space.
        distortion: [P] sum over pairs of splats of w_i w_j |m_i - m_j|, m depths of centres in world units.
        median: [P] depth of the splat that raises alpha to one half, or of the last where none does; 0 for no splat.
        alphas: [P], negative where the pixel was closed before a splat.
    """

    colors: Tensor
    depths: Tensor
    normals: Tensor
    distortion: Tensor
    median: Tensor
    alphas: Tensor


def project_surfels(
    means: Tensor, quats: Tensor, scales: Tensor, opacities: Tensor, viewmats: Tensor, Ks: Tensor,
    sizes: Sequence[int], view_ids: Tensor, point_ids: Tensor, near: float = 0.01, far: float = 1e10,
) -> SurfelProjection:  # fmt: skip
    """Project surfels into views (Huang et al. 2024, section 4.1), with gsplat 1.4.0's conventions.

    A row that is not drawn in its whole view is dead, as in `project`: zero in all outputs but `radii`, and without a
    gradient. Dead is also a surfel whose disc of one standard deviation intersects the camera's plane: its box, and
    with it the centre of the low-pass filter, is not defined. (gsplat draws such a one somewhere.) Bounds are where
    alpha falls below 1/255; gsplat's are at 3 standard deviations, in whole tiles.

    Differentiable with respect to `means`, `quats`, `scales`, `opacities` and `viewmats`.

    Args:
        means: [N, 3] world coordinates. quats: [N, 4] (w, x, y, z) of any length but zero.
        scales: [N, 2] standard deviations along the first two axes, world units. opacities: [N].
        viewmats: [V, 4, 4]. Ks: [V, 3, 3], or [V, 7, 3] with lenses. sizes: (width, height) of each view, 2 V ints.
        view_ids, point_ids: [M] int32.
        near, far: depths of centres between which surfels are drawn, world units.

    Raises:
        TypeError, ValueError, IndexError: as `project`.
        NativeBuildError: the operators cannot be compiled.
    """
    points = means.shape[0]
    check_floats(
        means,
        means=(means, (-1, 3)),
        quats=(quats, (points, 4)),
        scales=(scales, (points, 2)),
        opacities=(opacities, (points,)),
    )
    check_rows(means, view_ids, point_ids)
    sizes = check_cameras(means, viewmats, Ks, sizes, near, far)
    op = torch.ops.ns_multigpu.project_surfels if compiled_serves(means) else reference.project_surfels
    cameras = (viewmats, Ks, sizes)
    return SurfelProjection(*op(means, quats, scales, opacities, *cameras, view_ids, point_ids, near, far))


def rasterize_surfels(
    rows: SurfelProjection, colors: Tensor, tile_offsets: Tensor, row_ids: Tensor, patches: Sequence[int],
    tile_size: int = 16,
) -> SurfelPixels:  # fmt: skip
    """Composite surfels over the pixels of the patches, front to back by the depths of their centres.

    A pixel's ray meets a surfel's plane at (u, v); sigma = min(u^2 + v^2, 2 |pixel - means2d|^2) / 2 is the Gaussian's
    exponent with the low-pass filter on the screen (Huang et al. 2024, section 4.2). Constants and stopping
    are those of `rasterize`. Where the ray meets the plane behind the camera the filter alone counts; where it is
    parallel to it, nothing does. Median depth and distortion are gsplat 1.4.0's: of the depths of centres, not of the
    ray's crossing, and the distortion is that of absolute differences.

    Differentiable with respect to all floats of `rows` and to `colors`. On CPU the gradients have the same bits on any
    number of threads.

    Args:
        rows: `project_surfels`'s.
        colors: [M, 3].
        tile_offsets, row_ids: `box_lists`'s, with the same patches and tile_size.
        patches: 5 integers a patch (view, x0, y0, x1, y1).

    Raises:
        TypeError, ValueError: types, shapes, patches or tile_size are wrong; on CUDA a tile_size other than 16.
    """
    means2d, transforms, normals, depths, opacities, _ = rows
    count = means2d.shape[0]
    _check_patches(patches, tile_size)
    check_floats(
        means2d,
        means2d=(means2d, (-1, 2)),
        transforms=(transforms, (count, 9)),
        normals=(normals, (count, 3)),
        row_opacities=(opacities, (count,)),
        colors=(colors, (count, 3)),
        depths=(depths, (count,)),
    )
    _check_ints(means2d, tile_offsets=(tile_offsets, (-1,)), row_ids=(row_ids, (-1,)))
    op = torch.ops.ns_multigpu.rasterize_surfels if compiled_serves(means2d) else reference.rasterize_surfels
    floats = (means2d, transforms, normals, opacities, colors, depths)
    color, geometry, alpha, *_ = op(*floats, tile_offsets, row_ids, list(patches), tile_size)
    return SurfelPixels(color, geometry[:, 0], geometry[:, 1:4], geometry[:, 4], geometry[:, 5], alpha)


register("surfels", points=4, projected=(2, 9, 3, 1, 1), extra=GEOMETRY, quads=5)
