"""Number of points that each patch of each view shows, by label (Gaian, section 4.2): what a placement is made from.

It runs on the host, because one rank counts for all, while the model is placed.
"""

import torch
from torch import Tensor

from cuda_ext.dispatch.load import load_native
from cuda_ext.ops.common.checks import check_depth_range, check_tensors
from cuda_ext.reference import boxes as reference

MOST_PARTS = 8
"""Patches along a side of a view."""


@torch.no_grad()
def patch_counts(
    points: Tensor,
    size: int,
    boxes: Tensor,
    labels: Tensor,
    num_labels: int,
    viewmats: Tensor,
    lenses: Tensor,
    columns: Tensor,
    rows: Tensor,
    halos: Tensor,
    near: float = 0.01,
    far: float = 1e10,
) -> Tensor:
    """Count points whose centre lies in a patch or its halo, and in the view.

    Args:
        points: [3, N] float32 world coordinates, group after group; those that are not finite are not counted.
        size: points of a group; the last may have fewer.
        boxes: [6, C] float32, centres and half extents of boxes around the groups' points.
        labels: [C] int64 in [0, num_labels), of each group's points.
        viewmats: [V, 4, 4] float32, world-to-camera, OpenCV axes.
        lenses: [V, 4] float32, focal lengths fx, fy and principal point cx, cy in pixels.
        columns, rows: [V, P + 1] int32, ascending cuts of each view's width and height in pixels, from 0 to the whole.
            Equal cuts have an empty patch between them. P is at most `MOST_PARTS`.
        halos: [V] int32 pixels around each patch.
        near, far: depths between which points are counted.

    Returns:
        [V, P * P, num_labels] int32; patches row after row.

    Raises:
        TypeError, ValueError: a type, shape, number or device is wrong.
        NativeBuildError: the operators cannot be compiled.
    """
    cpu = torch.device("cpu")
    groups, views = labels.shape[0], viewmats.shape[0]
    check_tensors(
        torch.float32, cpu, points=(points, (3, -1)), boxes=(boxes, (6, groups)), viewmats=(viewmats, (views, 4, 4)),
        lenses=(lenses, (views, 4)),
    )  # fmt: skip
    sides = (views, columns.shape[-1])
    check_tensors(torch.int32, cpu, columns=(columns, sides), rows=(rows, sides), halos=(halos, (views,)))
    check_tensors(torch.int64, cpu, labels=(labels, (-1,)))
    check_depth_range(near, far)
    if not 2 <= sides[1] <= MOST_PARTS + 1:
        raise ValueError(f"columns and rows must hold 2 to {MOST_PARTS + 1} cuts a view, not {sides[1]}.")
    if size < 1 or groups != -(-points.shape[1] // size):
        raise ValueError(f"{points.shape[1]} points in groups of {size} are not {groups} groups.")
    if groups and not 0 <= int(labels.min()) <= int(labels.max()) < num_labels:
        raise ValueError(f"labels must be in 0..{num_labels - 1}.")
    op = torch.ops.ns_multigpu.patch_counts if load_native() else reference.patch_counts
    return op(points, size, boxes, labels, num_labels, viewmats, lenses, columns, rows, halos, near, far)
