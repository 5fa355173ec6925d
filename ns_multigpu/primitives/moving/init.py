"""Initial 4D Gaussians."""

import math
from typing import Any

import torch
from torch import Tensor

from ns_multigpu.primitives.gaussians.init import initial_gaussians
from ns_multigpu.primitives.moving.schema import COSINES

FIRST_VARIANCE = 0.2
"""Of the first points in time, of which all there is is 1 (Yang et al. 2024's code). Points that begin longer than the
capture stay so, and blur what moves: nothing splits them in time."""


def initial_moving(
    seeds: tuple[Tensor, Tensor] | None, *, generator: torch.Generator, **options: Any
) -> dict[str, Tensor]:
    """Return raw parameters of the first 4D Gaussians: those of `initial_gaussians`, without motion, at random times.

    Args:
        seeds, generator, options: see `initial_gaussians`.

    Raises:
        ValueError: there is no seed point.
    """
    still = initial_gaussians(seeds, generator=generator, **options)
    n = len(still["means"])
    return still | {
        "times": torch.rand(n, 1, generator=generator),
        "motions": torch.tensor([[1.0, 0.0, 0.0, 0.0]]).repeat(n, 1),
        "durations": torch.full((n, 1), 0.5 * math.log(FIRST_VARIANCE)),
        "cosines_dc": torch.zeros(n, COSINES, 3),
        "cosines_rest": torch.zeros(n, COSINES, *still["features_rest"].shape[1:]),
    }
