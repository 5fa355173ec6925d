# torch annotates only part of itself:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
"""Random numbers that depend on what they are for, never on who draws them."""

import hashlib
import math
from typing import cast

import torch
from torch import Tensor

_ROWS = 1 << 22
"""Rows of normals made at a time: what is needed beside the result stays small."""


def seed_from(*key: int | str) -> int:
    """A 63-bit seed from a key, such as (run seed, purpose, step, view): the same everywhere, always."""
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in key)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def keyed_generator(*key: int | str, device: torch.device | str = "cpu") -> torch.Generator:
    """A generator on `device`, seeded by a key."""
    return torch.Generator(device).manual_seed(seed_from(*key))


def keyed_permutation(count: int, *key: int | str) -> list[int]:
    """A permutation of range(count), drawn by a key."""
    order = torch.randperm(count, generator=keyed_generator(*key))
    return cast(list[int], order.tolist())


def keyed_normals(
    seed: int, name: str, step: int, first: int, count: int, width: int, device: torch.device | str = "cpu"
) -> Tensor:
    """Rows [first, first + count) of an endless table of standard normal numbers, [count, width] float32.

    The table follows from (seed, name, step, width): whoever makes a part of it finds the same numbers there. Its
    number k is made of 64 bits that SplitMix64 (Steele, Lea and Flood 2014) draws k-th, by Box and Muller's transform,
    in float64; on another kind of device the last bit may be another.
    """
    table = torch.empty(count, width, device=device)
    start = _signed(seed_from(seed, name, step))
    for row in range(0, count, _ROWS):
        part = table[row : row + _ROWS]
        _normals(torch.arange(part.numel(), device=device) + (first + row) * width, start, part)
    return table


def keyed_normals_at(seed: int, name: str, step: int, rows: Tensor, width: int) -> Tensor:
    """Any rows [M] int64 of the table of `keyed_normals`: [M, width] float32."""
    table = torch.empty(len(rows), width, device=rows.device)
    start = _signed(seed_from(seed, name, step))
    columns = torch.arange(width, device=rows.device)
    for numbers, part in zip(rows.split(_ROWS), table.split(_ROWS), strict=True):
        _normals((numbers[:, None] * width + columns).flatten(), start, part)
    return table


def _normals(numbers: Tensor, start: int, out: Tensor) -> None:
    """Those of these numbers, [K] int64, in the table that begins at `start`; overwrites them."""
    bits = _splitmix(numbers.add_(1).mul_(_signed(0x9E3779B97F4A7C15)).add_(start))
    radius = ((bits >> 32 & 0xFFFFFFFF).double() + 0.5).mul_(2.0**-32).log_().mul_(-2.0).sqrt_()
    angle = (bits & 0xFFFFFFFF).double().mul_(2.0**-32 * 2.0 * math.pi)
    out.copy_(radius.mul_(angle.cos_()).view_as(out))


def _splitmix(x: Tensor) -> Tensor:
    """SplitMix64's finalizer of int64s, in place. Products wrap around; shifts are made to bring in zeros."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
        x ^= (x >> shift) & ((1 << (64 - shift)) - 1)
        x *= _signed(factor)
    return x


def _signed(bits: int) -> int:
    """The int64 of these 64 bits."""
    return bits - (1 << 64) if bits >> 63 else bits
