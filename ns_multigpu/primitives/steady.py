"""Formulas whose results for a point do not depend on which other points are in the tensor, to the last bit.

What a shard computes must be what the whole model computes. Arithmetic, exp and log are so in torch; sigmoid on a CPU
and products of small matrices are not.
"""

import torch
from gsplat.utils import normalized_quat_to_rotmat
from torch import Tensor


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + exp(-x)). torch's own, on a CPU, rounds the last few numbers of a tensor otherwise than the rest."""
    return 1.0 / (1.0 + torch.exp(-x))


def logit(x: Tensor) -> Tensor:
    """The inverse of `sigmoid`, of numbers in (0, 1)."""
    return torch.log(x / (1.0 - x))


def rotations(quats: Tensor) -> Tensor:
    """The rotation matrices [N, 3, 3] of quaternions [N, 4] (w, x, y, z) of any length but 0."""
    w, x, y, z = quats.unbind(-1)
    length = (w * w + x * x + y * y + z * z).sqrt().clamp_min(1e-12)
    return normalized_quat_to_rotmat(quats / length[:, None])


def rotate(matrices: Tensor, vectors: Tensor) -> Tensor:
    """Vectors [..., N, 3] by matrices [N, 3, 3]. A sum of three terms in this order, whatever N is: a matrix product
    may be computed one way for few and another for many."""
    columns = matrices.unbind(-1)
    x, y, z = vectors.unbind(-1)
    return columns[0] * x[..., None] + columns[1] * y[..., None] + columns[2] * z[..., None]
