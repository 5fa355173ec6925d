"""Exposure: an affine map of colours for each training view, trained with the points: a matrix and an offset for
each image, as Kerbl et al. 2024 have them (A Hierarchical 3D Gaussian Representation for Real-Time Rendering).

A camera that chooses its exposure and white balance for each photograph shows one surface in many colours. Points
have one colour for all views. So a view's map M = (A | b) [3, 4] is applied to its pixels before they are compared with
the photograph:

    rgb = A (color + (1 - alpha) background) + b

The same is color' + (1 - alpha) background' with color' = A color + alpha b and background' = A background + b. So what
computes the loss of pixels over a background needs to know nothing of maps.

Held-out views, and what is shown, have no map: they have the exposure that maps are the identity for. As all maps could
drift together, the loss holds their mean there (`drift`).
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from cuda_ext.ops.optim.adam import adam_step

DRIFT_WEIGHT = 1.0
"""Of the squared distance of the mean map from the identity. The photometric loss hardly
constrains the mean map, so the exact weight does not matter."""


def identity_maps(views: int) -> Tensor:
    """Return [views, 3, 4] identity maps."""
    return torch.eye(3, 4).expand(views, 3, 4).contiguous()


def exposed(rgb: Tensor, exposure: Tensor) -> Tensor:
    """Colours [..., 3] by a view's map [3, 4]. Differentiable."""
    return rgb @ exposure[:, :3].T + exposure[:, 3]


def drift(maps: Tensor) -> Tensor:
    """[] the loss that holds the mean of the maps [N, 3, 4] at the identity. Differentiable."""
    return DRIFT_WEIGHT * _off(maps).square().sum()


def _off(maps: Tensor) -> Tensor:
    """[3, 4] how far the mean map is from the identity."""
    return maps.mean(0) - torch.eye(3, 4, dtype=maps.dtype, device=maps.device)


@dataclass
class StepExposures:
    """The maps in a step that reads nothing back. Every rank has all maps, and takes the same steps of them.

    Args:
        maps: [N, 3, 4] of all training views, contiguous; changed by steps.
        exp_avg, exp_avg_sq: [N, 3, 4] Adam's moments.
        views: of a batch.

    Attributes:
        indices: [B] index of each view's map; float because it is part of the step's float input vector.
    """

    maps: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    views: int
    indices: Tensor = field(init=False)

    def __post_init__(self) -> None:
        # CUDA graphs hold these addresses: the tensors are never reallocated.
        self.indices = self.maps.new_zeros(self.views)
        self._now = identity_maps(self.views).to(self.maps)
        self._sums = self.maps.new_zeros(self.views, 3, 4)

    def begin(self) -> None:
        """Gather the maps of the step's views, and clear their gradients."""
        torch.index_select(self.maps, 0, self.indices.long(), out=self._now)
        self._sums.zero_()

    def applied(self, view: int, color: Tensor, alpha: Tensor, background: Tensor) -> tuple[Tensor, Tensor]:
        """Return color' [P, 3] and background' [3] of pixels of the batch's view at this position.

        Args:
            color: [P, 3] blended. alpha: [P] how much of each pixel that covers. background: [3].
        """
        A, b = self._now[view, :, :3], self._now[view, :, 3]
        return torch.addmm(alpha[:, None] * b, color, A.T), torch.addmv(b, A, background)

    def backward(
        self, view: int, color: Tensor, alpha: Tensor, background: Tensor, v_color: Tensor, v_alpha: Tensor
    ) -> None:
        """Run the backward of `applied`: convert v_color and v_alpha in place, and add the map's gradient.

        Args:
            view, color, alpha, background: as `applied` had them.
            v_color: [P, 3] the loss's gradient by color'. v_alpha: [P] by alpha, where color' stays as it is.
        """
        A, b = self._now[view, :, :3], self._now[view, :, 3]
        over = torch.addcmul(color, 1 - alpha[:, None], background)
        self._sums[view, :, :3].addmm_(v_color.T, over)
        self._sums[view, :, 3].add_(v_color.sum(0))
        v_alpha.addmv_(v_color, b)
        v_color.copy_(v_color @ A)

    @property
    def words(self) -> int:
        """Number of words that a rank publishes: see `published`."""
        return words_of(self.views)

    def published(self) -> Tensor:
        """Return [words] int64: the bits of this rank's part of the gradients of the batch's maps."""
        return self._sums.view(-1).view(torch.int64)

    def step(self, published: Tensor, scalars: Tensor) -> None:
        """Take Adam's step.

        Args:
            published: [ranks, words] int64, published by each rank.
            scalars: [1, 8], see `cuda_ext.ops.optim.adam.adam_scalars`; of no step where the step is not to count.
        """
        sums = published.contiguous().view(torch.float32).sum(0).view(self.views, 12)
        # A view may be in a batch twice, and sums are to have the same bits each time: no scattered additions.
        which = torch.arange(len(self.maps), device=self.maps.device)[:, None] == self.indices.long()
        gradient = (which.to(sums.dtype) @ sums).view_as(self.maps)
        gradient += (2 * DRIFT_WEIGHT / len(self.maps)) * _off(self.maps)
        adam_step([self.maps], [gradient], [self.exp_avg], [self.exp_avg_sq], scalars)


def words_of(views: int) -> int:
    """Numbers, int64, of the gradients by the maps of so many views."""
    return 6 * views
