"""Random numbers by what they are for, never by rank: any number of ranks draws the same."""

import random
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_PRIMES = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)


def mixed(*key: int) -> int:
    """A seed below 2^63 for a few numbers, another one for other numbers."""
    value = 0x243F6A8885A308D3
    for number in key:
        value = (value ^ (number & (1 << 64) - 1)) * _PRIMES[0] & (1 << 64) - 1
        value = (value ^ value >> 30) * _PRIMES[1] & (1 << 64) - 1
        value = (value ^ value >> 27) * _PRIMES[2] & (1 << 64) - 1
    return value >> 1


@contextmanager
def drawn(device: torch.device | str, *key: int) -> Iterator[None]:
    """Within, torch and Python draw what follows from `key`; their own generators go on behind it as if nothing was."""
    place, before = torch.device(device), random.getstate()
    with torch.random.fork_rng(devices=[place] if place.type == "cuda" else [], device_type="cuda"):
        seed = mixed(*key)
        if place.type == "cuda":
            with torch.cuda.device(place):
                torch.cuda.manual_seed(seed)
        torch.default_generator.manual_seed(seed)  # not torch.manual_seed: that would be of all GPUs, too, and stay
        random.seed(seed)
        try:
            yield
        finally:
            random.setstate(before)
