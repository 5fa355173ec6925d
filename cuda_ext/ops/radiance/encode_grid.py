"""Features of positions in a multiresolution hash grid: the public operator and its gradient."""

from typing import Any

import torch
from torch import Tensor

from cuda_ext.dispatch.library import fake
from cuda_ext.dispatch.load import compiled_serves
from cuda_ext.ops.common.checks import check_floats
from cuda_ext.reference import encode_grid as reference


def encode_grid(positions: Tensor, table: Tensor, scalings: Tensor, log2_size: int) -> Tensor:
    """Look positions up in a hash grid, interpolating between the corners of voxels (Instant-NGP, section 3).

    The values, and the order of rows, are those of nerfstudio's `HashEncoding` in torch, whose gradient takes most of a
    step on a GPU. Differentiable once, by positions and table.

    Args:
        positions: [N, 3] float32, from 0 to 1.
        table: [L * 2 ** log2_size, F] float32, the rows of level 0 first; on CUDA F is 1, 2, 4 or 8.
        scalings: [L] float32, voxels along an axis of each level.
        log2_size: of the rows of a level.

    Returns:
        [N, L * F], the features of level 0 first.

    Raises:
        TypeError, ValueError: a tensor of the wrong shape, dtype or device.
        NativeBuildError: the operators cannot be compiled.
    """
    levels = scalings.shape[0]
    rows = levels << log2_size
    check_floats(positions, positions=(positions, (-1, 3)), table=(table, (rows, -1)), scalings=(scalings, (levels,)))
    return _Encoded.apply(positions, table, scalings, log2_size, compiled_serves(positions))


class _Encoded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, positions: Tensor, table: Tensor, scalings: Tensor, log2_size: int, compiled: bool) -> Tensor:
        ctx.save_for_backward(positions, table, scalings)
        ctx.log2_size, ctx.compiled = log2_size, compiled
        op: Any = torch.ops.ns_multigpu.encode_grid if compiled else reference.encode_grid
        return op(positions.detach(), table.detach(), scalings, log2_size)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, v_features: Tensor) -> tuple[Tensor | None, Tensor, None, None, None]:
        positions, table, scalings = ctx.saved_tensors
        op: Any = torch.ops.ns_multigpu.encode_grid_backward if ctx.compiled else reference.encode_grid_backward
        moves = bool(ctx.needs_input_grad[0])
        v_positions, v_table = op(positions, table, scalings, ctx.log2_size, v_features.contiguous(), moves)
        return v_positions if moves else None, v_table, None, None, None


@fake("encode_grid")
def _encode_fake(positions: Tensor, table: Tensor, scalings: Tensor, log2_size: int) -> Tensor:
    return positions.new_empty(len(positions), len(scalings) * table.shape[1])


@fake("encode_grid_backward")
def _encode_backward_fake(
    positions: Tensor, table: Tensor, scalings: Tensor, log2_size: int, v_features: Tensor, moves: bool
) -> tuple[Tensor, Tensor]:
    return positions.new_empty(len(positions) if moves else 0, 3), torch.empty_like(table)
