"""The reference of `splat_boxes`, `box_views` and `patch_counts`, and how a step widens boxes.

Shapes: `cuda_ext.ops.project.boxes`, `cuda_ext.ops.project.patch_counts`.

Which box may show is derived in cuda_ext/csrc/common/box.h.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from cuda_ext.reference.compact import WANDER
from cuda_ext.reference.lazy_adam import PARAMETERS
from cuda_ext.reference.projection import KIND_PERSPECTIVE, is_lens

POINTS = 32
"""Points of a group: what a warp of the update has."""
FLOATS = 8

_CUTOFF, _MARGIN, _PIXEL, _ERROR = 3.3291, 1.002, 1.02, 4e-6
_BOUND = 4
"""Index in a line of a `LazyAdam`'s table of the bound on a parameter's motion."""


def groups_of(points: int) -> int:
    """Return the number of groups of this many points; the last may have fewer."""
    return -(-points // POINTS)


@torch.no_grad()
def splat_boxes_composed(means: Tensor, log_scales: Tensor, boxes: Tensor) -> None:
    """See `cuda_ext.ops.project.boxes.splat_boxes`."""
    boxes.copy_(_boxes_of(means, log_scales))


@torch.no_grad()
def widen_boxes(means: Tensor, log_scales: Tensor, boxes: Tensor) -> None:
    """Widen boxes to contain the points at their current positions."""
    now = _boxes_of(means, log_scales)
    boxes[:, :3] = torch.minimum(boxes[:, :3], now[:, :3])
    boxes[:, 3:7] = torch.maximum(boxes[:, 3:7], now[:, 3:7])


def _boxes_of(means: Tensor, log_scales: Tensor) -> Tensor:
    spare = groups_of(len(means)) * POINTS - len(means)
    there = ~means.isnan().any(1, keepdim=True)  # a point without a position is invisible
    largest = log_scales.amax(1, keepdim=True).nan_to_num(nan=torch.inf, posinf=torch.inf, neginf=-torch.inf)
    lower = torch.where(there, means, torch.inf)
    upper = torch.where(there, torch.cat([means, largest], 1), -torch.inf)
    lower = torch.cat([lower, lower.new_full((spare, 3), torch.inf)]).view(-1, POINTS, 3)
    upper = torch.cat([upper, upper.new_full((spare, 4), -torch.inf)]).view(-1, POINTS, 4)
    return torch.cat([lower.amin(1), upper.amax(1), upper.new_zeros(len(upper), 1)], 1)


class _Sides(NamedTuple):
    """Along x, or along y, of all views [V, 1]."""

    row: Tensor
    at: Tensor
    focal: Tensor
    centre: Tensor
    length: Tensor


@torch.no_grad()
def box_views_composed(
    boxes: Tensor, viewmats: Tensor, Ks: Tensor, sizes: Sequence[int], eps2d: float, near: float, far: float,
    table: Tensor | None, compact: bool,
) -> Tensor:  # fmt: skip
    """See `cuda_ext.ops.project.boxes.box_views`."""
    if is_lens(Ks):
        return _lens_views(boxes, viewmats, Ks, near, far, _motion(boxes, table, compact)[0])
    views = len(viewmats)
    lower, upper = boxes[:, :3], boxes[:, 3:6]
    centre, half = 0.5 * lower + 0.5 * upper, 0.5 * upper - 0.5 * lower
    farthest = centre.abs() + half
    R, t = viewmats[:, :3, :3], viewmats[:, :3, 3:]
    size = boxes.new_tensor(list(sizes)).view(views, 2)
    axes = [
        _Sides(R[:, k], t[:, k], Ks[:, k, k, None], Ks[:, k, 2, None], size[:, k, None]) for k in range(2)
    ]  # fmt: skip

    def extent(row: Tensor, of: Tensor) -> Tensor:
        return row.abs() @ of.T

    size_z = extent(R[:, 2], farthest) + t[:, 2].abs()
    error_z = _ERROR * size_z
    middle, deep = R[:, 2] @ centre.T + t[:, 2], extent(R[:, 2], half) + error_z
    moved, grown = _motion(boxes, table, compact)
    slack = moved + error_z
    outside = (middle + deep < near - slack) | (middle - deep > far + slack)
    least = middle - deep if table is not None else torch.maximum(middle - deep, near - slack)
    around = ~(least > 0) if table is None else ~((least > 0) & (least >= near))

    pixels = _MARGIN * _CUTOFF * (eps2d + 0.1) ** 0.5 + _PIXEL
    largest = torch.exp(boxes[:, 6] + grown).expand_as(least)
    nearest = 1 / (least - moved).clamp_min(near)
    ratio = torch.maximum(least, near + moved) * nearest if table is not None else torch.ones_like(least)
    slopes: list[Tensor] = []
    stretch = torch.ones_like(least)
    for side in axes:
        margin = 0.15 * side.length / side.focal
        ends = (-(side.centre / side.focal + margin), (side.length - side.centre) / side.focal + margin)
        most = torch.maximum(ends[0].abs(), ends[1].abs()).expand_as(least)
        across = (side.row @ centre.T + side.at).abs() + extent(side.row, half)
        across = across + _ERROR * (extent(side.row, farthest) + side.at.abs())
        slopes.append((1 + (across / least).square()).sqrt())
        if table is not None:
            most = most + moved * slopes[-1] * nearest
        stretch = stretch + most.square()
    focal = torch.maximum(axes[0].focal.abs(), axes[1].focal.abs())
    spread = _MARGIN * _CUTOFF * focal * largest * ratio * stretch.sqrt()
    for side, slope in zip(axes, slopes, strict=True):
        size_k = extent(side.row, farthest) + side.at.abs()
        weight = side.centre.abs() + side.length + pixels
        half_extent = spread + _ERROR * (side.focal.abs() * size_k + weight * size_z)
        if table is not None:
            half_extent = half_extent + side.focal.abs() * (_MARGIN * ratio * moved * slope)
        for f, w in (
            (side.focal, side.centre + pixels),
            (-side.focal, side.length - side.centre + pixels),
        ):
            normal = f * side.row + w * R[:, 2]
            most = f * side.at + w * t[:, 2] + normal @ centre.T + normal.abs() @ half.T
            outside = outside | (~around & (most + half_extent < 0))
    empty = (lower > upper).any(1)
    return ~(outside | empty)


def _lens_views(boxes: Tensor, viewmats: Tensor, Ks: Tensor, near: float, far: float, moved: Tensor) -> Tensor:
    """Return whether the balls around boxes touch the cones of lenses' rays [V, G]."""
    lower, upper = boxes[:, :3], boxes[:, 3:6]
    centre, half = 0.5 * lower + 0.5 * upper, 0.5 * upper - 0.5 * lower
    R, t = viewmats[:, :3, :3], viewmats[:, None, :3, 3]
    seen, size = centre @ R.mT + t, ((centre.abs() + half) @ R.abs().mT + t.abs()).sum(-1)
    radius, distance = half.norm(dim=-1) + moved + _ERROR * size, seen.norm(dim=-1)
    away = torch.atan2(seen[..., :2].norm(dim=-1), seen[..., 2]) - torch.asin((radius / distance).clamp(max=1))
    depth = torch.where(Ks[:, 3, :1] == KIND_PERSPECTIVE, seen[..., 2], distance)
    outside = (distance > radius) & (away > Ks[:, 3, 1:2] + 2e-3)
    outside = outside | (depth + radius < near) | (depth - radius > far)
    return ~(outside | (lower > upper).any(1))


