"""Corrections of cameras' poses: six numbers a training view (a shift, then a rotation vector), as nerfstudio's camera
optimizer has them.

A correction is a rotation R and a shift t of the world. A camera with the axes C and the centre o gets the axes R C and
the centre o + t. Its world-to-camera matrix (A | b) becomes (A R^T | A R^T (A^T b - t)).

Shapes: B views, N corrections. `viewmats` [B, 4, 4] are uncorrected world-to-camera matrices, and `indices` [B] float32
the views' corrections. On CUDA each function is one launch, which a CUDA graph can hold.
"""

from typing import Any, Literal

import torch
from torch import Tensor

from cuda_ext.dispatch.library import LIBRARY
from cuda_ext.dispatch.load import kernels_serve
from cuda_ext.ops.common.checks import check_floats
from cuda_ext.reference.poses import corrected

Mode = Literal["SO3xR3", "SE3"]
"""Map from six numbers to a rotation and a shift: nerfstudio's `exp_map_SO3xR3` or `exp_map_SE3`."""


@torch.no_grad()
def correct_views(viewmats: Tensor, corrections: Tensor, indices: Tensor, mode: Mode, out: Tensor) -> None:
    """Write the corrected matrices [B, 4, 4] to `out`.

    Raises:
        TypeError, ValueError: a tensor of the wrong dtype, device or shape.
    """
    _check(viewmats, corrections, indices, out=(out, viewmats.shape))
    op: Any = torch.ops.ns_multigpu.correct_views if kernels_serve(viewmats) else _correct_views_composed
    op(viewmats, corrections, indices, mode == "SE3", out)


@torch.no_grad()
def correction_gradients(
    viewmats: Tensor, corrections: Tensor, indices: Tensor, mode: Mode, v_viewmats: Tensor,
    penalties: tuple[float, float],
) -> Tensor:  # fmt: skip
    """Return the loss's gradient [N, 6] by the corrections. A view may be in a batch twice.

    Args:
        v_viewmats: [R, B, 4, 4] gradients by the corrected matrices, to be summed over R.
        penalties: weights in the loss of the mean length of shifts, and of rotation vectors.

    Raises:
        TypeError, ValueError: a tensor of the wrong dtype, device or shape.
    """
    _check(viewmats, corrections, indices, v_viewmats=(v_viewmats, (-1, *viewmats.shape)))
    op: Any = torch.ops.ns_multigpu.correction_gradients if kernels_serve(viewmats) else _correction_gradients_composed
    return op(viewmats, corrections, indices, mode == "SE3", v_viewmats, *penalties)  # type: ignore[no-any-return]


def _check(viewmats: Tensor, corrections: Tensor, indices: Tensor, **more: Any) -> None:
    views = len(viewmats)
    wanted = {"viewmats": (viewmats, (views, 4, 4)), "corrections": (corrections, (-1, 6))}
    check_floats(viewmats, **wanted, indices=(indices, (views,)), **more)


@torch.no_grad()
def _correct_views_composed(viewmats: Tensor, corrections: Tensor, indices: Tensor, se3: bool, out: Tensor) -> None:
    rotation, translation = corrected(viewmats, corrections.index_select(0, indices.long()), se3)
    out.copy_(viewmats)
    out[:, :3, :3] = rotation
    out[:, :3, 3] = translation


@torch.no_grad()
def _correction_gradients_composed(
    viewmats: Tensor, corrections: Tensor, indices: Tensor, se3: bool, v_viewmats: Tensor, shift_penalty: float,
    turn_penalty: float,
) -> Tensor:  # fmt: skip
    which, total = indices.long(), v_viewmats.sum(0)
    with torch.enable_grad():
        used = corrections.index_select(0, which).detach().requires_grad_()
        found = corrected(viewmats, used, se3)
        (by_view,) = torch.autograd.grad(found, used, (total[:, :3, :3], total[:, :3, 3]))
    # Each of a view's places in the batch gets the same sum, so any may be copied.
    same = (which[:, None] == which).to(by_view.dtype)
    gradient = torch.cat(
        [
            _of_length(part, weight)
            for part, weight in zip(corrections.split(3, 1), (shift_penalty, turn_penalty), strict=True)
        ],
        1,
    )
    sums = gradient.index_select(0, which) + (same[:, :, None] * by_view).sum(1)
    return gradient.index_copy_(0, which, sums)


def _of_length(vectors: Tensor, weight: float) -> Tensor:
    """Return the gradient [N, 3] of `weight` times the mean length of vectors; zero where one is zero."""
    length = vectors.norm(dim=1, keepdim=True)
    return torch.where(length > 0, vectors / length, 0.0) * (weight / len(vectors))


LIBRARY.impl("correct_views", _correct_views_composed, "CPU")
LIBRARY.impl("correction_gradients", _correction_gradients_composed, "CPU")
