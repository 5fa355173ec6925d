"""From 4D Gaussians to the 3D Gaussians of a moment: `condition`; and from those to splats: `project_axes`.

Words, shapes and units: `cuda_ext.ops.project.projection`. Rows are not padded here.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cuda_ext.dispatch.library import LIBRARY, fake
from cuda_ext.dispatch.load import compiled_serves
from cuda_ext.ops.common.checks import check_cameras, check_floats, check_rows
from cuda_ext.ops.project.projection import Projection
from cuda_ext.reference import conditioning as reference
from cuda_ext.reference import projection as projection_reference


class Moment(NamedTuple):
    """3D Gaussians of the rows: their 4D Gaussians conditioned on the views' times.

    Attributes:
        means: [M, 3] world coordinates.
        axes: [M, 3, 3] factors of the covariances: A A^T, in squared world units. Their columns are not perpendicular.
        opacities: [M] times what is there of the point at that time.
    """

    means: Tensor
    axes: Tensor
    opacities: Tensor


def condition(
    means: Tensor,
    times: Tensor,
    left: Tensor,
    motions: Tensor,
    scales: Tensor,
    opacities: Tensor,
    view_times: Tensor,
    view_ids: Tensor,
    point_ids: Tensor,
) -> Moment:
    """Condition 4D Gaussians on their views' times (Yang et al. 2024, "Real-time Photorealistic Dynamic Scene
    Representation and Rendering with 4D Gaussian Splatting", equations 6 to 8).

    A point's covariance over (t, x, y, z) is M M^T, M = R diag(scales), where R makes of a quaternion v the product
    left v conj(right), and right is left times motion. With the row m of M that belongs to time, and the others N: the
    mean is N m (t - time) / |m|^2 away from the point's, the covariance N (I - m m^T / |m|^2) N^T, and the opacity is
    multiplied by exp(-(t - time)^2 / (2 |m|^2)). The covariance comes as a factor, N times three perpendicular vectors
    that are perpendicular to m (those of the Householder reflection of m), so that nothing cancels.

    Where the motion is (1, 0, 0, 0) the point does not move: it is the 3D Gaussian of the rotation `left` and of the
    last three scales. So `left` turns a point in space, whatever its motion. Had each of two quaternions a learning
    rate of its own, any step of either would move the point.

    Differentiable with respect to all points' parameters.

    Args:
        means: [N, 3] world coordinates at `times`.
        times: [N], in the unit of `view_times`.
        left, motions: [N, 4] quaternions (w, x, y, z) of any length but zero.
        scales: [N, 4] standard deviations along the point's four axes, above 0: time's own, then three in world units.
        opacities: [N].
        view_times: [V].
        view_ids: [M] int32.
        point_ids: [M] int32.

    Raises:
        TypeError, ValueError, IndexError: as `project`.
        NativeBuildError: the operators cannot be compiled.
    """
    points = means.shape[0]
    check_floats(
        means,
        means=(means, (-1, 3)),
        times=(times, (points,)),
        left=(left, (points, 4)),
        motions=(motions, (points, 4)),
        scales=(scales, (points, 4)),
        opacities=(opacities, (points,)),
        view_times=(view_times, (-1,)),
    )
    check_rows(means, view_ids, point_ids)
    op = torch.ops.ns_multigpu.condition if compiled_serves(means) else reference.condition
    return Moment(*op(means, times, left, motions, scales, opacities, view_times, view_ids, point_ids))


def project_axes(
    means: Tensor,
    axes: Tensor,
    opacities: Tensor,
    viewmats: Tensor,
    Ks: Tensor,
    sizes: Sequence[int],
    view_ids: Tensor,
    eps2d: float = 0.3,
    near: float = 0.01,
    far: float = 1e10,
    antialiased: bool = False,
) -> Projection:
    """Return `project`, for rows that each have a Gaussian of their own, by a factor of its covariance.

    Differentiable with respect to `means`, `axes`, `opacities` and `viewmats`.

    Args:
        means: [M, 3] world coordinates.
        axes: [M, 3, 3] A of the covariance A A^T, world units.
        opacities: [M].
        view_ids: [M] int32, ascending.
        viewmats, Ks, sizes, eps2d, near, far, antialiased: see `project`.

    Returns:
        One `Projection` with a line for each row.

    Raises:
        TypeError, ValueError, IndexError: as `project`.
        NativeBuildError: the operators cannot be compiled.
    """
    rows = means.shape[0]
    check_floats(
        means,
        means=(means, (-1, 3)),
        axes=(axes, (rows, 3, 3)),
        opacities=(opacities, (rows,)),
    )
    check_rows(means, view_ids, view_ids)
    sizes = check_cameras(means, viewmats, Ks, sizes, near, far)
    op = torch.ops.ns_multigpu.project_axes if compiled_serves(means) else projection_reference.project_axes
    return Projection(*op(means, axes, opacities, viewmats, Ks, sizes, view_ids, eps2d, near, far, antialiased))


@fake("condition")
def _condition_fake(means: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    rows = rest[-1].shape[0]
    return tuple(means.new_empty(shape) for shape in ((rows, 3), (rows, 3, 3), (rows,)))


@fake("project_axes")
def _axes_fake(means: Tensor, *_: Any) -> tuple[Tensor, ...]:
    rows = means.shape[0]
    floats = tuple(means.new_empty(shape) for shape in ((rows, 2), (rows, 3), (rows,), (rows,)))
    return (*floats, means.new_empty((rows, 2), dtype=torch.int32))


def _condition_setup(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs)


def _condition_grad(ctx: Any, *given: Tensor) -> tuple[Tensor | None, ...]:
    return (*torch.ops.ns_multigpu.condition_backward(*ctx.saved_tensors, *given), None, None, None)


def _axes_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs[:5], inputs[6], output[4])
    ctx.sizes, ctx.settings = inputs[5], inputs[7:]


def _axes_grad(
    ctx: Any, v_means2d: Tensor, v_conics: Tensor, v_depths: Tensor, v_row_opacities: Tensor, _: Any
) -> tuple[Tensor | None, ...]:
    *rows_and_cameras, view_ids, radii = ctx.saved_tensors
    gradients = torch.ops.ns_multigpu.project_axes_backward(
        *rows_and_cameras, ctx.sizes, view_ids, *ctx.settings, radii, v_means2d, v_conics, v_depths, v_row_opacities
    )
    return (*gradients, *[None] * 7)


for _name, _grad, _setup in (
    ("condition", _condition_grad, _condition_setup), ("project_axes", _axes_grad, _axes_setup)
):  # fmt: skip
    torch.library.register_autograd(f"ns_multigpu::{_name}", _grad, setup_context=_setup, lib=LIBRARY)
