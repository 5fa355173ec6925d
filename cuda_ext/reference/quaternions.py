"""Rotations by quaternions, whose results for a point do not depend on which other points are in the tensor."""

import torch
from torch import Tensor


def rotations(quats: Tensor) -> Tensor:
    """Return the rotation matrices [N, 3, 3] of quaternions [N, 4] (w, x, y, z) of any length but 0. Not for autograd.

    To the bit those of gsplat's `normalized_quat_to_rotmat`, which launches forty operators where a few do. Takes 180
    bytes a row in addition to the result.
    """
    ww, xx, yy, zz = (quats * quats).split(1, dim=-1)
    quats = quats / (ww + xx + yy + zz).sqrt().clamp_min(1e-12)
    w, x, y, z = quats.split(1, dim=-1)
    _, minus_x, minus_y, minus_z = (-quats).split(1, dim=-1)
    # All entries are 2 (a b + c d), and 1 is added on the diagonal. A sign changes no rounding, so that it may as well
    # be that of a factor. Here are all a, then all c; below all b, then all d; row by row.
    left = (y, x, x, x, x, y, x, y, x, z, w, w, w, z, w, w, w, y)
    right = (minus_y, y, z, y, minus_x, z, z, z, minus_x, minus_z, minus_z, y, z, minus_z, minus_x, minus_y, x, minus_y)
    first, second = torch.cat(left, dim=-1).mul_(torch.cat(right, dim=-1)).split(9, dim=-1)
    matrices = (first + second).mul_(2.0).view(-1, 3, 3)
    matrices.diagonal(dim1=-2, dim2=-1).add_(1.0)
    return matrices


def rotate(matrices: Tensor, vectors: Tensor) -> Tensor:
    """Multiply vectors [..., N, 3] by matrices [N, 3, 3], as sums of three terms in this order.

    A matrix product may be computed one way for small N and another for large N.
    """
    x, y, z = (matrices * vectors[..., None, :]).unbind(-1)
    return x + y + z


def turn(quats: Tensor, vectors: Tensor) -> Tensor:
    """See `cuda_ext.turn`."""
    return rotate(rotations(quats), vectors)
