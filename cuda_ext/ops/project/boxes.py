"""Boxes around groups of points, by which whole groups are culled (Gaian, appendix D.1): `splat_boxes`, `box_views`.

A group is 32 points that follow each other. In an order along a Morton curve they are neighbours, and their box is
small. `splat_forward` looks at boxes first. Of a group whose box shows in no view it reads no point.

A box holds its points as long as only `splat_update` moves them, because it widens the box. After any other operator,
such as `splat_flush`, boxes must be rebuilt.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from cuda_ext.dispatch.library import LIBRARY
from cuda_ext.dispatch.load import compiled_serves, kernels_serve
from cuda_ext.ops.common.checks import check_cameras, check_floats
from cuda_ext.reference.boxes import FLOATS, box_views_composed, groups_of, splat_boxes_composed
from cuda_ext.reference.lazy_adam import MOST_STEPS, PARAMETERS


def new_boxes(means: Tensor) -> Tensor:
    """Return uninitialized boxes [G, 8] of points [N, 3], 32 points a box, for `splat_boxes` to fill."""
    return means.new_zeros(groups_of(len(means)), FLOATS)


@torch.no_grad()
def splat_boxes(means: Tensor, log_scales: Tensor, boxes: Tensor) -> None:
    """Compute the boxes of the points' current parameters.

    On CUDA nothing is read back. 24 bytes a point are read.

    Args:
        means: [N, 3] world coordinates. A point with a NaN among them is left out: no view sees it.
        log_scales: [N, 3] natural logarithms. A point with a NaN among them may overlap anything.
        boxes: [G, 8] written, G = N / 32 rounded up: of each group the lower and upper corner of the box around its
            means, the largest logarithm of a scale, and 0. Without points a lower corner is above the upper one.

    Raises:
        TypeError, ValueError: an argument of the wrong dtype, device or shape.
        NativeBuildError: the operators cannot be compiled.
    """
    check_floats(means, means=(means, (-1, 3)), log_scales=(log_scales, (len(means), 3)))
    check_boxes(means, boxes)
    op: Any = torch.ops.ns_multigpu.splat_boxes if kernels_serve(means) else splat_boxes_composed
    op(means.detach(), log_scales.detach(), boxes)


@torch.no_grad()
def box_views(
    boxes: Tensor,
    viewmats: Tensor,
    Ks: Tensor,
    sizes: Sequence[int],
    eps2d: float = 0.3,
    near: float = 0.01,
    far: float = 1e10,
    table: Tensor | None = None,
    compact: bool = False,
) -> Tensor:
    """Return the views in which groups may be visible: wherever `splat_forward` without boxes would test one of their
    points.

    Conservative: cuda_ext/csrc/common/box.h derives it from the test of a point, with what both may round.

    Args:
        boxes: [G, 8], see `splat_boxes`.
        viewmats: [V, 4, 4]. Ks: [V, 3, 3] or [V, 7, 3]. sizes: (width, height) of each view, 2 V ints.
        eps2d, near, far: see `cull`.
        table: of a `LazyAdam` with deferred steps: it bounds how far points may have moved.
        compact: whether moments are bfloat16.

    Returns:
        [V, G] bool.

    Raises:
        TypeError, ValueError: an argument of the wrong dtype, device or shape, or a wrong depth range.
        NativeBuildError: the operators cannot be compiled.
    """
    check_floats(boxes, boxes=(boxes, (-1, FLOATS)))
    sizes = check_cameras(boxes, viewmats, Ks, sizes, near, far)
    if table is not None:
        check_floats(boxes, table=(table, (MOST_STEPS + 1, len(PARAMETERS), 8)))
    op: Any = torch.ops.ns_multigpu.box_views if compiled_serves(boxes) else box_views_composed
    return op(boxes, viewmats.detach(), Ks, sizes, eps2d, near, far, table, compact)


def check_boxes(means: Tensor, boxes: Tensor) -> None:
    """Check that boxes are those of so many points.

    Raises:
        TypeError, ValueError: dtype, device or shape are wrong.
    """
    check_floats(means, boxes=(boxes, (groups_of(len(means)), FLOATS)))


LIBRARY.impl("splat_boxes", splat_boxes_composed, "CPU")
