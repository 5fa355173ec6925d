"""Exposure: a gain of each colour channel for each training view, trained with the points.

A camera with automatic exposure and white balance shows one surface in many colours, but points have one colour for all
views. So a view's gains g [3] multiply its pixels before they are compared with the photograph:

    rgb = g (color + (1 - alpha) background)

That equals color' + (1 - alpha) background' with color' = g color and background' = g background. The loss of pixels
over a background therefore needs no change. Three numbers per view explain little but exposure, unlike the affine maps
of Kerbl et al. 2024.

Held-out views and the viewer have no gain: their exposure is that of gains of 1. Since all gains could drift together,
a loss holds their mean at 1 (`drift`).
"""

import torch
from torch import Tensor

from ns_multigpu.core.step.view_parameters import ViewParameters

DRIFT_WEIGHT = 1.0
"""Weight of the squared distance of the mean gains from 1. The photometric loss hardly constrains the mean, so the
exact weight does not matter."""


def drift(gains: Tensor) -> Tensor:
    """Return the loss [] that holds the mean of the gains [N, 3] at 1. Differentiable."""
    return DRIFT_WEIGHT * (gains.mean(0) - 1).square().sum()


class StepExposures(ViewParameters):
    """The gains [N, 3] in a step."""

    def applied(self, view: int, color: Tensor, background: Tensor) -> tuple[Tensor, Tensor]:
        """Return color' [P, 3] and background' [3] of blended pixels of the batch's view at this position."""
        return color * self.now[view], background * self.now[view]

    def backward(self, view: int, color: Tensor, alpha: Tensor, background: Tensor, v_color: Tensor) -> None:
        """Run the backward of `applied`: convert v_color in place, and add the gains' gradient.

        Args:
            view, color, background: as `applied` had them. alpha: [P] how much of each pixel the points cover.
            v_color: [P, 3] the loss's gradient by color'.
        """
        over = torch.addcmul(color, 1 - alpha[:, None], background)
        self.sums[view, :3].add_((v_color * over).sum(0))
        v_color.mul_(self.now[view])

    def penalty(self) -> Tensor:
        """Return the gradient [3] of `drift` by each view's gains."""
        return (2 * DRIFT_WEIGHT / len(self.values)) * (self.values.mean(0) - 1)
