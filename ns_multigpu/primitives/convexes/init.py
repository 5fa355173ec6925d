"""Initial 3D convexes."""

import math
from typing import Any

import torch
from torch import Tensor

from cuda_ext.ops.raster.convexes import CORNERS
from ns_multigpu.primitives.gaussians.init import initial_gaussians

SIZE = 1.2
"""The first convexes' radius, in units of the mean distance to the three nearest others (the published code's)."""
DELTA = 100.0
"""The first delta times that distance: the published 0.1, at a focal length of 1000 pixels."""
STEEPNESS = 4.0
"""The first delta times sigma times that distance squared. With the published sigma it depends on the scene's unit;
this is what it gives where seed points are 0.04 apart. A first convex is then dense at its centre, soft at its rim."""


def initial_convexes(
    seeds: tuple[Tensor, Tensor] | None, *, scale: float = 1.0, generator: torch.Generator, **options: Any
) -> dict[str, Tensor]:
    """Return raw parameters of the first convexes: six corners on a sphere around each seed point, spread by a
    Fibonacci spiral (Held et al. 2024, section 3.4).

    Args:
        seeds, options, generator: see `initial_gaussians`. scale: factor on the convexes' size.

    Raises:
        ValueError: there is no seed point, or opacity or scale is out of range.
    """
    still = initial_gaussians(seeds, scale=scale, generator=generator, **options)
    spacing = still["scales"][:, :1]  # a logarithm, with `scale` in it
    corners = (SIZE * spacing.exp())[..., None] * fibonacci_sphere(CORNERS)
    deltas = math.log(DELTA) - spacing
    return {
        "means": still["means"],
        "corners": corners.flatten(1),
        "deltas": deltas,
        "sigmas": math.log(STEEPNESS) - 2 * spacing - deltas,
        **{name: still[name] for name in ("opacities", "features_dc", "features_rest")},
    }


def fibonacci_sphere(count: int) -> Tensor:
    """Return `count` evenly spread directions [count, 3]: equal steps along an axis, the golden angle around."""
    number = torch.arange(count, dtype=torch.float32)
    height = 1 - 2 * number / (count - 1)
    around, radius = number * (math.pi * (3 - math.sqrt(5))), (1 - height * height).clamp(min=0).sqrt()
    return torch.stack([radius * around.cos(), height, radius * around.sin()], dim=-1)
