"""Tile intersection and compositing of a list of patches: public operators, their gradients and fake kernels.

A patch is a rectangle of a view, given as five integers (view, x0, y0, x1, y1); it is cut into tiles from its own
top-left corner. Coordinates are those of the whole view throughout, pixel (row i, column j) has its centre at
(j + 0.5, i + 0.5), so the same pixel gets the same value whatever patch it is rendered in.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from cuda_ext.dispatch.library import LIBRARY, NAMESPACE, fake
from cuda_ext.dispatch.load import compiled_serves
from cuda_ext.ops.common.checks import check_floats, check_tensors
from cuda_ext.reference import rasterization as reference

__all__ = ["intersect", "intersect_capacity", "rasterize"]


def intersect(
    means2d: Tensor,
    conics: Tensor,
    row_opacities: Tensor,
    radii: Tensor,
    depths: Tensor,
    view_ids: Tensor,
    patches: Sequence[int],
    tile_size: int = 16,
) -> tuple[Tensor, Tensor]:
    """List the splats that may overlap each tile of the patches, nearest first.

    Splats of equal depth come in the order of their rows, so the result is one and the same on every run, on any
    number of threads. A splat overlaps a tile if its alpha is at least 1/255 at some pixel centre; the bounds are
    rounded outward and may list a few more. Not differentiable. On CUDA it waits for the device once, to learn how many
    there are; `intersect_capacity` does not.

    Args:
        means2d: [M,2] centres in pixels (x, y).
        conics: [M,3] inverse 2D covariance (a, b, c) in 1/px^2.
        row_opacities: [M] in (0,1).
        radii: [M,2] int32, half the box of the support in pixels (x, y); 0 or less drops the row.
        depths: [M].
        view_ids: [M] int32, in any order.
        patches: 5 integers a patch (view, x0, y0, x1, y1), inside the view; may be empty.
        tile_size: pixels along a tile's side.

    Returns:
        tile_offsets [T+1] int32 and row_ids [I] int32: tile t has the rows
        `row_ids[tile_offsets[t]:tile_offsets[t + 1]]`. Tiles are counted patch after patch, row-major in a patch.

    Raises:
        TypeError, ValueError: types, shapes, patches or tile_size are wrong.
        RuntimeError: more than 2^31 - 1 intersections.
    """
    _check_rows(means2d, conics, row_opacities, radii, depths, view_ids, patches, tile_size)
    arguments = (means2d, conics, row_opacities, radii, depths, view_ids, patches, tile_size)
    return torch.ops.ns_multigpu.intersect(*arguments) if compiled_serves(means2d) else reference.intersect(*arguments)


def intersect_capacity(
    means2d: Tensor,
    conics: Tensor,
    row_opacities: Tensor,
    radii: Tensor,
    depths: Tensor,
    view_ids: Tensor,
    patches: Sequence[int],
    tile_size: int,
    capacity: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return `intersect` with a capacity of `capacity` intersections. On CUDA it never waits for the device, so a CUDA
    graph can contain it.

    Args:
        means2d, conics, row_opacities, radii, depths, view_ids, patches, tile_size: as `intersect`.
        capacity: 0 to 2^31 - 1. On CUDA each takes 12 bytes while it runs (16 above 65,535 tiles), 4 of which stay.

    Returns:
        tile_offsets [T+1] int32, row_ids [capacity] int32 (-1 behind the last list) and count [1] int64, the true
        number of intersections. Where it is above the capacity, some are missing from the lists, which are still valid
        input for `rasterize`: retry the step with a larger capacity.

    Raises:
        TypeError, ValueError: types, shapes, patches, tile_size or capacity are wrong.
    """
    _check_rows(means2d, conics, row_opacities, radii, depths, view_ids, patches, tile_size)
    if not 0 <= capacity < 2**31:
        raise ValueError(f"intersect_capacity: capacity must lie in 0..2^31 - 1, got {capacity}.")
    arguments = (means2d, conics, row_opacities, radii, depths, view_ids, patches, tile_size, capacity)
    if compiled_serves(means2d):
        return torch.ops.ns_multigpu.intersect_capacity(*arguments)
    return reference.intersect_capacity(*arguments)