def _motion(boxes: Tensor, table: Tensor | None, compact: bool) -> tuple[Tensor, Tensor]:
    """Return bounds on a point's distance from its stored position and on the growth of the logarithm of its scale."""
    if table is None:
        return boxes.new_zeros(()), boxes.new_zeros(())
    bounds = (WANDER if compact else 1.0) * table[:, :, _BOUND].amax(0)
    return 1.7321 * bounds[PARAMETERS.index("means")], bounds[PARAMETERS.index("log_scales")]


@torch.no_grad()
def patch_counts(
    points: Tensor, size: int, boxes: Tensor, labels: Tensor, num_labels: int, viewmats: Tensor, lenses: Tensor,
    columns: Tensor, rows: Tensor, halos: Tensor, near: float, far: float,
) -> Tensor:  # fmt: skip
    """See `cuda_ext.ops.project.patch_counts`; boxes are not needed."""
    of_point = labels.repeat_interleave(size)[: points.shape[1]]
    parts = columns.shape[1] - 1
    counts = torch.zeros(len(viewmats), parts * parts, num_labels, dtype=torch.int32)
    for v, pose in enumerate(viewmats):
        x, y, depth = pose[:3, :3] @ points + pose[:3, 3:]
        fx, fy, cx, cy = lenses[v]
        shown, inside = (depth >= near) & (depth <= far), list[Tensor]()
        for at, cuts in ((fx * x / depth + cx, columns[v]), (fy * y / depth + cy, rows[v])):
            shown = shown & (at >= 0) & (at < cuts[-1])
            low, high = cuts[:-1, None], cuts[1:, None]
            inside.append((at >= low - halos[v]) & (at < high + halos[v]) & (low < high))
        for row in range(parts):
            for column in range(parts):
                here = shown & inside[1][row] & inside[0][column]
                counts[v, row * parts + column] = torch.bincount(of_point[here], minlength=num_labels)
    return counts
