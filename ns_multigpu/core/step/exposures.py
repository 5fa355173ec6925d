"""Exposure: a gain of each colour channel for each training view, trained with the points.

A camera that chooses its exposure and white balance for each photograph shows one surface in many colours. Points
have one colour for all views. So a view's gains g [3] multiply its pixels before they are compared with the photograph:

    rgb = g (color + (1 - alpha) background)

The same is color' + (1 - alpha) background' with color' = g color and background' = g background. So what computes the
loss of pixels over a background needs to know nothing of gains. Three numbers a view can hardly explain anything else
than exposure, unlike the affine maps of Kerbl et al. 2024.

Held-out views, and what is shown, have no gain: they have the exposure that gains are 1 for. As all gains could drift
together, the loss holds their mean there (`drift`).
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from cuda_ext.ops.optim.adam import adam_step

DRIFT_WEIGHT = 1.0
"""Weight of the squared distance of the mean gains from 1. The photometric loss hardly constrains the mean, so the
exact weight does not matter."""


def drift(gains: Tensor) -> Tensor:
    """[] the loss that holds the mean of the gains [N, 3] at 1. Differentiable."""
    return DRIFT_WEIGHT * (gains.mean(0) - 1).square().sum()


@dataclass
class StepExposures:
    """The gains in a step that reads nothing back. Every rank has all gains, and takes the same steps of them.

    Args:
        gains: [N, 3] of all training views, contiguous; changed by steps.
        exp_avg, exp_avg_sq: [N, 3] Adam's moments.
        views: of a batch.

    Attributes:
        indices: [B] index of each view's gains; float because it is part of the step's float input vector.
    """

    gains: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    views: int
    indices: Tensor = field(init=False)

    def __post_init__(self) -> None:
        # CUDA graphs hold these addresses: the tensors are never reallocated.
        self.indices = self.gains.new_zeros(self.views)
        self._now = self.gains.new_ones(self.views, 3)
        self._sums = self.gains.new_zeros(self.views, 4)  # 3 and padding: a whole number of words

    def begin(self) -> None:
        """Gather the gains of the step's views, and clear their gradients."""
        torch.index_select(self.gains, 0, self.indices.long(), out=self._now)
        self._sums.zero_()

    def applied(self, view: int, color: Tensor, background: Tensor) -> tuple[Tensor, Tensor]:
        """Return color' [P, 3] and background' [3] of blended pixels of the batch's view at this position."""
        return color * self._now[view], background * self._now[view]

    def backward(self, view: int, color: Tensor, alpha: Tensor, background: Tensor, v_color: Tensor) -> None:
        """Run the backward of `applied`: convert v_color in place, and add the gains' gradient.

        Args:
            view, color, background: as `applied` had them. alpha: [P] how much of each pixel the points cover.
            v_color: [P, 3] the loss's gradient by color'.
        """
        over = torch.addcmul(color, 1 - alpha[:, None], background)
        self._sums[view, :3].add_((v_color * over).sum(0))
        v_color.mul_(self._now[view])

    @property
    def words(self) -> int:
        """Number of words that a rank publishes: see `published`."""
        return words_of(self.views)

    def published(self) -> Tensor:
        """Return [words] int64: the bits of this rank's part of the gradients of the batch's gains."""
        return self._sums.view(-1).view(torch.int64)

    def step(self, published: Tensor, scalars: Tensor) -> None:
        """Take Adam's step.

        Args:
            published: [ranks, words] int64, published by each rank.
            scalars: [1, 8], see `cuda_ext.ops.optim.adam.adam_scalars`; of no step where the step is not to count.
        """
        sums = published.contiguous().view(torch.float32).sum(0).view(self.views, 4)[:, :3]
        # A view may be in a batch twice, and sums are to have the same bits each time: no scattered additions.
        which = torch.arange(len(self.gains), device=self.gains.device)[:, None] == self.indices.long()
        gradient = which.to(sums.dtype) @ sums
        gradient += (2 * DRIFT_WEIGHT / len(self.gains)) * (self.gains.mean(0) - 1)
        adam_step([self.gains], [gradient], [self.exp_avg], [self.exp_avg_sq], scalars)


def words_of(views: int) -> int:
    """Return the number of int64 words of the gradients by the gains of so many views."""
    return 2 * views