def rasterize(
    means2d: Tensor,
    conics: Tensor,
    row_opacities: Tensor,
    features: Tensor,
    tile_offsets: Tensor,
    row_ids: Tensor,
    patches: Sequence[int],
    tile_size: int = 16,
    absgrad_probe: Tensor | None = None,
    mark_stops: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Composite splats over the pixels of the patches, front to back, without a background.

    With d = mean - pixel centre and sigma = (a dx^2 + c dy^2) / 2 + b dx dy, a splat has
    alpha = min(0.999, opacity exp(-sigma)) and is skipped where sigma < 0 or alpha < 1/255; a pixel is closed before
    the splat that would lower its transmittance to 1e-4 or below. (Kerbl et al. 2023, equation 3, with the constants
    of gsplat 1.4.0.) Differentiable by means2d, conics, row_opacities and features; on CPU the gradients have the
    same bits on any number of threads.

    Args:
        means2d: [M,2] centres in pixels (x, y).
        conics: [M,3] inverse 2D covariance (a, b, c) in 1/px^2.
        row_opacities: [M] in (0,1).
        features: [M,D] what is blended, D >= 1: colour, or colour and depth.
        tile_offsets: [T+1] int32, from `intersect` with the same patches and tile_size; or those of patches that
            follow each other, and the end of the last.
        row_ids: [I] int32, from `intersect` with all patches.
        patches: 5 integers a patch (view, x0, y0, x1, y1).
        tile_size: pixels along a tile's side.
        absgrad_probe: [M,2] zeros that require a gradient, or None. It changes nothing but receives, as its gradient,
            the sum over pixels of |d loss / d means2d| (AbsGS, Ye et al. 2024, equation 6).
        mark_stops: alpha is negative where the pixel was closed before a splat: what lies behind was not looked at.
            (The first splat closes none, so that no such alpha is 0.)

    Returns:
        out [S,D], alpha [S] (one minus the final transmittance) and last [S] int32 (the position in row_ids of the last
        splat blended, -1 for none) of the S pixels, patch after patch, row-major.

    Raises:
        TypeError, ValueError: types, shapes, patches or tile_size are wrong.
    """
    _check_patches(patches, tile_size)
    if features.dim() != 2 or features.shape[1] < 1:
        raise ValueError(f"rasterize: features must be [M,D] with D >= 1, got {tuple(features.shape)}.")
    rows = means2d.shape[0]
    check_floats(
        means2d,
        means2d=(means2d, (-1, 2)),
        conics=(conics, (rows, 3)),
        row_opacities=(row_opacities, (rows,)),
        features=(features, (rows, -1)),
        absgrad_probe=(means2d if absgrad_probe is None else absgrad_probe, (rows, 2)),
    )
    _check_ints(means2d, tile_offsets=(tile_offsets, (-1,)), row_ids=(row_ids, (-1,)))
    tiles = _tile_count(patches, tile_size)
    if tile_offsets.shape != (tiles + 1,):
        raise ValueError(
            f"rasterize: the patches have {tiles} tiles of {tile_size} px, so tile_offsets must hold {tiles + 1} "
            f"numbers, got {tuple(tile_offsets.shape)}. Give intersect and rasterize the same patches and tile_size."
        )
    arguments = (means2d, conics, row_opacities, features, tile_offsets, row_ids, patches, tile_size, absgrad_probe,
                 mark_stops)  # fmt: skip
    if compiled_serves(means2d):
        out, alpha, last, _ = torch.ops.ns_multigpu.rasterize(*arguments)
        return out, alpha, last
    return reference.rasterize(*arguments)


def _check_rows(
    means2d: Tensor, conics: Tensor, row_opacities: Tensor, radii: Tensor, depths: Tensor, view_ids: Tensor,
    patches: Sequence[int], tile_size: int,
) -> None:  # fmt: skip
    _check_patches(patches, tile_size)
    rows = means2d.shape[0]
    check_floats(
        means2d,
        means2d=(means2d, (-1, 2)),
        conics=(conics, (rows, 3)),
        row_opacities=(row_opacities, (rows,)),
        depths=(depths, (rows,)),
    )
    _check_ints(means2d, radii=(radii, (rows, 2)), view_ids=(view_ids, (rows,)))


def _check_patches(patches: Sequence[int], tile_size: int) -> None:
    if not 1 <= tile_size <= 64:
        raise ValueError(f"tile_size must lie in 1..64, got {tile_size}.")
    if len(patches) % 5:
        raise ValueError(f"patches holds 5 integers a patch (view, x0, y0, x1, y1); got {len(patches)} in all.")
    for patch in reference.split_patches(patches):
        if patch.view < 0 or patch.x0 < 0 or patch.y0 < 0 or patch.x1 < patch.x0 or patch.y1 < patch.y0:
            raise ValueError(f"{patch}: need view, x0, y0 >= 0, x1 >= x0 and y1 >= y0.")


def _check_ints(like: Tensor, **tensors: tuple[Tensor, Sequence[int]]) -> None:
    check_tensors(torch.int32, like.device, **tensors)


def _tile_count(patches: Sequence[int], tile_size: int) -> int:
    cut = reference.split_patches(patches)
    return sum(-(-(p.x1 - p.x0) // tile_size) * -(-(p.y1 - p.y0) // tile_size) for p in cut)


def _pixel_count(patches: Sequence[int]) -> int:
    return sum((p.x1 - p.x0) * (p.y1 - p.y0) for p in reference.split_patches(patches))


@fake("intersect")
def _intersect_fake(means2d, conics, row_opacities, radii, depths, view_ids, patches, tile_size):
    count = torch.library.get_ctx().new_dynamic_size()
    tiles = _tile_count(patches, tile_size)
    return means2d.new_empty(tiles + 1, dtype=torch.int32), means2d.new_empty(count, dtype=torch.int32)


def raster_state_size(
    like: Tensor, row_ids: Tensor, patches: Sequence[int], tile_size: int, quads: int, sums: int
) -> int:
    """Return the number of floats that forward keeps for backward: on CUDA RasterState of csrc/cuda/raster/rasterize.h.

    Args:
        like: [M, ...] a column of rows. quads: float4 of a packed row.
        sums: numbers of a pixel besides its transmittance; 0 for the kernels of any tile size and number of channels.
    """
    if like.device.type != "cuda":
        return 0
    rows, listed, tiles = len(like), row_ids.shape[0], _tile_count(patches, tile_size)
    slots, checkpoints = (listed // 256 + tiles, listed // 256) if sums else (0, 0)
    parts = (8 * tiles, tiles, slots, 1, 4 * quads * rows, checkpoints * 256 * (1 + sums))
    return sum((part + 31) // 32 * 32 for part in parts)


@fake("rasterize")
def _rasterize_fake(
    means2d, conics, row_opacities, features, tile_offsets, row_ids, patches, tile_size, absgrad_probe,
    mark_stops=False,
):  # fmt: skip
    pixels = _pixel_count(patches)
    out = features.new_empty(pixels, features.shape[1])
    alpha, last = features.new_empty(pixels), features.new_empty(pixels, dtype=torch.int32)
    channels = features.shape[1]
    sums = (4 if channels == 4 else 3) if tile_size == 16 and channels <= 4 else 0
    state = raster_state_size(features, row_ids, patches, tile_size, 3, sums)
    return out, alpha, last, features.new_empty(state, dtype=torch.float32)


@fake("rasterize_backward")
def _rasterize_backward_fake(
    means2d, conics, row_opacities, features, tile_offsets, row_ids, patches, tile_size, alpha, last, state, out, v_out,
    v_alpha, absgrad,
):  # fmt: skip
    grads = tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in
                  (means2d, conics, row_opacities, features))  # fmt: skip
    return *grads, means2d.new_empty(means2d.shape[0] if absgrad else 0, 2)


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor, Tensor]) -> None:
    *tensors, patches, tile_size, probe, marked = inputs
    out, alpha, last, state = output
    ctx.save_for_backward(*tensors, alpha, last, state, out)
    ctx.patches, ctx.tile_size, ctx.marked = patches, tile_size, marked
    ctx.absgrad = probe is not None and probe.requires_grad
    ctx.mark_non_differentiable(last, state)


def _rasterize_backward(ctx: Any, v_out: Tensor, v_alpha: Tensor, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    *tensors, alpha, last, state, out = ctx.saved_tensors
    if ctx.marked:  # operators take the gradient by what is covered, which is |alpha|
        v_alpha = torch.where(alpha < 0, -v_alpha, v_alpha)
    *grads, v_abs = torch.ops.ns_multigpu.rasterize_backward(
        *tensors, ctx.patches, ctx.tile_size, alpha, last, state, out, v_out, v_alpha, ctx.absgrad
    )
    return *grads, None, None, None, None, v_abs if ctx.absgrad else None, None


torch.library.register_autograd(
    f"{NAMESPACE}::rasterize", _rasterize_backward, setup_context=_save_for_backward, lib=LIBRARY
)
