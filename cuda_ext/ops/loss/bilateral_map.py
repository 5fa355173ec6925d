"""Colours mapped by a bilateral grid (Wang et al. 2024, "Bilateral Guided Radiance Field Processing", section 4): the
operator, its gradient and its form in torch; and the gradient of the grids' total variation.

Torch's own gradient of the grid adds each pixel to a few addresses at once. With it a step on photographs of 2.8
megapixels took 30 ms, with this operator 2.2 ms (benchmarks/results/kinds-step-h200.md).
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import grid_sample

from cuda_ext.dispatch.library import LIBRARY, NAMESPACE, fake
from cuda_ext.dispatch.load import kernels_serve

__all__ = ["MOST_LEVELS", "bilateral_map", "bilateral_variation_backward"]

MOST_LEVELS = 64
"""Levels of gray that the CUDA operator takes."""


def bilateral_map(grid: Tensor, rgb: Tensor, rectangle: Sequence[int], size: tuple[int, int]) -> Tensor:
    """Map the colours of a rectangle of a view. Differentiable by grid and rgb.

    Maps are trilinear between the grid's values, at a pixel's place in the view and its gray (BT.601). Places beyond
    the grid's ends get the end's map.

    Args:
        grid: [12, levels of gray, rows, columns] maps [3, 4], row by row.
        rgb: [h, w, 3] in [0, 1]. rectangle: (x0, y0, x1, y1) where they are, in pixels of the view.
        size: (width, height) of the view.

    Returns:
        [h, w, 3], not clamped.

    Raises:
        ValueError: a tensor of the wrong shape, a rectangle beyond its view, or too many levels.
        NativeBuildError: the CUDA operators cannot be compiled.
    """
    (x0, y0, x1, y1), (width, height) = rectangle, size
    if grid.dim() != 4 or grid.shape[0] != 12 or rgb.shape != (y1 - y0, x1 - x0, 3):
        raise ValueError(
            f"bilateral_map: need grid [12, levels, rows, columns] and rgb [{y1 - y0}, {x1 - x0}, 3], got "
            f"{tuple(grid.shape)} and {tuple(rgb.shape)}."
        )
    if not (0 <= x0 <= x1 <= width and 0 <= y0 <= y1 <= height) or not 0 < grid.shape[1] <= MOST_LEVELS:
        raise ValueError(
            f"bilateral_map: the rectangle {tuple(rectangle)} lies in a view of {width}x{height}, and there are 1 to "
            f"{MOST_LEVELS} levels of gray, not {grid.shape[1]}."
        )
    place = [x0, y0, width, height]
    if kernels_serve(rgb):
        return torch.ops.ns_multigpu.bilateral_map(grid.contiguous(), rgb.contiguous(), place)
    return _map_torch(grid, rgb, place)


def bilateral_variation_backward(grids: Tensor, weight: float) -> Tensor:
    """Return the gradient of `weight` times the total variation of grids [N, 12, levels, rows, columns].

    The variation is the mean squares of differences along levels, rows and columns, summed over these axes.
    """
    if kernels_serve(grids):
        return torch.ops.ns_multigpu.bilateral_variation_backward(grids.contiguous(), weight)
    found = torch.zeros_like(grids)
    for axis in (2, 3, 4):
        differences = grids.diff(dim=axis)
        differences *= 2 * weight / max(differences.numel(), 1)
        found.narrow(axis, 1, differences.shape[axis]).add_(differences)
        found.narrow(axis, 0, differences.shape[axis]).sub_(differences)
    return found


def _map_torch(grid: Tensor, rgb: Tensor, place: Sequence[int]) -> Tensor:
    x0, y0, width, height = place
    rows, columns = rgb.shape[:2]
    x = torch.linspace(-1, 1, width, dtype=rgb.dtype, device=rgb.device)[x0 : x0 + columns]
    y = torch.linspace(-1, 1, height, dtype=rgb.dtype, device=rgb.device)[y0 : y0 + rows, None]
    red, green, blue = rgb.unbind(-1)
    gray = 0.299 * red + 0.587 * green + 0.114 * blue
    places = torch.stack([x.expand_as(gray), y.expand_as(gray), 2 * gray - 1], dim=-1)
    maps = grid_sample(grid[None], places[None, None], padding_mode="border", align_corners=True)[0, :, 0]
    maps = maps.permute(1, 2, 0).unflatten(-1, (3, 4))
    return (maps[..., :3] @ rgb[..., None])[..., 0] + maps[..., 3]


@fake("bilateral_map")
def _fake(grid: Tensor, rgb: Tensor, place: Sequence[int]) -> Tensor:
    return torch.empty_like(rgb)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    grid, rgb, ctx.place = inputs
    ctx.save_for_backward(grid, rgb)


def _gradient(ctx: Any, v_out: Tensor) -> tuple[Tensor, Tensor, None]:
    found = torch.ops.ns_multigpu.bilateral_map_backward(*ctx.saved_tensors, v_out.contiguous(), ctx.place)
    return (*found, None)


torch.library.register_autograd(f"{NAMESPACE}::bilateral_map", _gradient, setup_context=_setup, lib=LIBRARY)
