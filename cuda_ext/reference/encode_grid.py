"""`encode_grid` and its gradient in torch's operators. See `cuda_ext.ops.radiance.encode_grid`."""

import torch
from torch import Tensor

_PRIMES = (1, 2654435761, 805459861)


def encode_grid(positions: Tensor, table: Tensor, scalings: Tensor, log2_size: int) -> Tensor:
    """See `cuda_ext.ops.radiance.encode_grid.encode_grid`."""
    rows, weights, _ = _corners(positions, scalings, log2_size)
    out = table.new_zeros(len(positions), len(scalings), table.shape[1])
    for corner in range(8):
        out += table[rows[corner]] * weights[corner][..., None]
    return out.flatten(1)


def encode_grid_backward(
    positions: Tensor, table: Tensor, scalings: Tensor, log2_size: int, v_features: Tensor, moves: bool
) -> tuple[Tensor, Tensor]:
    """Return the gradients of positions [N, 3] (none where they do not move) and of the table."""
    rows, weights, slopes = _corners(positions, scalings, log2_size)
    v = v_features.view(len(positions), len(scalings), table.shape[1])
    v_table, v_scaled = torch.zeros_like(table), positions.new_zeros(len(positions), len(scalings), 3)
    for corner in range(8):
        v_table.index_add_(0, rows[corner].flatten(), (v * weights[corner][..., None]).flatten(0, 1))
        if moves:
            v_scaled += (v * table[rows[corner]]).sum(2, keepdim=True) * slopes[corner]
    v_positions = (v_scaled * scalings[:, None]).sum(1) if moves else positions.new_zeros(0, 3)
    return v_positions, v_table


def _corners(positions: Tensor, scalings: Tensor, log2_size: int) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Return three tensors for each of the eight corners of a position's voxel at each level.

    These are the rows [N, L] of the table, their weights [N, L], and these' derivatives [N, L, 3] by the place in the
    voxel.
    """
    scaled = positions[:, None] * scalings[:, None]
    low, high = scaled.floor(), scaled.ceil()
    part = scaled - low
    primes = torch.tensor(_PRIMES, device=positions.device)
    hashed = [end.long() * primes for end in (low, high)]
    first = torch.arange(len(scalings), device=positions.device) << log2_size
    rows: list[Tensor] = []
    weights: list[Tensor] = []
    slopes: list[Tensor] = []
    for corner in range(8):
        side = [corner >> axis & 1 for axis in range(3)]
        x, y, z = (hashed[side[axis]][..., axis] for axis in range(3))
        rows.append(((x ^ y ^ z) & ((1 << log2_size) - 1)) + first)
        a, b, c = (part[..., axis] if side[axis] else 1 - part[..., axis] for axis in range(3))
        weights.append(a * b * c)
        signs = [1 if s else -1 for s in side]
        slopes.append(torch.stack([signs[0] * b * c, signs[1] * a * c, signs[2] * a * b], 2))
    return rows, weights, slopes
