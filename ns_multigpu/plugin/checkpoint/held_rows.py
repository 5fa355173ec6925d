"""Rows of a tensor that several ranks hold together: what a checkpoint is told to write."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Rows:
    """This rank's rows of a tensor that the ranks hold together.

    Attributes:
        own: [n, ...] on any device; n may be 0.
        first: the row of the whole tensor that `own` begins with: those of the ranks before.
        total: rows of the whole tensor.
    """

    own: Tensor
    first: int
    total: int

    @property
    def shape(self) -> torch.Size:
        """Of the whole tensor."""
        return torch.Size((self.total, *self.own.shape[1:]))
