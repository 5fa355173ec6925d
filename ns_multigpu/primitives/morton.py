"""The order of points along a Morton curve: neighbours in it are neighbours in space, mostly."""

import torch
from torch import Tensor

MORTON_BITS = 20
"""Bits an axis. A code has three times as many, and leaves room in an int64 for two bits that break ties."""


def reach(means: Tensor) -> Tensor:
    """The greatest distance along an axis of positions [N, 3] from the origin, [] float64; 0 of none."""
    return _positions(means).abs().amax() if len(means) else torch.zeros((), dtype=torch.float64, device=means.device)


def morton_codes(means: Tensor, within: Tensor | None = None) -> Tensor:
    """The Morton codes of positions [N, 3], [N] int64: 20 bits an axis of a cube around all of them, interleaved.

    The cube's middle is the origin and its side a power of two: where a few points move outwards and it has to double,
    all others keep their order (but for those that the coarser cells no longer tell apart).

    Args:
        means: the positions; what is not finite counts as 0.
        within: see `reach`; of these positions unless given.
    """
    furthest = (reach(means) if within is None else within).clamp_min(1e-30)
    half_side = furthest / furthest.frexp().mantissa  # 2^e, where furthest = mantissa * 2^e
    half = 1 << (MORTON_BITS - 1)
    cells = (_positions(means) / half_side * half).floor().long() + half
    x, y, z = (_spread(cell) for cell in cells.clamp_(0, (1 << MORTON_BITS) - 1).unbind(-1))
    return x | y << 1 | z << 2


def morton_order(means: Tensor) -> Tensor:
    """The permutation [N] int64 that brings positions [N, 3] into the order of their Morton codes; ties stay."""
    return torch.sort(morton_codes(means), stable=True).indices


def _positions(means: Tensor) -> Tensor:
    return means.detach().double().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)


def _spread(x: Tensor) -> Tensor:
    """The 20 lowest bits of int64s, two zeros between each and the next."""
    for shift, mask in (
        (32, 0x001F00000000FFFF),
        (16, 0x001F0000FF0000FF),
        (8, 0x100F00F00F00F00F),
        (4, 0x10C30C30C30C30C3),
        (2, 0x1249249249249249),
    ):
        x = (x | (x << shift)) & mask
    return x
