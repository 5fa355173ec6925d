"""`cull`, `project` and `sh_colors` on CUDA through gsplat 1.4.0's kernels: what NS_MULTIGPU_CUDA=gsplat asks for.

gsplat's kernels take a grid of all points by all views; we have a list of rows. So each view's points are gathered and
handed over as a batch of one view, which also lets views differ in size. Within a view every point appears once, so
scattering the gradients back is deterministic; gsplat's sums for the view matrices are not (atomics).

One thing differs from the CPU twin: gsplat launches the spherical harmonics on CUDA's default stream, so call these
operators from there (torch's default).
"""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.library import Library

from cuda_ext.dispatch.gsplat_kernels import gsplat_kernels, in_gsplat_mode
from cuda_ext.reference import projection as reference
from cuda_ext.reference.projection import is_lens


@in_gsplat_mode
def _register(library: Library) -> None:
    """Register these functions for the CUDA dispatch key."""
    library.impl("cull", reference.cull, "CUDA")
    library.impl("project", _project, "CUDA")
    library.impl("project_backward", _project_backward, "CUDA")
    library.impl("sh_colors", _sh_colors, "CUDA")
    library.impl("sh_colors_backward", _sh_colors_backward, "CUDA")


def check_float32(tensor: Tensor) -> None:
    """Raise TypeError for numbers that gsplat's kernels do not take."""
    if tensor.dtype != torch.float32:
        raise TypeError(f"On CUDA the operators work in float32, not {tensor.dtype}: gsplat's kernels know no other.")


def _ids(point_ids: Tensor) -> Tensor:
    """Return point ids as indices. Padding's -1 becomes the first point: the caller must discard such rows."""
    return point_ids.long().clamp_min(0)


def _views(view_ids: Tensor, views: int) -> Iterator[tuple[int, slice]]:
    """Yield each view that has rows, with the slice of its rows. Waits for the device unless there is only one view."""
    if views == 1:
        ends = [view_ids.shape[0]]
    else:
        bounds = torch.arange(views, dtype=view_ids.dtype, device=view_ids.device)
        ends = torch.searchsorted(view_ids, bounds, right=True).tolist()
    for view, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
        if end > start:
            yield view, slice(start, end)


def _forward(
    points: tuple[Tensor, Tensor, Tensor],
    viewmat: Tensor,
    K: Tensor,
    size: list[int],
    settings: tuple[float, float, float, bool],
) -> tuple[Tensor, ...]:
    """Return gsplat's projection of m gathered points (means, quats, scales) into one view.

    Returns:
        radii [m] of gsplat's kind, means2d [m, 2], depths [m], conics [m, 3], compensations [m] (1 unless antialiased).
        Only radii and compensations are defined where radii is 0.
    """
    if is_lens(K[None]):
        raise ValueError("gsplat's kernels have pinhole cameras only: leave NS_MULTIGPU_CUDA out for lenses.")
    kernels = gsplat_kernels()
    means, quats, scales = points
    eps2d, near, far, antialiased = settings
    radii, means2d, depths, conics, compensations = kernels.fully_fused_projection_fwd(
        means, None, quats, scales, viewmat[None].contiguous(), K[None].contiguous(), *size,
        eps2d, near, far, 0.0, antialiased, kernels.CameraModelType.PINHOLE,
    )  # fmt: skip
    if not antialiased:
        compensations = torch.ones_like(depths)
    return radii[0], means2d[0], depths[0], conics[0], compensations[0]


def _half_extents(conics: Tensor, radii: Tensor, cutoff_squared: Tensor) -> Tensor:
    """Return half extents [m, 2] in pixels at which alpha falls to 1/255, from conics [m, 3] and gsplat's 3-sigma radii
    [m].

    Inverting a thin splat's conic cancels, so it is done in double precision. It is also bounded by gsplat's radius,
    which comes from the largest eigenvalue and does not cancel.
    """
    a, b, c = conics.double().unbind(-1)
    det = a * c - b * b
    variances = torch.stack([c, a], dim=-1) / det[:, None]
    bound = (radii.double() / 3).square()[:, None].expand_as(variances)
    variances = torch.where((det > 0)[:, None], torch.minimum(variances, bound), bound)
    return reference.outward(torch.sqrt(cutoff_squared.double()[:, None] * variances), reference.EXTENT_MARGIN)


