"""Formulas whose result for a point is bitwise independent of the other points in the tensor.

A shard must compute what the whole model computes. torch's arithmetic, exp and log do; sigmoid on a CPU and products of
small matrices do not.
"""

import torch
from torch import Tensor

from cuda_ext.reference.quaternions import rotate, rotations

__all__ = ["logit", "rotate", "rotations", "sigmoid"]


def sigmoid(x: Tensor) -> Tensor:
    """Return 1 / (1 + exp(-x)). On a CPU, torch's own rounds the last few elements of a tensor unlike the rest."""
    return (1.0 + torch.exp(-x)).reciprocal()


def logit(x: Tensor, out: Tensor | None = None) -> Tensor:
    """Return the inverse of `sigmoid`, of numbers in (0, 1)."""
    return torch.log(x / (1.0 - x), out=out)
