"""Band-limited procedural patterns: value noise, fractal noise, pulse trains.

Every pattern takes the footprint of a pixel on the surface and fades out what is finer than it, so that a texture seen
from afar tends to its mean and does not alias (the clamping method of Norton, Rockwood and Skolmoski, "Clamping: a
method of antialiasing textured surfaces by bandwidth limiting in object space", SIGGRAPH 1982; pulses are integrated
exactly as in Apodaca and Gritz, "Advanced RenderMan", 1999, chapter 11).
"""

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

_SIZE = 256
_MASK = _SIZE - 1


@lru_cache(maxsize=32)
def _tables(seed: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return uniform random lattice values [65536] and the four corners of each lattice cell [65536, 4]."""
    generator = torch.Generator().manual_seed(seed)
    lattice = torch.rand(_SIZE, _SIZE, generator=generator)
    right = lattice.roll(-1, 1)
    corners = torch.stack((lattice, right, lattice.roll(-1, 0), right.roll(-1, 0)), dim=-1)
    return lattice.reshape(-1).to(device), corners.reshape(-1, 4).contiguous().to(device)


def hash_unit(seed: int, *keys: Tensor) -> Tensor:
    """Return a uniform number in [0, 1) for each tuple of integer keys.

    Args:
        seed: which table of random numbers.
        keys: integer tensors of one shape [N].

    Returns:
        [N] float32.
    """
    lattice, _ = _tables(seed, keys[0].device)
    mixed = torch.zeros_like(keys[0], dtype=torch.int64)
    for key in keys:
        mixed = (mixed * 40503 + key) * 7919
        mixed = mixed ^ (mixed >> 7)
    return lattice.index_select(0, (mixed ^ (mixed >> 16)) & 0xFFFF)


def value_noise(seed: int, u: Tensor, v: Tensor) -> Tensor:
    """Return value noise of unit wavelength, periodic every 256 units, in [0, 1] with mean one half.

    Args:
        seed: which lattice.
        u, v: [N] coordinates.

    Returns:
        [N] float32.
    """
    _, corners = _tables(seed, u.device)
    fu, fv = u.floor(), v.floor()
    index = ((fv.long() & _MASK) << 8) | (fu.long() & _MASK)
    a, b, c, d = corners.index_select(0, index).unbind(1)
    x, y = u - fu, v - fv
    x = x * x * (3.0 - 2.0 * x)
    y = y * y * (3.0 - 2.0 * y)
    low = a + (b - a) * x
    return low + (c + (d - c) * x - low) * y


def value_noise_3d(seed: int, u: Tensor, v: Tensor, w: Tensor) -> Tensor:
    """Return value noise in space: two layers of the plane's lattice, shifted by their height and blended."""
    layer = w.floor()
    z = w - layer
    z = z * z * (3.0 - 2.0 * z)
    # Shifts by whole numbers keep the lattice; primes keep layers apart.
    low = value_noise(seed, u + 37.0 * layer, v + 101.0 * layer)
    high = value_noise(seed, u + 37.0 * (layer + 1.0), v + 101.0 * (layer + 1.0))
    return low + (high - low) * z


def fractal(
    seed: int, u: Tensor, v: Tensor, footprint: Tensor, wavelengths: Sequence[float], gains: Sequence[float]
) -> Tensor:
    """Return a sum of octaves of centred value noise, each faded if it is finer than the footprint.

    Args:
        seed: which lattice.
        u, v: [N] coordinates in metres.
        footprint: [N] width of a pixel on the surface in metres.
        wavelengths: of each octave, in metres.
        gains: amplitude of each octave.

    Returns:
        [N] float32, mean 0; at most sum(gains) / 2 in size.
    """
    total = torch.zeros_like(u)
    for octave, (wavelength, gain) in enumerate(zip(wavelengths, gains, strict=True)):
        frequency = 1.0 / wavelength
        fade = (1.25 - (2.5 * frequency) * footprint).clamp(0.0, 1.0)
        if not bool(fade.any()):
            continue
        shift = 17.3 * octave
        total += (gain * fade) * (value_noise(seed, u * frequency + shift, v * frequency - shift) - 0.5)
    return total


def pulse(x: Tensor, width: Tensor, start: Tensor | float, end: Tensor | float) -> Tensor:
    """Return the pulse train that is 1 where frac(x) is in [start, end), averaged over a box around x.

    Args:
        x: [N] coordinate in periods.
        width: [N] width of the box in periods.
        start, end: 0 <= start <= end <= 1, numbers or [N].

    Returns:
        [N] float32 in [0, 1].
    """
    width = width.clamp_min(1e-3)
    share = end - start

    def integral(at: Tensor) -> Tensor:
        whole = at.floor()
        part = (at - whole - start).clamp_min(0.0)
        return whole * share + (part.minimum(share) if isinstance(share, Tensor) else part.clamp_max(share))

    # Beyond a few periods the mean is exact enough, and a wide box would cost precision.
    half = width.clamp_max(4.0) * 0.5
    return ((integral(x + half) - integral(x - half)) / (2.0 * half)).clamp(0.0, 1.0)


def stripe(x: Tensor, width: Tensor, centre: Tensor | float, half: Tensor | float) -> Tensor:
    """Return one stripe [centre - half, centre + half] averaged over a box of the given width around x, in [0, 1]."""
    width = width.clamp_min(1e-3)
    low = (x - centre - width * 0.5).clamp_min(-half)
    high = (x - centre + width * 0.5).clamp_max(half)
    return ((high - low) / width).clamp(0.0, 1.0)


def mix(a: Tensor, b: Tensor, weight: Tensor) -> Tensor:
    """Return a + (b - a) * weight for colours [3, N] (or [3, 1]) and weights [N]."""
    return a + (b - a) * weight
