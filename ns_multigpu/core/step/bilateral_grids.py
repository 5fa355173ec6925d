"""Bilateral grids: for each training view an affine map of colours that varies with position and brightness.

See Wang et al. 2024, "Bilateral Guided Radiance Field Processing", section 4. As in splatfacto, maps are interpolated
trilinearly between a grid's values, at a pixel's position in the view and its gray value (BT.601).
"""

from collections.abc import Callable

import torch
from torch import Tensor

from cuda_ext.ops.loss.bilateral_map import bilateral_map, bilateral_variation_backward
from ns_multigpu.core.step.view_parameters import ViewParameters

VARIATION_WEIGHT = 10.0
"""Splatfacto's weight of `variation`."""


def variation(grids: Tensor) -> Tensor:
    """Return the total variation [] of grids [N, 12, levels, rows, columns]: mean squared differences, summed over
    axes."""
    differences = (grids.diff(dim=axis) for axis in (2, 3, 4))
    return torch.stack([one.square().sum() / max(one.numel(), 1) for one in differences]).sum()


class StepGrids(ViewParameters):
    """The grids [N, 12, levels, rows, columns] in a step."""

    def applied(
        self, view: int, rgb: Tensor, rectangle: tuple[int, int, int, int], size: tuple[int, int]
    ) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """Map colours with the grid of the batch's view at this position.

        Args:
            rgb, rectangle, size: see `bilateral_map`.

        Returns:
            the mapped colours [h, w, 3], and the backward: it takes the loss's gradient by them, adds that of the
            grid, and returns that of `rgb`.
        """
        with torch.enable_grad():
            given, grid = rgb.detach().requires_grad_(), self.now[view].detach().requires_grad_()
            found = bilateral_map(grid, given, rectangle, size)

        def backward(v_found: Tensor) -> Tensor:
            v_rgb, v_grid = torch.autograd.grad(found, [given, grid], v_found)
            self.sums[view, : grid.numel()].add_(v_grid.flatten())
            return v_rgb

        return found.detach(), backward

    def penalty(self) -> Tensor:
        """Return the gradient of `variation`, weighted."""
        return bilateral_variation_backward(self.values, VARIATION_WEIGHT)
