"""Parameters of each training view in a step that reads nothing back. Their gradients come from pixels."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field

import torch
from torch import Tensor

from cuda_ext.ops.optim.adam import adam_step


@dataclass
class ViewParameters(ABC):
    """Every rank has the parameters of all views, and takes the same steps of them.

    Args:
        values: [N, *shape] of all training views, contiguous; changed by steps.
        exp_avg, exp_avg_sq: [N, *shape] Adam's moments.
        views: of a batch.

    Attributes:
        indices: [B] index of each view's parameters; float because it is part of the step's float input vector.
        now: [B, *shape] parameters of the step's views. sums: [B, numbers] their gradients, of this rank's pixels;
            numbers is that of a view's parameters, made even: a whole number of words.
    """

    values: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    views: int
    indices: Tensor = field(init=False)
    now: Tensor = field(init=False)
    sums: Tensor = field(init=False)

    def __post_init__(self) -> None:
        # CUDA graphs hold these addresses: the tensors are never reallocated.
        shape = self.values.shape[1:]
        self.indices = self.values.new_zeros(self.views)
        self.now = self.values.new_zeros(self.views, *shape)
        self.sums = self.values.new_zeros(self.views, 2 * words_of(1, shape.numel()))

    def begin(self) -> None:
        """Gather the parameters of the step's views, and clear their gradients."""
        torch.index_select(self.values, 0, self.indices.long(), out=self.now)
        self.sums.zero_()

    @abstractmethod
    def penalty(self) -> Tensor:
        """Return the gradient [N, *shape] of what the loss adds for the parameters alone."""

    def published(self) -> Tensor:
        """Return [words] int64: the bits of this rank's part of the gradients of the batch's parameters."""
        return self.sums.view(-1).view(torch.int64)

    def step(self, published: Tensor, scalars: Tensor) -> None:
        """Take Adam's step.

        Args:
            published: [ranks, words] int64, published by each rank.
            scalars: [1, 8], see `cuda_ext.ops.optim.adam.adam_scalars`; of no step where the step is not to count.
        """
        numbers = self.now[0].numel()
        sums = published.contiguous().view(torch.float32).sum(0).view_as(self.sums)[:, :numbers]
        # A view may be in a batch twice, and sums are to have the same bits each time: no scattered additions.
        which = torch.arange(len(self.values), device=self.values.device)[:, None] == self.indices.long()
        gradient = (which.to(sums.dtype) @ sums).view_as(self.values)
        gradient += self.penalty()
        adam_step([self.values], [gradient], [self.exp_avg], [self.exp_avg_sq], scalars)


def words_of(views: int, numbers: int) -> int:
    """Return the number of int64 words of the gradients by so many float32 numbers of each of these views."""
    return views * -(-numbers // 2)
