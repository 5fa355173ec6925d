"""The reference of `add_noise`, and the table of normal numbers that it draws from."""

import math

import torch
from torch import Tensor

from cuda_ext.reference.projection import rotation_matrices

_PIECE = 1 << 20
"""Gaussians that get their noise at once: hundreds of bytes each on the way."""


def table_normals(numbers: Tensor, start: int) -> Tensor:
    """Return some of the numbers of an endless table of normal numbers: [K] float64. Overwrites `numbers`.

    Number k is made of 64 bits that SplitMix64 (Steele, Lea and Flood 2014) draws k-th, by Box and Muller's transform.

    Args:
        numbers: [K] int64. start: where the table begins.
    """
    bits = table_bits(numbers, start)
    radius = ((bits >> 32 & 0xFFFFFFFF).double() + 0.5).mul_(2.0**-32).log_().mul_(-2.0).sqrt_()
    angle = (bits & 0xFFFFFFFF).double().mul_(2.0**-32 * 2.0 * math.pi)
    return radius.mul_(angle.cos_())


def table_bits(numbers: Tensor, start: int) -> Tensor:
    """Return the 64 bits of which such a table makes its numbers, as int64s: [K]. Overwrites `numbers`; see
    `table_normals`."""
    return _splitmix(numbers.add_(1).mul_(_signed(0x9E3779B97F4A7C15)).add_(start))


def _splitmix(x: Tensor) -> Tensor:
    """Apply SplitMix64's finalizer to int64s, in place. Products wrap around; shifts are made to shift in zeros."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
        x ^= (x >> shift) & ((1 << (64 - shift)) - 1)
        x *= _signed(factor)
    return x


def _signed(bits: int) -> int:
    """Return the int64 of these 64 bits."""
    return bits - (1 << 64) if bits >> 63 else bits


def add_noise(
    means: Tensor, quats: Tensor, log_scales: Tensor, logits: Tensor, rows: Tensor | None, first: int, start: int,
    scale: float, taken: Tensor | None, steepness: float, threshold: float,
) -> None:  # fmt: skip
    """See `cuda_ext.add_noise`."""
    if rows is None:
        rows = torch.arange(first, first + len(means), device=means.device)
    columns = torch.arange(3, device=means.device)
    size = scale if taken is None else scale * taken
    tensors = (means, quats, log_scales, logits, rows)
    for moved, turns, some_scales, some_logits, lines in zip(*(x.split(_PIECE) for x in tensors), strict=True):
        drawn = table_normals((lines[:, None] * 3 + columns).flatten(), start).float().view(-1, 3).to(means.dtype)
        gate = _sigmoid(steepness * (threshold - _sigmoid(some_logits)))
        frames = rotation_matrices(turns)
        along = _rotated(frames.mT, drawn) * (2 * some_scales).exp()
        moved.add_(size * gate[:, None] * _rotated(frames, along))


def _sigmoid(x: Tensor) -> Tensor:
    """Return 1 / (1 + exp(-x)). On a CPU, torch's own rounds the last few elements of a tensor unlike the rest."""
    return (1.0 + torch.exp(-x)).reciprocal()


def _rotated(matrices: Tensor, vectors: Tensor) -> Tensor:
    """Multiply vectors [N, 3] by matrices [N, 3, 3], summed in one order whatever N is."""
    x, y, z = (matrices * vectors[:, None]).unbind(-1)
    return x + y + z
