"""Gathering of point values by rows, and deterministic sums of row gradients."""

from typing import Any

import torch
from torch import Tensor


class _Take(torch.autograd.Function):
    """`values[places]` with a deterministic backward. torch's adds with atomics, on a GPU or with several threads, so
    that replicas would diverge."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(places)
        ctx.shape = values.shape
        return values[places]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (places,) = ctx.saved_tensors
        sums = grads[0].new_zeros(ctx.shape)
        if sums.is_cuda:
            return sums.index_put_((places,), grads[0], accumulate=True), None  # sorts: fixed order of additions
        return sums.index_add_(0, places, grads[0]), None


def take(values: Tensor, places: Tensor) -> Tensor:
    """Return `values[places]`, differentiable and bit-reproducible.

    Args:
        values: [N, ...]. places: [M] int64.

    Returns:
        [M, ...]; zeros if `values` is empty.
    """
    if len(values) == 0:
        return values.new_zeros(len(places), *values.shape[1:])
    return _Take.apply(values, places)  # type: ignore[no-any-return]


def spread(point_ids: Tensor, points: int) -> Tensor:
    """Replace padding (-1) in point ids [M] by various points, and return int64. Padding gathers their values and adds
    zero to them; atomic additions to a single point would be serialised."""
    lines = torch.arange(len(point_ids), device=point_ids.device)
    return torch.where(point_ids >= 0, point_ids.long(), lines % max(points, 1))
