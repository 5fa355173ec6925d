"""2D Gaussians (Huang et al. 2024, "2D Gaussian Splatting"): `SURFELS`, their operators.

A surfel is a flat Gaussian in the plane of its first two axes. Its `transform` takes (u, v, 1), a place in that plane
in standard deviations, to homogeneous pixels: T = K [s_u a_u, s_v a_v, mean], all in camera space (section 4.1).

Projection has gsplat 1.4.0's conventions. Dead is also a surfel whose disc of one standard deviation intersects the
camera's plane: its box, and with it the centre of the low-pass filter, is not defined. (gsplat draws such a one
somewhere.) Bounds are where alpha falls below 1/255; gsplat's are at 3 standard deviations, in whole tiles.

A pixel's ray meets a surfel's plane at (u, v); sigma = min(u^2 + v^2, 2 |pixel - means2d|^2) / 2 is the Gaussian's
exponent with the low-pass filter on the screen (section 4.2). Where the ray meets the plane behind the camera the
filter alone counts; where it is parallel to it, nothing does. Median depth and distortion are gsplat 1.4.0's: of the
depths of centres, not of the ray's crossing, and the distortion is that of absolute differences.
"""

from typing import NamedTuple

from torch import Tensor

from cuda_ext.ops.raster.primitives import BoxedOperators
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


def _pixels(colors: Tensor, geometry: Tensor, alphas: Tensor) -> SurfelPixels:
    return SurfelPixels(colors, geometry[:, 0], geometry[:, 1:4], geometry[:, 4], geometry[:, 5], alphas)


SURFELS = BoxedOperators(
    "surfels",
    reference,
    points={"means": 3, "quats": 4, "scales": 2, "opacities": 1},
    projected={"means2d": 2, "transforms": 9, "normals": 3, "depths": 1, "row_opacities": 1},
    extra=GEOMETRY,
    quads=5,
    rows=SurfelProjection,
    pixels=_pixels,
)
"""Of points: `means` in world coordinates, `quats` (w, x, y, z) of any length but zero, and `scales`, standard
deviations along the first two axes in world units."""
