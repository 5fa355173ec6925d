"""Random numbers that depend on what they are for, never on who draws them."""

import hashlib
from typing import cast

import torch
from torch import Tensor

from cuda_ext.reference.noise import table_normals

_ROWS = 1 << 22
"""Rows of normals generated at a time, which bounds the temporary memory."""


def seed_from(*key: int | str) -> int:
    """Return a 63-bit seed of a key, such as (run seed, purpose, step, view): the same on every machine."""
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in key)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def keyed_generator(*key: int | str, device: torch.device | str = "cpu") -> torch.Generator:
    """Return a generator on `device`, seeded by a key."""
    return torch.Generator(device).manual_seed(seed_from(*key))


def keyed_permutation(count: int, *key: int | str) -> list[int]:
    """Return a permutation of range(count), drawn by a key."""
    order = torch.randperm(count, generator=keyed_generator(*key))
    return cast(list[int], order.tolist())


def keyed_normals(
    seed: int, name: str, step: int, first: int, count: int, width: int, device: torch.device | str = "cpu"
) -> Tensor:
    """Return rows [first, first + count) of an endless table of standard normal numbers, [count, width] float32.

    The table follows from (seed, name, step, width): every rank that computes a part of it gets the same numbers.
    Number k is made of the k-th 64 bits of SplitMix64 (Steele, Lea and Flood 2014) by the Box-Muller transform in
    float64. The last bit may differ between device types.
    """
    table = torch.empty(count, width, device=device)
    start = seed_from(seed, name, step)
    for row in range(0, count, _ROWS):
        part = table[row : row + _ROWS]
        numbers = torch.arange(part.numel(), device=device) + (first + row) * width
        part.copy_(table_normals(numbers, start).view_as(part))
    return table
