"""From rows to splats: `project` and `sh_colors`.

Words and shapes: N points, V views, M rows. A row is one (view, point) pair; rows are sorted by (view, point), and each
pair appears once. At the end there may be padding: rows of point -1 in the last view, which are dead. `splat_forward`
makes such rows.
`viewmats` [V, 4, 4] are rigid world-to-camera matrices with OpenCV axes (x right, y down, z ahead),
`Ks` [V, 3, 3] intrinsics in pixels (pinhole, no skew) or [V, 7, 3] with lenses (`lens.py`), `sizes` (width, height) of
each view in pixels, flat. The centre of the pixel in row i and column j lies at (j + 0.5, i + 0.5). `scales` are linear
and `opacities` in (0, 1), both after their activation. Ids are int32; floats are float32, or float64 on CPU.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cuda_ext.dispatch.library import LIBRARY, fake
from cuda_ext.dispatch.load import compiled_serves
from cuda_ext.ops.common.checks import check_cameras, check_floats, check_rows
from cuda_ext.reference import projection as reference


class Projection(NamedTuple):
    """Projected rows in the pixels of their views.

    Attributes:
        means2d: [M, 2] centre (x, y) in pixels.
        conics: [M, 3] inverse covariance (xx, xy, yy) in 1/pixels^2.
        depths: [M] camera-space z in world units; of a fisheye the ray's length.
        row_opacities: [M] opacity, with the antialiasing compensation if asked for.
        radii: [M, 2] int32. Of a row that is drawn, half extents (x, y) in pixels of the ellipse where alpha >= 1/255,
            rounded outward. Of one that is not, minus half the side of gsplat 1.4.0's square of 3 sigma where that
            touches the view: densification counts it as seen. Otherwise 0, and nothing is drawn.
    """

    means2d: Tensor
    conics: Tensor
    depths: Tensor
    row_opacities: Tensor
    radii: Tensor


def project(
    means: Tensor,
    quats: Tensor,
    scales: Tensor,
    opacities: Tensor,
    viewmats: Tensor,
    Ks: Tensor,
    sizes: Sequence[int],
    view_ids: Tensor,
    point_ids: Tensor,
    eps2d: float = 0.3,
    near: float = 0.01,
    far: float = 1e10,
    antialiased: bool = False,
) -> Projection:
    """Project points into views: EWA splatting as in 3D Gaussian splatting, with gsplat 1.4.0's conventions.

    The covariance is J W S W^T J^T + eps2d I (Zwicker et al. 2001, "EWA volume splatting", equation 31; Kerbl et al.
    2023, equation 5), J the Jacobian of the perspective division at the mean, with x/z and y/z clamped to the image and
    15 % of its size beyond each border. Of a camera with a lens J is the lens's. With `antialiased`, opacity is
    multiplied by sqrt(det / det with eps2d) (Yu et al. 2024, "Mip-Splatting", equation 9).

    A row that is not drawn in its whole view (depth outside [near, far], ray outside of the lens's angle, no invertible
    covariance, opacity below 1/255, box or square of 3 sigma outside the image, NaN) is dead: zero in all outputs but
    `radii`, and no gradient. Nothing depends on the patches rendered.

    Differentiable with respect to `means`, `quats`, `scales`, `opacities` and `viewmats`.

    Args:
        means: [N, 3] world coordinates.
        quats: [N, 4] rotations (w, x, y, z) of any length but zero.
        scales: [N, 3] standard deviations along the point's axes, world units.
        opacities: [N].
        viewmats: [V, 4, 4].
        Ks: [V, 3, 3], or [V, 7, 3] with lenses.
        sizes: (width, height) of each view, 2 V ints.
        view_ids: [M] int32.
        point_ids: [M] int32.
        eps2d: variance in pixels^2 added to every splat.
        near: least depth, world units, > 0.
        far: greatest depth.
        antialiased: whether thin splats are dimmed to make up for `eps2d`.

    Returns:
        One `Projection` with a line for each row.

    Raises:
        TypeError, ValueError, IndexError: an argument of the wrong dtype, device or shape, a wrong depth range, rows
            that are not sorted or that name what does not exist (on CPU).
        NativeBuildError: the operators cannot be compiled.
    """
    points = means.shape[0]
    check_floats(
        means,
        means=(means, (-1, 3)),
        quats=(quats, (points, 4)),
        scales=(scales, (points, 3)),
        opacities=(opacities, (points,)),
    )
    check_rows(means, view_ids, point_ids)
    sizes = check_cameras(means, viewmats, Ks, sizes, near, far)
    op = torch.ops.ns_multigpu.project if compiled_serves(means) else reference.project
    cameras = (viewmats, Ks, sizes)
    return Projection(
        *op(means, quats, scales, opacities, *cameras, view_ids, point_ids, eps2d, near, far, antialiased)
    )


def sh_colors(
    degree: int,
    means: Tensor,
    camera_centers: Tensor,
    sh_dc: Tensor,
    sh_rest: Tensor,
    view_ids: Tensor,
    point_ids: Tensor,
) -> Tensor:
    """Evaluate each row's colour: max(0, 0.5 + sum of spherical harmonics in the direction from camera to point).

    Real spherical harmonics with the signs of 3D Gaussian splatting (Kerbl et al. 2023), evaluated as polynomials
    (Sloan 2013, JCGT 2(2)). Differentiable with respect to all float arguments; no gradient where black clamps.

    Args:
        degree: 0 to 3, the degree in use.
        means: [N, 3] world coordinates.
        camera_centers: [V, 3] world coordinates.
        sh_dc: [N, 3] coefficients of degree 0.
        sh_rest: [N, R, 3] the others, R >= (degree + 1)^2 - 1; what `degree` does not use gets zero gradient.
        view_ids: [M] int32.
        point_ids: [M] int32.

    Returns:
        [M, 3] RGB, at least 0.

    Raises:
        TypeError, ValueError, IndexError: as `project`, or a degree out of range or not covered by `sh_rest`.
        NativeBuildError: the operators cannot be compiled.
    """
    points = means.shape[0]
    check_floats(
        means,
        means=(means, (-1, 3)),
        camera_centers=(camera_centers, (-1, 3)),
        sh_dc=(sh_dc, (points, 3)),
        sh_rest=(sh_rest, (points, -1, 3)),
    )
    check_rows(means, view_ids, point_ids)
    if not 0 <= degree <= 3:
        raise ValueError(f"degree must be 0, 1, 2 or 3, not {degree}.")
    bases = (degree + 1) ** 2 - 1
    if sh_rest.shape[1] < bases:
        raise ValueError(f"sh_rest must hold at least {bases} bases for degree {degree}, not {sh_rest.shape[1]}.")
    op = torch.ops.ns_multigpu.sh_colors if compiled_serves(means) else reference.sh_colors
    return op(degree, means, camera_centers, sh_dc, sh_rest, view_ids, point_ids)


def three_sigma_radii(conics: Tensor) -> Tensor:
    """Return half the sides in pixels of the 3-sigma squares around splats, as gsplat 1.4.0 computes its radii.

    3DGS's densification (Kerbl et al. 2023, section 5.2) calls that a point's size on screen.

    Args:
        conics: [M, 3] inverse covariances (xx, xy, yy) in 1/pixels^2.

    Returns:
        [M] whole numbers, of the conics' dtype; without meaning for the zeros of a row that is not drawn.
    """
    a, b, c = conics.unbind(-1)
    middle, determinant = 0.5 * (a + c), a * c - b * b
    # The largest eigenvalue is the inverse of the smallest of the inverse; that one, the small root, is had through the
    # large one: subtracting would cancel for long thin splats.
    apart = torch.maximum(middle * middle - determinant, 0.01 * determinant * determinant)
    largest = middle + apart.clamp(min=0.0).sqrt()
    smallest = determinant / largest.clamp(min=1e-12)
    return (3.0 * smallest.clamp(min=1e-12).rsqrt()).ceil()


@fake("project")
def _project_fake(
    means: Tensor, quats: Tensor, scales: Tensor, opacities: Tensor, viewmats: Tensor, Ks: Tensor, sizes: list[int],
    view_ids: Tensor, *_: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    rows = view_ids.shape[0]
    floats = tuple(means.new_empty(shape) for shape in ((rows, 2), (rows, 3), (rows,), (rows,)))
    return (*floats, means.new_empty((rows, 2), dtype=torch.int32))


def _project_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    tensors = (*inputs[:6], inputs[7], inputs[8], output[1], output[4])
    ctx.save_for_backward(*tensors)
    ctx.sizes = inputs[6]
    ctx.settings = inputs[9:]


def _project_grad(
    ctx: Any, v_means2d: Tensor, v_conics: Tensor, v_depths: Tensor, v_row_opacities: Tensor, _: Any
) -> tuple[Tensor | None, ...]:
    *points_and_cameras, view_ids, point_ids, conics, radii = ctx.saved_tensors
    gradients = torch.ops.ns_multigpu.project_backward(
        *points_and_cameras, ctx.sizes, view_ids, point_ids, *ctx.settings,
        conics, radii, v_means2d, v_conics, v_depths, v_row_opacities,
    )  # fmt: skip
    return (*gradients, *[None] * 8)


@fake("sh_colors")
def _sh_colors_fake(degree: int, means: Tensor, *rest: Any) -> Tensor:
    return means.new_empty((rest[-1].shape[0], 3))


def _sh_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.degree = inputs[0]
    ctx.save_for_backward(*inputs[1:], output)


def _sh_grad(ctx: Any, v_colors: Tensor) -> tuple[Tensor | None, ...]:
    gradients = torch.ops.ns_multigpu.sh_colors_backward(ctx.degree, *ctx.saved_tensors, v_colors)
    return (None, *gradients, None, None)


torch.library.register_autograd("ns_multigpu::project", _project_grad, setup_context=_project_setup, lib=LIBRARY)
torch.library.register_autograd("ns_multigpu::sh_colors", _sh_grad, setup_context=_sh_setup, lib=LIBRARY)