def _project(
    means: Tensor, quats: Tensor, scales: Tensor, opacities: Tensor, viewmats: Tensor, Ks: Tensor, sizes: list[int],
    view_ids: Tensor, point_ids: Tensor, eps2d: float, near: float, far: float, antialiased: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    check_float32(means)
    rows = view_ids.shape[0]
    means2d, conics = means.new_zeros(rows, 2), means.new_zeros(rows, 3)
    depths, row_opacities = means.new_zeros(rows), means.new_zeros(rows)
    radii = torch.zeros(rows, 2, dtype=torch.int32, device=means.device)
    for view, part in _views(view_ids, viewmats.shape[0]):
        ids, size = _ids(point_ids[part]), sizes[2 * view : 2 * view + 2]
        points = (means[ids], quats[ids], scales[ids])
        square, at, depth, conic, compensation = _forward(
            points, viewmats[view], Ks[view], size, (eps2d, near, far, antialiased)
        )
        opacity = opacities[ids] * compensation
        alive = (square > 0) & (opacity >= reference.MIN_ALPHA) & (point_ids[part] >= 0)
        extent = _half_extents(conic, square, torch.where(alive, reference.cutoff_squared(opacity), 0.0)).to(
            means.dtype
        )
        alive &= ((at + extent > 0) & (at - extent < at.new_tensor(size))).all(-1)
        means2d[part] = torch.where(alive[:, None], at, 0.0)
        conics[part] = torch.where(alive[:, None], conic, 0.0)
        depths[part] = torch.where(alive, depth, 0.0)
        row_opacities[part] = torch.where(alive, opacity, 0.0)
        undrawn = torch.where(point_ids[part] >= 0, -square, 0)[:, None]
        radii[part] = torch.where(alive[:, None], extent.to(torch.int32), undrawn.to(torch.int32))
    return means2d, conics, depths, row_opacities, radii


def _project_backward(
    means: Tensor, quats: Tensor, scales: Tensor, opacities: Tensor, viewmats: Tensor, Ks: Tensor, sizes: list[int],
    view_ids: Tensor, point_ids: Tensor, eps2d: float, near: float, far: float, antialiased: bool,
    conics: Tensor, radii: Tensor, v_means2d: Tensor, v_conics: Tensor, v_depths: Tensor, v_row_opacities: Tensor,
) -> tuple[Tensor, ...]:  # fmt: skip
    check_float32(means)
    kernels = gsplat_kernels()
    sums = tuple(torch.zeros_like(tensor) for tensor in (means, quats, scales, opacities, viewmats))
    v_means, v_quats, v_scales, v_opacities, v_viewmats = sums
    for view, part in _views(view_ids, viewmats.shape[0]):
        ids, size = _ids(point_ids[part]), sizes[2 * view : 2 * view + 2]
        points = (means[ids], quats[ids], scales[ids])
        alive = radii[part, 0] > 0
        v_opacity = torch.where(alive, v_row_opacities[part], 0.0)
        compensations = v_compensations = None
        if antialiased:
            settings = (eps2d, near, far, True)
            compensations = _forward(points, viewmats[view], Ks[view], size, settings)[-1][None].contiguous()
            v_compensations = (v_opacity * opacities[ids])[None].contiguous()
            v_opacity = v_opacity * compensations[0]
        gradients = kernels.fully_fused_projection_bwd(
            points[0], None, points[1], points[2], viewmats[view : view + 1].contiguous(),
            Ks[view : view + 1].contiguous(), *size, eps2d, kernels.CameraModelType.PINHOLE,
            alive.to(torch.int32)[None].contiguous(), conics[part][None].contiguous(), compensations,
            v_means2d[part][None].contiguous(), v_depths[part][None].contiguous(),
            v_conics[part][None].contiguous(), v_compensations, True,
        )  # fmt: skip
        v_means.index_add_(0, ids, gradients[0])
        v_quats.index_add_(0, ids, gradients[2])
        v_scales.index_add_(0, ids, gradients[3])
        v_opacities.index_add_(0, ids, v_opacity)
        v_viewmats[view] = gradients[4][0]
    return sums


def _sh_rows(
    degree: int, means: Tensor, camera_centers: Tensor, sh_dc: Tensor, sh_rest: Tensor, view_ids: Tensor,
    point_ids: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return directions [M, 3] (not normalized), coefficients [M, (degree + 1)^2, 3], and a mask of nonzero ones."""
    check_float32(means)
    ids = _ids(point_ids)
    way = means[ids] - camera_centers[view_ids.long()]
    apart = (way != 0).any(-1, keepdim=True)  # gsplat divides by the length, whatever it is
    coefficients = torch.cat([sh_dc[ids, None], sh_rest[ids, : (degree + 1) ** 2 - 1]], dim=1)
    return torch.where(apart, way, 1.0).contiguous(), coefficients.contiguous(), apart


def _sh_colors(
    degree: int, means: Tensor, camera_centers: Tensor, sh_dc: Tensor, sh_rest: Tensor, view_ids: Tensor,
    point_ids: Tensor,
) -> Tensor:  # fmt: skip
    way, coefficients, _ = _sh_rows(degree, means, camera_centers, sh_dc, sh_rest, view_ids, point_ids)
    colors = torch.relu(gsplat_kernels().compute_sh_fwd(degree, way, coefficients, None) + 0.5)
    return torch.where(point_ids[:, None] >= 0, colors, 0.0)


def _sh_colors_backward(
    degree: int, means: Tensor, camera_centers: Tensor, sh_dc: Tensor, sh_rest: Tensor, view_ids: Tensor,
    point_ids: Tensor, colors: Tensor, v_colors: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    way, coefficients, apart = _sh_rows(degree, means, camera_centers, sh_dc, sh_rest, view_ids, point_ids)
    v_raw = torch.where(colors > 0, v_colors, 0.0).contiguous()
    bases = coefficients.shape[1]
    v_coefficients, v_way = gsplat_kernels().compute_sh_bwd(bases, degree, way, coefficients, None, v_raw, True)
    v_way = torch.where(apart, v_way, 0.0)
    v_means, v_centers = torch.zeros_like(means), torch.zeros_like(camera_centers)
    v_dc, v_rest = torch.zeros_like(sh_dc), torch.zeros_like(sh_rest)
    for view, part in _views(view_ids, camera_centers.shape[0]):
        ids = _ids(point_ids[part])
        v_means.index_add_(0, ids, v_way[part])
        v_centers[view] = -v_way[part].sum(0)
        v_dc.index_add_(0, ids, v_coefficients[part, 0])
        v_rest[:, : bases - 1].index_add_(0, ids, v_coefficients[part, 1:])
    return v_means, v_centers, v_dc, v_rest
