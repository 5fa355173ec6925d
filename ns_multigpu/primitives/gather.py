"""What rows take of their points, and sums of rows' gradients in an order that is always the same."""

from typing import Any

import torch
from torch import Tensor


class _Take(torch.autograd.Function):
    """`values[places]`. torch's own way back adds with atomics, on a GPU or with several threads: ranks that hold the
    same points would drift apart."""

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
            return sums.index_put_((places,), grads[0], accumulate=True), None  # sorts, and adds up in that order
        return sums.index_add_(0, places, grads[0]), None


def take(values: Tensor, places: Tensor) -> Tensor:
    """`values[places]`, differentiable, to the bit the same whenever it is done.

    Args:
        values: [N, ...]. places: [M] int64.

    Returns:
        [M, ...]; zeros where there is no value at all.
    """
    if len(values) == 0:
        return values.new_zeros(len(places), *values.shape[1:])
    return _Take.apply(values, places)  # type: ignore[no-any-return]


def spread(point_ids: Tensor, points: int) -> Tensor:
    """Point ids [M] int64 of lines with padding (-1), which takes some point's values and adds zero to them: to many
    points, for additions to one would wait for each other."""
    lines = torch.arange(len(point_ids), device=point_ids.device)
    return torch.where(point_ids >= 0, point_ids.long(), lines % max(points, 1))
