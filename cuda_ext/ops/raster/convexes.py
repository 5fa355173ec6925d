"""3D smooth convexes (Held et al. 2024, "3D Convex Splatting"): `CONVEXES`, their operators.

A convex is the hull of six points. In a view its corners are projected, and the lines through the edges of their 2D
hull say how far outside a pixel is (section 3.3 there): with L_j the signed distance of a pixel from line j times the
edge's length, positive outside, and d the size of a pixel at the centre's depth in world units,

    phi = log sum_j exp(d delta L_j),    I = sigmoid(-d sigma phi),    alpha = opacity I.

d is the paper's scaling with depth. The published code takes the depth itself, so that a convex looks otherwise at
another resolution; here d is the depth divided by the focal length in pixels, and delta and sigma are so many times
larger. Edges' lengths in L are the published code's: by them and by d, what I is at the centre does not depend on the
depth.

Dead is also a convex of which a corner lies before the near plane, one whose corners project onto one line or nearly,
and one of an opacity below 1.001/255. Of corners that coincide on the screen the first counts, of corners on one line
the outermost. Projection is not differentiable where the hull changes its corners.
"""

from typing import NamedTuple

from torch import Tensor

from cuda_ext.ops.raster.primitives import BoxedOperators
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


CONVEXES = BoxedOperators(
    "convexes",
    reference,
    points={"means": 3, "corners": LINES, "deltas": 1, "sigmas": 1, "opacities": 1},
    projected={"means2d": 2, "lines": LINES, "sharpness": 1, "depths": 1, "row_opacities": 1},
    extra=1,
    quads=7,
    rows=ConvexProjection,
    pixels=ConvexPixels,
)
"""Of points: `means`, centres in world coordinates; `corners`, x, y, z of six points, from the centre; `deltas`,
smoothness, above 0: edges are the rounder the smaller it is; `sigmas`, sharpness, above 0."""
