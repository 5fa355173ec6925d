"""Rows of a tensor that is sharded over ranks, as input of a checkpoint."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Rows:
    """This rank's rows of a sharded tensor.

    Attributes:
        own: [n, ...] on any device; n may be 0.
        first: row of `own[0]` in the full tensor; the rows of lower ranks precede it.
        total: rows of the full tensor.
    """

    own: Tensor
    first: int
    total: int

    @property
    def shape(self) -> torch.Size:
        """Shape of the full tensor."""
        return torch.Size((self.total, *self.own.shape[1:]))
