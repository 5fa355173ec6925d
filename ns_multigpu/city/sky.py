"""Sky, sun, and visibility of the sky from each place."""

import numpy as np
import scipy  # its parts are loaded when they are first asked for
import torch
from numpy.typing import NDArray
from torch import Tensor

from ns_multigpu.city.noise import value_noise
from ns_multigpu.city.solids import Shape, Solids

_AZIMUTH, _ELEVATION = np.deg2rad(218.0), np.deg2rad(41.0)
SUN = np.array([np.cos(_ELEVATION) * np.cos(_AZIMUTH), np.cos(_ELEVATION) * np.sin(_AZIMUTH), np.sin(_ELEVATION)])
"""Unit vector towards the sun."""
SUNLIGHT = (2.75, 2.48, 2.02)
SKYLIGHT = (0.46, 0.58, 0.80)
BOUNCE = (0.30, 0.27, 0.23)
"""Light of the sun, of the whole sky, and from the ground, linear."""
HAZE = (0.68, 0.77, 0.88)
HAZE_LENGTH = 6000.0
"""Colour of far things, and the distance at which they are mostly that, metres."""

AO_STEP = 2.0
"""Side of a texel of the map of surrounding heights, metres."""


def sky_colour(d: Tensor, clouds: bool = True) -> Tensor:
    """Return the colour [3, n] of the sky in unit directions [3, n]; below the horizon, haze."""
    up = d[2].clamp(0.0, 1.0)
    horizon, zenith = (torch.tensor(c, device=d.device)[:, None] for c in (HAZE, (0.17, 0.36, 0.74)))
    colour = zenith + (horizon - zenith) * (1 - up).pow(3.2)
    sun = torch.tensor(SUN, dtype=torch.float32, device=d.device)
    glow = (d * sun[:, None]).sum(0).clamp_min(0)
    colour = colour + torch.tensor([[1.0], [0.85], [0.6]], device=d.device) * (0.9 * glow.pow(90) + 0.16 * glow.pow(8))
    if clouds:
        u, v = d[0] / (up + 0.12), d[1] / (up + 0.12)
        total = torch.zeros_like(u)
        for octave, gain in enumerate((0.55, 0.28, 0.14, 0.07)):
            scale = 1.1 * 2.1**octave
            total = total + gain * value_noise(201, u * scale + octave * 5, v * scale + 3)
        cover = ((total - 0.50) * 3.2).clamp(0, 1) * (up * 4).clamp(0, 1) * 0.8
        colour = colour + (0.98 - colour) * cover
    return colour


class Surroundings:
    """Visibility of the sky from any place: ambient occlusion approximated from blurred heights.

    Two maps of the solids' heights are kept, blurred over a street's width and over a step. A place below its
    surroundings' mean height loses sky in proportion to its depth.
    """

    def __init__(self, layers: list[Solids], half: float) -> None:
        self.half = half
        n = int(np.ceil(2 * half / AO_STEP))
        heights = np.zeros((n, n), np.float32)
        for solids in layers:
            low, high = solids.bounds()
            # A crown lets light through and ends above the ground: it counts as half of its height.
            tall = high[:, 2] * (0.5 if solids.shape is Shape.BLOB else 1.0)
            _raise(heights, low, high, tall, half)
        wide = scipy.ndimage.gaussian_filter(heights, 9.0 / AO_STEP, mode="nearest")
        tight = scipy.ndimage.gaussian_filter(heights, 1.6 / AO_STEP, mode="nearest")
        self.maps = torch.from_numpy(np.stack([wide.ravel(), tight.ravel()]))
        self.n = n

    def to(self, device: torch.device) -> "Surroundings":
        """Return the same on another device."""
        moved = object.__new__(Surroundings)
        moved.half, moved.n, moved.maps = self.half, self.n, self.maps.to(device)
        return moved

    def openness(self, x: Tensor, y: Tensor, z: Tensor) -> Tensor:
        """Return the fraction [n] of the sky's light at a place, in (0, 1]."""
        u = ((x + self.half) / AO_STEP - 0.5).clamp(0, self.n - 1.001)
        v = ((y + self.half) / AO_STEP - 0.5).clamp(0, self.n - 1.001)
        iu, iv = u.floor(), v.floor()
        fu, fv = u - iu, v - iv
        at = iv.long() * self.n + iu.long()

        def read(table: Tensor) -> Tensor:
            a, b = table.index_select(0, at), table.index_select(0, at + 1)
            c, e = table.index_select(0, at + self.n), table.index_select(0, at + self.n + 1)
            low = a + (b - a) * fu
            return low + (c + (e - c) * fu - low) * fv

        deep = (read(self.maps[0]) - z).clamp_min(0) * (1 / 13.0)
        close = (read(self.maps[1]) - z).clamp_min(0) * (1 / 22.0)
        return 1.0 / (1.0 + deep + close)


def _raise(heights: NDArray[np.float32], low: NDArray, high: NDArray, tall: NDArray, half: float) -> None:
    """Raise the texels whose middle is inside a solid's bounding box to its height; smaller solids are ignored."""
    first = np.ceil((low[:, :2] + half) / AO_STEP - 0.5).astype(np.int64).clip(0, len(heights))
    last = np.floor((high[:, :2] + half) / AO_STEP - 0.5).astype(np.int64).clip(-1, len(heights) - 1)
    spans = (last - first + 1).clip(0)
    counts = spans[:, 0] * spans[:, 1]
    owner = np.repeat(np.arange(len(counts)), counts)
    rank = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)
    x = first[owner, 0] + rank % spans[owner, 0].clip(1)
    y = first[owner, 1] + rank // spans[owner, 0].clip(1)
    np.maximum.at(heights, (y, x), tall[owner].astype(np.float32))
