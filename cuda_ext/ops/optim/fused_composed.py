"""Compose `splat_forward` and `splat_update` of the other operators and autograd. See `cuda_ext.ops.optim.fused`."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from cuda_ext.ops.exchange.row_layout import real_rows
from cuda_ext.ops.optim.adam import adam_step_torch, mean_step
from cuda_ext.ops.project.boxes import box_views
from cuda_ext.ops.project.culling import cull
from cuda_ext.ops.project.projection import project, sh_colors, three_sigma_radii
from cuda_ext.reference.boxes import POINTS, widen_boxes
from cuda_ext.reference.compact import as_floats, is_compact, step_salts
from cuda_ext.reference.lazy_adam import MOST_STEPS, caught_up, extend, stands_still, write_caught_up

PLAIN_COLOR = -1
"""Degree of points without harmonics: `sh_dc` are the logits of one colour for all views."""


def camera_centers(viewmats: Tensor) -> Tensor:
    """Return the centres [V, 3] of cameras [V, 4, 4] in world coordinates."""
    return -(viewmats[:, :3, :3].mT @ viewmats[:, :3, 3:]).squeeze(-1)


class _Sigmoid(torch.autograd.Function):
    """1 / (1 + exp(-x)), as the kernels compute it. torch's own, on a CPU, rounds the last few numbers of a tensor
    differently from the others: a point's opacity would depend on its place in the tensor and on the tensor's size."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = 1.0 / (1.0 + torch.exp(-x))
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (y,) = ctx.saved_tensors
        return grads[0] * (1.0 - y) * y


def _sigmoid(logits: Tensor) -> Tensor:
    return _Sigmoid.apply(logits)  # type: ignore[no-any-return]


def _colors(
    degree: int, means: Tensor, viewmats: Tensor, sh_dc: Tensor, sh_rest: Tensor, view_ids: Tensor, point_ids: Tensor
) -> Tensor:
    """Return the colours [M, 3] of rows."""
    if degree == PLAIN_COLOR:
        return _sigmoid(sh_dc[point_ids.long()])
    return sh_colors(degree, means, camera_centers(viewmats), sh_dc, sh_rest, view_ids, point_ids)


