"""Culling of points that no view can show: `cull`.

Words, shapes and units: `cuda_ext.ops.project.projection`.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from cuda_ext.dispatch.library import fake
from cuda_ext.dispatch.load import compiled_serves
from cuda_ext.ops.common.checks import check_cameras, check_floats, check_ints
from cuda_ext.reference import projection as reference


def cull(
    means: Tensor,
    scales: Tensor,
    opacities: Tensor,
    viewmats: Tensor,
    Ks: Tensor,
    sizes: Sequence[int],
    rects: Sequence[int],
    eps2d: float = 0.3,
    near: float = 0.01,
    far: float = 1e10,
) -> tuple[Tensor, Tensor]:
    """Find the rows that may be seen: every point whose splat may have alpha 1/255 on its view's rectangle, or whose
    square of 3 sigma may touch it, however transparent it is (see `Projection.radii`).

    Conservative: it keeps some points that do not, as it replaces each point by a ball of its largest scale and bounds
    that ball's image. Not differentiable.

    Args:
        means: [N, 3] world coordinates.
        scales: [N, 3] standard deviations along the point's axes, world units.
        opacities: [N].
        viewmats: [V, 4, 4].
        Ks: [V, 3, 3], or [V, 7, 3] with lenses.
        sizes: (width, height) of each view, 2 V ints.
        rects: (x0, y0, x1, y1) of each view in its pixels, 4 V ints; empty rectangles see nothing.
        eps2d: variance in pixels^2 added to every splat.
        near: least depth, world units, > 0.
        far: greatest depth.

    Returns:
        view_ids [M] int32 and point_ids [M] int32, sorted by (view, point).

    Raises:
        TypeError, ValueError: an argument of the wrong dtype, device or shape, or a wrong depth range.
        NativeBuildError: the operators cannot be compiled.
    """
    points, views = means.shape[0], viewmats.shape[0]
    check_floats(
        means,
        means=(means, (-1, 3)),
        scales=(scales, (points, 3)),
        opacities=(opacities, (points,)),
    )
    sizes = check_cameras(means, viewmats, Ks, sizes, near, far)
    rects = check_ints("rects", rects, 4, views, "view")
    op = torch.ops.ns_multigpu.cull if compiled_serves(means) else reference.cull
    with torch.no_grad():
        return op(means, scales, opacities, viewmats, Ks, sizes, rects, eps2d, near, far)


@fake("cull")
def _cull_fake(means: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    rows = torch.library.get_ctx().new_dynamic_size()
    return means.new_empty(rows, dtype=torch.int32), means.new_empty(rows, dtype=torch.int32)
