"""The fused way of one owner: from raw parameters to splats (`splat_forward`), and from the gradients of splats to
parameters that have taken a step of Adam (`splat_update`), with no gradient of a parameter in memory in between.

Words and shapes as in `projection.py`, but for the parameters, which are what an optimizer sees: log-scales and
logits of the opacities. Where our CUDA kernels do not serve (on CPU, or with the reference),
the same is put together from the other operators.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cuda_ext.dispatch.library import LIBRARY
from cuda_ext.ops.common.checks import check_depth_range, check_floats, check_ints, check_rows, intrinsics_shape
from cuda_ext.ops.exchange.row_exchange import RECORD_FLOATS
from cuda_ext.ops.optim.adam import SCALARS, kernels_serve
from cuda_ext.ops.optim.fused_composed import PLAIN_COLOR, splat_forward_composed, splat_update_composed
from cuda_ext.ops.optim.lazy_adam import LazyAdam, check_parameters
from cuda_ext.ops.project.boxes import check_boxes
from cuda_ext.reference.lazy_adam import PARAMETERS


class SplatRows(NamedTuple):
    """The rows of a batch of whole views, in (view, point) order, padded to M = capacity lines.

    Attributes:
        view_ids: [M] int32; of padding the last view.
        point_ids: [M] int32; of padding -1.
        count: [1] int64, the rows that there are. If it exceeds the capacity the rows beyond are missing, and the step
            has to be done again with more.
        means2d: [M, 2] pixels; zero, as all that follows, where a row is dead or padding.
        conics: [M, 3] inverse covariance (xx, xy, yy) in 1/pixels^2.
        opacities: [M], with the antialiasing compensation if asked for.
        features: [M, 3] RGB.
        depths: [M] world units.
        radii: [M, 2] int32 half extents in pixels; not positive where a row is not drawn: see `Projection`.
    """

    view_ids: Tensor
    point_ids: Tensor
    count: Tensor
    means2d: Tensor
    conics: Tensor
    opacities: Tensor
    features: Tensor
    depths: Tensor
    radii: Tensor


@torch.no_grad()
def splat_forward(
    means: Tensor,
    quats: Tensor,
    log_scales: Tensor,
    logits: Tensor,
    sh_dc: Tensor,
    sh_rest: Tensor,
    viewmats: Tensor,
    Ks: Tensor,
    sizes: Sequence[int],
    degree: int | None,
    capacity: int,
    eps2d: float = 0.3,
    near: float = 0.01,
    far: float = 1e10,
    antialiased: bool = False,
    exp_avgs: Sequence[Tensor] = (),
    exp_avg_sqs: Sequence[Tensor] = (),
    lazy: LazyAdam | None = None,
    boxes: Tensor | None = None,
) -> SplatRows:
    """Cull against whole views, project and evaluate colours: `cull`, `project` and `sh_colors` at once.

    On CUDA nothing is read back, so it can be captured in a CUDA graph. At most 128 views, or 96 with lenses. Not
    differentiable: its backward pass is `splat_update`.

    Args:
        means: [N, 3] world coordinates.
        quats: [N, 4] (w, x, y, z) of any length but zero.
        log_scales: [N, 3] natural logarithms.
        logits: [N] of the opacities.
        sh_dc: [N, 3]. sh_rest: [N, R, 3], (degree + 1)^2 - 1 <= R <= 15.
        viewmats: [V, 4, 4]. Ks: [V, 3, 3] or [V, 7, 3]. sizes: (width, height) of each view, 2 V ints.
        degree: 0 to 3, the harmonics in use; None for plain colours, of which `sh_dc` are the logits.
        capacity: lines of the result.
        eps2d, near, far, antialiased: see `project`.
        exp_avgs, exp_avg_sqs, lazy: the parameters' moments (see `splat_update`), and the deferred steps. Rows
            are then those of the points where these steps lead them; nothing is written. On CUDA more rows than
            necessary may come out, dead ones, for where a point may have come to is known only within bounds; those
            hold for moments that Adam made, with one pair of betas.
        boxes: of the points' groups, as `splat_boxes` made them and `splat_update` widened them since: points are
            looked at only for views in which their group's box may show. Rows are the same, if with `lazy` moments are
            such as Adam makes (see there).

    Raises:
        TypeError, ValueError: an argument of the wrong dtype, device or shape, or out of range.
        NativeBuildError: the operators cannot be compiled.
    """
    points, views = means.shape[0], viewmats.shape[0]
    check_floats(
        means,
        means=(means, (-1, 3)),
        quats=(quats, (points, 4)),
        log_scales=(log_scales, (points, 3)),
        logits=(logits, (points,)),
        sh_dc=(sh_dc, (points, 3)),
        sh_rest=(sh_rest, (points, -1, 3)),
        viewmats=(viewmats, (-1, 4, 4)),
        Ks=(Ks, intrinsics_shape(Ks, views)),
    )
    check_depth_range(near, far)
    sizes = check_ints("sizes", sizes, 2, views, "view")
    if capacity < 0:
        raise ValueError(f"capacity must not be negative, as {capacity} is.")
    ops = torch.ops.ns_multigpu
    parameters = [t.detach() for t in (means, quats, log_scales, logits, sh_dc, sh_rest)]
    cameras = (viewmats.detach(), Ks, sizes)
    missed: tuple[Any, ...] = ()
    if lazy is not None:
        check_parameters(parameters, exp_avgs, exp_avg_sqs)
        lazy.check(means)
        moments = ([t.detach() for t in tensors] for tensors in (exp_avgs, exp_avg_sqs))
        missed = (*moments, lazy.last, lazy.table, lazy.steps)
    if boxes is not None:
        check_boxes(means, boxes)
    inputs = (*parameters, *cameras, _number(degree), eps2d, near, far, antialiased, capacity)
    op: Any = ops.splat_forward if lazy is None else ops.splat_forward_lazy
    if not kernels_serve(means):
        op = splat_forward_composed
    return SplatRows(*op(*inputs, *missed, boxes=boxes))


@torch.no_grad()
def splat_update(
    params: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    scalars: Tensor,
    viewmats: Tensor,
    Ks: Tensor,
    sizes: Sequence[int],
    rows: SplatRows,
    records: Tensor,
    degree: int | None,
    eps2d: float = 0.3,
    near: float = 0.01,
    far: float = 1e10,
    antialiased: bool = False,
    grad2d: Tensor | None = None,
    seen: Tensor | None = None,
    radii_max: Tensor | None = None,
    absgrad: bool = False,
    depth: bool = False,
    opacity_weight: float = 0.0,
    scale_weight: float = 0.0,
    lazy: LazyAdam | None = None,
    finite_flag: Tensor | None = None,
    finite_flag_views: range | None = None,
    boxes: Tensor | None = None,
    v_viewmats: Tensor | None = None,
    needles: Tensor | None = None,
    max_ratio: float = 1.0,
    whole_step_scale: float = 0.0,
) -> None:
    """Propagate the rows' gradients to the parameters and apply Adam's step, all in place.

    Adam is dense: points without rows take the step of a gradient of zero, by which their moments decay and they move
    on.

    Moments may be compact, all of them as bfloat16: 944 bytes a point instead of 1416. The arithmetic is float32's, and
    what is written is rounded up or down at random, so that its expected value is the exact one; a number that bfloat16
    holds, such as any moment that a step leaves alone, stays what it is. The same model, gradients and scalars give the
    same bits, whatever row, thread or rank a point is in (cuda_ext/csrc/common/compact.h says why, and how).

    Densification's statistics are added to as `ReplicatedDensifier` does: for each row that is drawn, `grad2d` gets the
    length of the gradient of means2d in units of half an image, times the number of views (the loss being their mean).
    For each row that is drawn or has a negative radius, `seen` gets 1, and `radii_max` becomes the largest radius of
    the 3-sigma circle, a fraction of the image's longer side.

    Args:
        params: the six parameters in the order of `PARAMETERS`, shapes as in `splat_forward`.
        exp_avgs, exp_avg_sqs: their moments, of the parameters' dtype, or all of them bfloat16 where that is float32.
        scalars: [6, 8] of Adam: a line of `adam_scalars` for each parameter.
        viewmats, Ks, sizes, degree, eps2d, near, far, antialiased: those of `splat_forward`.
        rows: what `splat_forward` returned; or what it returned to S callers, one after the other, each with as many of
            the views and as many lines, and view ids that count all views. `count` then holds S numbers.
        records: [M, 16] the rows' gradients, as `rasterize_backward_into` sums them up: means2d x, y, conics xx, xy,
            yy, opacity, red, green, blue, depth, absolute x, y, and 4 that are not looked at.
        grad2d, seen, radii_max: [N] each, or None to leave out.
        absgrad: `grad2d` counts the absolute gradients instead of those of means2d.
        depth: whether the depth's gradient counts.
        opacity_weight, scale_weight: the loss also holds this times the opacity, and the sum of the scales, of the
            point of each row that is drawn (MCMC's regularisation).
        lazy: defer the steps of points that are not drawn (see `lazy_adam.py`, also for which options of Adam):
            1416 bytes (944) of each such point are then neither read nor written. Those of points that are drawn are
            taken.
        finite_flag: [1], an output: 0 if the gradients of all rows that are drawn are finite, else NaN. Costs next to
            nothing, since the gradients are read here anyhow; a separate check would read them all again.
        finite_flag_views: the views whose rows `finite_flag` covers, a range; all unless given.
        boxes: of the points' groups, see `splat_boxes`: widened where points leave them.
        v_viewmats: [V, 4, 4], an output: the gradient by `viewmats`. The same rows give the same bits.
        needles: [1], the loss also holds this times what the ratio of the largest to the smallest scale exceeds
            `max_ratio` by, of every point, drawn or not (PhysGaussian's regularisation). Not with `lazy`.
        whole_step_scale: means of points whose middle scale is less take a part of Adam's step, its ratio to this:
            their gradients enter the first moment times this ratio, and the second one whole.

    Raises:
        TypeError, ValueError: an argument of the wrong dtype, device or shape.
        NativeBuildError: the operators cannot be compiled.
    """
    means = params[0]
    views, count = viewmats.shape[0], rows.point_ids.shape[0]
    check_parameters(params, exp_avgs, exp_avg_sqs)
    check_floats(
        means,
        scalars=(scalars, (len(PARAMETERS), SCALARS)),
        viewmats=(viewmats, (-1, 4, 4)),
        Ks=(Ks, intrinsics_shape(Ks, views)),
        features=(rows.features, (count, 3)),
        records=(records, (count, RECORD_FLOATS)),
    )
    check_rows(means, rows.view_ids, rows.point_ids)
    check_depth_range(near, far)
    sizes = check_ints("sizes", sizes, 2, views, "view")
    missed: tuple[Tensor | None, ...] = (None, None, None)
    if lazy is not None:
        lazy.check(means)
        missed = (lazy.last, lazy.table, lazy.steps)
    if finite_flag is not None:
        check_floats(means, finite_flag=(finite_flag, (1,)))
    if boxes is not None:
        check_boxes(means, boxes)
    if v_viewmats is not None:
        check_floats(means, v_viewmats=(v_viewmats, (views, 4, 4)))
    if needles is not None:
        check_floats(means, needles=(needles, (1,)))
        if lazy is not None:
            raise ValueError("needles are of all points, and lazy steps leave out those that are not drawn.")
    shown = [] if finite_flag_views is None else [finite_flag_views.start, finite_flag_views.stop]
    statistics = [means.new_empty(0) if t is None else t for t in (grad2d, seen, radii_max)]
    op: Any = torch.ops.ns_multigpu.splat_update if kernels_serve(means) else splat_update_composed
    op(
        *([t.detach() for t in tensors] for tensors in (params, exp_avgs, exp_avg_sqs)), scalars, viewmats.detach(), Ks,
        sizes, rows.view_ids, rows.point_ids, rows.count, rows.conics, rows.features, rows.radii, records, *statistics,
        _number(degree), eps2d, near, far, antialiased, absgrad, depth, opacity_weight, scale_weight, *missed,
        finite_flag, shown, boxes, v_viewmats, needles, max_ratio, whole_step_scale,
    )  # fmt: skip


def _number(degree: int | None) -> int:
    """Return a degree as the operators take it."""
    return PLAIN_COLOR if degree is None else degree


LIBRARY.impl("splat_forward", splat_forward_composed, "CPU")
LIBRARY.impl("splat_forward_lazy", splat_forward_composed, "CPU")
LIBRARY.impl("splat_update", splat_update_composed, "CPU")