@torch.no_grad()
def splat_forward_composed(
    means: Tensor, quats: Tensor, log_scales: Tensor, logits: Tensor, sh_dc: Tensor, sh_rest: Tensor, viewmats: Tensor,
    Ks: Tensor, sizes: list[int], degree: int, eps2d: float, near: float, far: float, antialiased: bool,
    capacity: int, exp_avgs: Sequence[Tensor] = (), exp_avg_sqs: Sequence[Tensor] = (), last: Tensor | None = None,
    table: Tensor | None = None, steps: Tensor | None = None, *, boxes: Tensor | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """See `cuda_ext.ops.optim.fused.splat_forward`."""
    cameras = (viewmats, Ks, sizes)
    raw: Sequence[Tensor] = (means, quats, log_scales, logits, sh_dc, sh_rest)
    moments, shows, some = (exp_avgs, exp_avg_sqs, last), None, None
    if boxes is not None:
        shows = box_views(boxes, *cameras, eps2d, near, far, table, is_compact(exp_avgs))
        # Of the points whose group shows in any view alone.
        some = shows.any(0).repeat_interleave(POINTS)[: len(means)].nonzero().squeeze(-1)
        raw, exp_avgs, exp_avg_sqs = ([t[some] for t in tensors] for tensors in (raw, exp_avgs, exp_avg_sqs))
        last = last if last is None else last[some]
    whole = _present((means, quats, log_scales, logits, sh_dc, sh_rest), *moments, table)
    means, _, log_scales, logits, _, _ = _present(raw, exp_avgs, exp_avg_sqs, last, table)
    rects = [n for w, h in zip(sizes[::2], sizes[1::2], strict=True) for n in (0, 0, w, h)]
    scales, opacities = log_scales.exp(), _sigmoid(logits)
    hits = cull(means, scales, opacities, *cameras, rects, eps2d, near, far)
    if shows is not None and some is not None:
        view_ids, point_ids = hits[0], some[hits[1].long()]
        kept = shows[view_ids.long(), point_ids // POINTS]
        hits = view_ids[kept], point_ids[kept].to(torch.int32)
    count = torch.tensor([len(hits[0])], dtype=torch.int64, device=means.device)
    padding = (max(len(viewmats) - 1, 0), -1)
    ids = [torch.full((capacity,), value, dtype=torch.int32, device=means.device) for value in padding]
    for column, found in zip(ids, hits, strict=True):
        column[: len(found)] = found[:capacity]
    lines = slice(0, min(capacity, len(hits[0])))
    rows = (ids[0][lines], ids[1][lines])
    means, quats, log_scales, logits, sh_dc, sh_rest = whole
    means2d, conics, depths, opacities, radii = project(
        means, quats, log_scales.exp(), _sigmoid(logits), *cameras, *rows, eps2d, near, far, antialiased
    )
    colors = _colors(degree, means, viewmats, sh_dc, sh_rest, *rows)
    features = torch.where((radii > 0).all(-1, keepdim=True), colors, 0.0)
    columns = [_padded(column, capacity) for column in (means2d, conics, opacities, features, depths, radii)]
    return (*ids, count, *columns)


def _padded(column: Tensor, lines: int) -> Tensor:
    """Return the column with zeros behind it."""
    padded = column.new_zeros((lines, *column.shape[1:]))
    padded[: len(column)] = column
    return padded


def _present(
    raw: Sequence[Tensor], exp_avgs: Sequence[Tensor], exp_avg_sqs: Sequence[Tensor], last: Tensor | None,
    table: Tensor | None,
) -> Sequence[Tensor]:  # fmt: skip
    """Return the parameters after their deferred steps, if any."""
    if last is None or table is None:
        return raw
    return caught_up(list(raw), list(exp_avgs), list(exp_avg_sqs), last, table)[0]


def splat_update_composed(
    params: list[Tensor], exp_avgs: list[Tensor], exp_avg_sqs: list[Tensor], scalars: Tensor, viewmats: Tensor,
    Ks: Tensor, sizes: list[int], view_ids: Tensor, point_ids: Tensor, count: Tensor, conics: Tensor,
    features: Tensor, radii: Tensor, records: Tensor, grad2d: Tensor, seen: Tensor, radii_max: Tensor,
    degree: int, eps2d: float, near: float, far: float, antialiased: bool, absgrad: bool, depth: bool,
    opacity_weight: float, scale_weight: float, last: Tensor | None = None, table: Tensor | None = None,
    steps: Tensor | None = None, finite_flag: Tensor | None = None, finite_flag_views: Sequence[int] = (),
    boxes: Tensor | None = None, v_viewmats: Tensor | None = None, needles: Tensor | None = None,
    max_ratio: float = 1.0, whole_step_scale: float = 0.0,
) -> None:  # fmt: skip
    """See `cuda_ext.ops.optim.fused.splat_update`."""
    if finite_flag is not None:
        real = real_rows(point_ids, count).nonzero().squeeze(-1)
        first, end = finite_flag_views or (0, len(viewmats))
        real = real[(view_ids[real] >= first) & (view_ids[real] < end) & (radii[real] > 0).all(-1)]
        finite = records[real].isfinite()[:, [*range(9 + depth), 10, 11]].all()
        finite_flag.fill_(float("nan")).masked_fill_(finite, 0.0)
    with as_floats(exp_avgs, exp_avg_sqs, lambda: step_salts(scalars, viewmats)) as (firsts, seconds):
        _update(
            params, firsts, seconds, scalars, viewmats, Ks, sizes, view_ids, point_ids, count, conics, features, radii,
            records, grad2d, seen, radii_max, degree, eps2d, near, far, antialiased, absgrad, depth,
            opacity_weight, scale_weight, last, table, steps, v_viewmats, needles, max_ratio, whole_step_scale,
        )  # fmt: skip
    if boxes is not None:
        widen_boxes(params[0], params[2], boxes)


def _update(
    params: list[Tensor], exp_avgs: list[Tensor], exp_avg_sqs: list[Tensor], scalars: Tensor, viewmats: Tensor,
    Ks: Tensor, sizes: list[int], view_ids: Tensor, point_ids: Tensor, count: Tensor, conics: Tensor,
    features: Tensor, radii: Tensor, records: Tensor, grad2d: Tensor, seen: Tensor, radii_max: Tensor,
    degree: int, eps2d: float, near: float, far: float, antialiased: bool, absgrad: bool, depth: bool,
    opacity_weight: float, scale_weight: float, last: Tensor | None, table: Tensor | None, steps: Tensor | None,
    v_viewmats: Tensor | None, needles: Tensor | None, max_ratio: float, whole_step_scale: float,
) -> None:  # fmt: skip
    """Update points whose moments have the parameters' type."""
    real = real_rows(point_ids, count).nonzero().squeeze(-1)
    view_ids, point_ids, radii, conics, features = (t[real] for t in (view_ids, point_ids, radii, conics, features))
    alive = (radii > 0).all(-1)
    drawn = torch.unique(point_ids[alive].long())
    if last is not None and table is not None and steps is not None:
        if int(steps) >= MOST_STEPS and not stands_still(scalars):
            raise ValueError(f"{MOST_STEPS} steps have been deferred: call splat_flush before the next.")
        write_caught_up(params, exp_avgs, exp_avg_sqs, drawn, last, table)
    v_means2d, v_conics, v_opacities, v_colors, v_depths, v_absolute, _ = records[real].split([2, 3, 1, 3, 1, 2, 4], 1)
    v_depths = v_depths if depth else torch.zeros_like(v_depths)
    v_colors = torch.where(alive[:, None] & (features > 0), v_colors, 0.0)

    with torch.enable_grad():
        leaves = [x.detach().requires_grad_() for x in (*params, viewmats)]
        means, quats, log_scales, logits, sh_dc, sh_rest, poses = leaves
        scales, opacities = log_scales.exp(), _sigmoid(logits)
        cameras = (poses, Ks, sizes, view_ids, point_ids)
        out = project(means, quats, scales, opacities, *cameras, eps2d, near, far, antialiased)
        colors = _colors(degree, means, poses, sh_dc, sh_rest, view_ids, point_ids)
        outputs = [out.means2d, out.conics, out.depths, out.row_opacities, colors]
        incoming = [v_means2d, v_conics, v_depths[:, 0], v_opacities[:, 0], v_colors]
        weighted = point_ids[alive].long()
        outputs += [opacities[weighted].sum(), scales[weighted].sum()]
        incoming += [means.new_tensor(opacity_weight), means.new_tensor(scale_weight)]
        if needles is not None:
            outputs.append((scales.amax(-1) / scales.amin(-1)).clamp(min=max_ratio).sum())
            incoming.append(needles[0])
        *gradients, by_poses = torch.autograd.grad(outputs, leaves, incoming, allow_unused=True, materialize_grads=True)

    with torch.no_grad():
        if v_viewmats is not None:
            v_viewmats.copy_(by_poses)
        firsts = [gradients[0] * mean_step(params[2], whole_step_scale), *gradients[1:]]
        if last is not None:
            for i, gradient in enumerate(gradients):
                p, m, v = params[i][drawn], exp_avgs[i][drawn], exp_avg_sqs[i][drawn]
                adam_step_torch([p], [gradient[drawn]], [m], [v], scalars[i : i + 1], False, [firsts[i][drawn]])
                params[i][drawn], exp_avgs[i][drawn], exp_avg_sqs[i][drawn] = p, m, v
        else:
            adam_step_torch(params, gradients, exp_avgs, exp_avg_sqs, scalars, False, firsts)
        if last is not None and table is not None and steps is not None:
            if not stands_still(scalars):
                extend(table, steps, scalars)
            last[drawn] = steps.to(last.dtype)
        gradients = v_absolute if absgrad else v_means2d
        _count(gradients, view_ids, point_ids, radii[:, 0], conics, sizes, grad2d, seen, radii_max)


def _count(
    gradients: Tensor, view_ids: Tensor, point_ids: Tensor, radii: Tensor, conics: Tensor, sizes: list[int],
    grad2d: Tensor, seen: Tensor, radii_max: Tensor,
) -> None:  # fmt: skip
    """Add the rows to the densification's statistics, of which those that are empty are not wanted."""
    size = gradients.new_tensor(sizes).view(-1, 2)
    view, point = view_ids.long(), point_ids.long()
    drawn, counts = radii > 0, radii != 0
    if grad2d.numel() > 0:
        scaled = gradients[drawn] * (size[view[drawn]] / 2) * len(size)
        grad2d.index_add_(0, point[drawn], scaled.norm(dim=-1))
    if seen.numel() > 0:
        seen.index_add_(0, point[counts], torch.ones_like(point[counts], dtype=seen.dtype))
    if radii_max.numel() > 0:
        radius = torch.where(drawn, three_sigma_radii(conics), -radii) / size.amax(-1)[view]
        radii_max.scatter_reduce_(0, point[counts], radius[counts], "amax")
