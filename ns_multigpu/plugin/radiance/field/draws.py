"""Random numbers seeded by purpose, never by rank: any number of ranks draws the same."""

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

_SAMPLES, _BACKGROUND = 3, 4
"""First seed numbers of a step's draws."""
_PRIMES = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)


def mixed(*key: int) -> int:
    """Hash numbers to a seed below 2^63."""
    value = 0x243F6A8885A308D3
    for number in key:
        value = (value ^ (number & (1 << 64) - 1)) * _PRIMES[0] & (1 << 64) - 1
        value = (value ^ value >> 30) * _PRIMES[1] & (1 << 64) - 1
        value = (value ^ value >> 27) * _PRIMES[2] & (1 << 64) - 1
    return value >> 1


def uniform(out: Tensor, *key: int) -> Tensor:
    """Fill `out` with numbers from 0 to 1 seeded by `key`, equal to torch.rand's within `drawn`. No other generator
    changes, and nothing waits."""
    if out.device not in _GENERATORS:
        _GENERATORS[out.device] = torch.Generator(out.device)
    return out.uniform_(generator=_GENERATORS[out.device].manual_seed(mixed(*key)))


_GENERATORS: dict[torch.device, torch.Generator] = {}


def jitter(out: Tensor, widths: Sequence[int], rays: int, *key: int) -> list[Tensor]:
    """Return random sample offsets from 0 to 1 of each level, [rays, width], as views of `out`.

    Args:
        out: [rays * sum(widths)] written. key: of the seed: the run's seed, the step, the cell.
    """
    uniform(out, key[0], _SAMPLES, *key[1:])
    return [part.view(rays, -1) for part in out.split([rays * width for width in widths])]


def background(out: Tensor, *key: int) -> Tensor:
    """Write the colours of a random background into `out`, any shape. See `jitter` for the key."""
    return uniform(out, key[0], _BACKGROUND, *key[1:])


@contextmanager
def drawn(device: torch.device | str, *key: int) -> Iterator[None]:
    """Seed torch and Python by `key` within the context, and restore their generators afterwards."""
    place, before = torch.device(device), random.getstate()
    with torch.random.fork_rng(devices=[place] if place.type == "cuda" else [], device_type="cuda"):
        seed = mixed(*key)
        if place.type == "cuda":
            with torch.cuda.device(place):
                torch.cuda.manual_seed(seed)
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would also seed all GPUs, permanently
        random.seed(seed)
        try:
            yield
        finally:
            random.setstate(before)
