"""Lists, fakes and gradients of primitives other than 3D Gaussians: `project_<name>`, `rasterize_<name>`.

Their kernels are one set of templates for all of them: `csrc/cpu/raster/primitives.cpp` and
`csrc/cuda/common/primitive.h`.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from cuda_ext.dispatch.library import LIBRARY, NAMESPACE, fake
from cuda_ext.ops.raster.rasterization import _pixel_count, intersect, raster_state_size


def box_lists(rows: Any, view_ids: Tensor, patches: Sequence[int], tile_size: int = 16) -> tuple[Tensor, Tensor]:
    """Return the lists of `intersect` for projected rows: for each tile the rows whose box of `radii` contains one of
    its pixel centres."""
    means2d, opacities, depths = rows.means2d.detach(), rows.row_opacities.detach(), rows.depths.detach()
    everywhere = depths.new_zeros(len(depths), 3)  # a conic without a bound: the box alone decides
    return intersect(means2d, everywhere, opacities, rows.radii, depths, view_ids, patches, tile_size)


def register(name: str, *, points: int, projected: Sequence[int], extra: int, quads: int) -> None:
    """Register fakes and gradients of `project_<name>`, `rasterize_<name>` and their backward operators.

    Args:
        points: number of a point's columns, the first inputs of `project_<name>`.
        projected: widths of a row's float columns, the first outputs of it; 1 for a column [M].
        extra: numbers of a pixel besides its colour; 1 for an image [P].
        quads: float4 of a packed row on CUDA (`kPackedQuads`).
    """
    columns = len(projected) + 1
    """Of the rows that `rasterize_<name>` takes: `projected`'s and colours."""

    def project_fake(*inputs: Any) -> tuple[Tensor, ...]:
        rows, like = inputs[points + 3].shape[0], inputs[0]
        floats = (like.new_empty((rows, width) if width > 1 else (rows,)) for width in projected)
        return (*floats, like.new_empty((rows, 2), dtype=torch.int32))

    def project_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        *floats, sizes, view_ids, point_ids, near, far = inputs
        ctx.save_for_backward(*floats, view_ids, point_ids, output[-1])
        ctx.rest = sizes, near, far
        ctx.mark_non_differentiable(output[-1])

    def project_grad(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        *floats, view_ids, point_ids, radii = ctx.saved_tensors
        sizes, near, far = ctx.rest
        backward = getattr(torch.ops.ns_multigpu, f"project_{name}_backward")
        found = backward(*floats, sizes, view_ids, point_ids, near, far, radii, *grads[:-1])
        return (*found, *[None] * 6)

    def rasterize_fake(*inputs: Any) -> tuple[Tensor, ...]:
        *_, row_ids, patches, tile_size = inputs
        pixels, like = _pixel_count(patches), inputs[0]
        state = raster_state_size(like, row_ids, patches, tile_size, quads, 3 + extra)
        shapes = ((pixels, 3), (pixels, extra) if extra > 1 else (pixels,), (pixels,))
        floats = (like.new_empty(shape) for shape in shapes)
        return (*floats, like.new_empty(pixels, dtype=torch.int32), like.new_empty(state))

    def rasterize_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.save_for_backward(*inputs[: columns + 2], *output)
        ctx.rest = inputs[columns + 2 :]
        ctx.mark_non_differentiable(*output[3:])

    def rasterize_grad(ctx: Any, v_color: Tensor, v_extra: Tensor, v_alpha: Tensor, *_: Any) -> tuple[Any, ...]:
        *inputs, out, more, alpha, last, state = ctx.saved_tensors
        v_covered = torch.where(alpha < 0, -v_alpha, v_alpha)  # the operator takes the gradient by what is covered
        backward = getattr(torch.ops.ns_multigpu, f"rasterize_{name}_backward")
        found = backward(*inputs, *ctx.rest, out, more, alpha, last, state, v_color, v_extra, v_covered)
        return (*found, *[None] * 4)

    fake(f"project_{name}")(project_fake)
    fake(f"rasterize_{name}")(rasterize_fake)
    for operator, grad, setup in (
        ("project", project_grad, project_setup),
        ("rasterize", rasterize_grad, rasterize_setup),
    ):
        torch.library.register_autograd(f"{NAMESPACE}::{operator}_{name}", grad, setup_context=setup, lib=LIBRARY)
