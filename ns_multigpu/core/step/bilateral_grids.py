"""Bilateral grids: an affine map of colours for each training view, which varies with place and brightness (Wang et al.
2024, "Bilateral Guided Radiance Field Processing", section 4). Splatfacto's: maps are trilinear between a grid's
values, at a pixel's place in the view and its gray (BT.601).
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import grid_sample

from ns_multigpu.core.step.view_parameters import ViewParameters

VARIATION_WEIGHT = 10.0
"""Splatfacto's weight of `variation`."""


def mapped(grid: Tensor, rgb: Tensor, rectangle: tuple[int, int, int, int], size: tuple[int, int]) -> Tensor:
    """Map the colours of a rectangle of a view. Differentiable by grid and rgb.

    Args:
        grid: [12, levels of gray, rows, columns] maps [3, 4], row by row.
        rgb: [h, w, 3] in [0, 1]. rectangle: (x0, y0, x1, y1) where they are, in pixels of the view.
        size: (width, height) of the view.

    Returns:
        [h, w, 3], not clamped.
    """
    (x0, y0, x1, y1), (width, height) = rectangle, size
    x = torch.linspace(-1, 1, width, dtype=rgb.dtype, device=rgb.device)[x0:x1]
    y = torch.linspace(-1, 1, height, dtype=rgb.dtype, device=rgb.device)[y0:y1, None]
    red, green, blue = rgb.unbind(-1)
    gray = 0.299 * red + 0.587 * green + 0.114 * blue
    places = torch.stack([x.expand_as(gray), y.expand_as(gray), 2 * gray - 1], dim=-1)
    maps = grid_sample(grid[None], places[None, None], padding_mode="border", align_corners=True)[0, :, 0]
    maps = maps.permute(1, 2, 0).unflatten(-1, (3, 4))
    return (maps[..., :3] @ rgb[..., None])[..., 0] + maps[..., 3]


def variation(grids: Tensor) -> Tensor:
    """[] the total variation of grids [N, 12, levels, rows, columns]: mean squares of differences, summed over axes."""
    differences = (grids.diff(dim=axis) for axis in (2, 3, 4))
    return torch.stack([one.square().sum() / max(one.numel(), 1) for one in differences]).sum()


class StepGrids(ViewParameters):
    """The grids [N, 12, levels, rows, columns] in a step."""

    def applied(
        self, view: int, rgb: Tensor, rectangle: tuple[int, int, int, int], size: tuple[int, int]
    ) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """Map colours with the grid of the batch's view at this position.

        Args:
            rgb, rectangle, size: see `mapped`.

        Returns:
            the mapped colours [h, w, 3], and the backward: it takes the loss's gradient by them, adds that of the
            grid, and returns that of `rgb`.
        """
        with torch.enable_grad():
            given, grid = rgb.detach().requires_grad_(), self.now[view].detach().requires_grad_()
            found = mapped(grid, given, rectangle, size)

        def backward(v_found: Tensor) -> Tensor:
            v_rgb, v_grid = torch.autograd.grad(found, [given, grid], v_found)
            self.sums[view, : grid.numel()].add_(v_grid.flatten())
            return v_rgb

        return found.detach(), backward

    def penalty(self) -> Tensor:
        """Return the gradient of `variation`, weighted."""
        with torch.enable_grad():
            values = self.values.detach().requires_grad_()
            (found,) = torch.autograd.grad(VARIATION_WEIGHT * variation(values), values)
        return found
