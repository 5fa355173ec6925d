"""Random numbers keyed by their purpose, independent of the rank that draws them."""

import hashlib
from typing import cast

import torch


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
