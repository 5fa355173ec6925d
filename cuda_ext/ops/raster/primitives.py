"""Operators of primitives other than 3D Gaussians: `project_<name>`, `rasterize_<name>`, their lists and gradients.

Their kernels are one set of templates for all of them: `csrc/cpu/raster/primitives.cpp` and
`csrc/cuda/common/primitive.h`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from cuda_ext.dispatch.library import LIBRARY, NAMESPACE, fake
from cuda_ext.dispatch.load import compiled_serves
from cuda_ext.ops.common.checks import check_cameras, check_floats, check_rows
from cuda_ext.ops.raster.rasterization import _check_ints, _check_patches, _pixel_count, intersect, raster_state_size

_Rows = TypeVar("_Rows", bound=tuple[Any, ...])
_Pixels = TypeVar("_Pixels")


def box_lists(rows: Any, view_ids: Tensor, patches: Sequence[int], tile_size: int = 16) -> tuple[Tensor, Tensor]:
    """Return the lists of `intersect` for projected rows: for each tile the rows whose box of `radii` contains one of
    its pixel centres."""
    means2d, opacities, depths = rows.means2d.detach(), rows.row_opacities.detach(), rows.depths.detach()
    everywhere = depths.new_zeros(len(depths), 3)  # a conic without a bound: the box alone decides
    return intersect(means2d, everywhere, opacities, rows.radii, depths, view_ids, patches, tile_size)


@dataclass(frozen=True)
class BoxedOperators(Generic[_Rows, _Pixels]):
    """Operators of a primitive whose rows a box alone bounds. An object registers their fakes and gradients.

    Rows, views, ids, sizes and padding are as in `cuda_ext.ops.project.projection`, patches and lists as in
    `cuda_ext.ops.raster.rasterization`. A width of 1 stands for a column [N] or [M].

    Attributes:
        name: the end of the operators' names.
        reference: module of the same operators in torch.
        points: widths of a point's columns, the first inputs of `project_<name>`.
        projected: widths of a row's float columns, its first outputs; the last are `depths` and `row_opacities`.
        extra: numbers of a pixel besides its colour; 1 for an image [P].
        quads: float4 of a packed row on CUDA (`kPackedQuads`).
        rows: makes projected rows of `projected` and `radii` [M, 2] int32.
        pixels: makes rendered pixels of colours [P, 3], `extra` and alphas [P].
    """

    name: str
    reference: Any
    points: Mapping[str, int]
    projected: Mapping[str, int]
    extra: int
    quads: int
    rows: Callable[..., _Rows]
    pixels: Callable[[Tensor, Tensor, Tensor], _Pixels]

    def __post_init__(self) -> None:
        _register(self)

    def project(
        self, columns: Sequence[Tensor], viewmats: Tensor, Ks: Tensor, sizes: Sequence[int], view_ids: Tensor,
        point_ids: Tensor, near: float = 0.01, far: float = 1e10,
    ) -> _Rows:  # fmt: skip
        """Project points into views. Differentiable with respect to `columns` and `viewmats`.

        A row that is not drawn in its whole view is dead, as in `cuda_ext.project`: zero in all outputs but `radii`,
        and without a gradient.

        Args:
            columns: of the points, as `points` names them.
            viewmats: [V, 4, 4]. Ks: [V, 3, 3], or [V, 7, 3] with lenses. sizes: (width, height) of each view, 2 V ints.
            view_ids, point_ids: [M] int32.
            near, far: depths of centres between which points are drawn, world units.

        Raises:
            TypeError, ValueError, IndexError: as `cuda_ext.project`.
            NativeBuildError: the operators cannot be compiled.
        """
        like = columns[0]
        _check_columns(self.points, columns)
        check_rows(like, view_ids, point_ids)
        cameras = (viewmats, Ks, check_cameras(like, viewmats, Ks, sizes, near, far))
        return self.rows(*self._operator("project", like)(*columns, *cameras, view_ids, point_ids, near, far))

    def rasterize(
        self, rows: _Rows, colors: Tensor, tile_offsets: Tensor, row_ids: Tensor, patches: Sequence[int],
        tile_size: int = 16,
    ) -> _Pixels:  # fmt: skip
        """Composite rows over the pixels of the patches, front to back by the depths of their centres.

        Constants and stopping are those of `cuda_ext.rasterize`; alphas are negative where the pixel was closed before
        a row. Differentiable with respect to all floats of `rows` and to `colors`. On CPU the gradients have the same
        bits on any number of threads.

        Args:
            rows: `project`'s.
            colors: [M, 3].
            tile_offsets, row_ids: `box_lists`'s, with the same patches and tile_size.
            patches: 5 integers a patch (view, x0, y0, x1, y1).

        Raises:
            TypeError, ValueError: types, shapes, patches or tile_size are wrong; on CUDA a tile_size other than 16.
            NativeBuildError: the operators cannot be compiled.
        """
        *shape, depths, opacities, _ = rows
        floats = (*shape, opacities, colors, depths)
        _check_patches(patches, tile_size)
        widths = dict(list(self.projected.items())[:-2]) | {"row_opacities": 1, "colors": 3, "depths": 1}
        _check_columns(widths, floats)
        _check_ints(shape[0], tile_offsets=(tile_offsets, (-1,)), row_ids=(row_ids, (-1,)))
        operator = self._operator("rasterize", shape[0])
        return self.pixels(*operator(*floats, tile_offsets, row_ids, list(patches), tile_size)[:3])

    def _operator(self, stage: str, like: Tensor) -> Callable[..., tuple[Tensor, ...]]:
        return getattr(torch.ops.ns_multigpu if compiled_serves(like) else self.reference, f"{stage}_{self.name}")


def _shape(count: int, width: int) -> tuple[int, ...]:
    return (count, width) if width > 1 else (count,)


def _check_columns(widths: Mapping[str, int], columns: Sequence[Tensor]) -> None:
    named = zip(widths.items(), columns, strict=True)
    count = len(columns[0])
    check_floats(columns[0], **{name: (column, _shape(count, width)) for (name, width), column in named})


def _register(operators: BoxedOperators[Any, Any]) -> None:
    name, extra = operators.name, operators.extra

    def project_fake(*inputs: Any) -> tuple[Tensor, ...]:
        rows, like = inputs[-3].shape[0], inputs[0]
        floats = (like.new_empty(_shape(rows, width)) for width in operators.projected.values())
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
        state = raster_state_size(like, row_ids, patches, tile_size, operators.quads, 3 + extra)
        floats = (like.new_empty(_shape(pixels, width)) for width in (3, extra, 1))
        return (*floats, like.new_empty(pixels, dtype=torch.int32), like.new_empty(state))

    def rasterize_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.save_for_backward(*inputs[:-2], *output)
        ctx.rest = inputs[-2:]
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
