"""Axes of 4D Gaussians, from their quaternions and scales."""

from collections.abc import Mapping

import torch
from torch import Tensor

from cuda_ext.reference.conditioning import product, rotations_4d


@torch.no_grad()
def turn(params: Mapping[str, Tensor]) -> Tensor:
    """Return factors [N, 4, 4] of the points' covariances over (t, x, y, z). Each column is an axis scaled by its
    deviation.

    Bitwise independent of the other points, as `primitives.deterministic` requires.

    Args:
        params: of `MovingGaussians`: `quats`, `motions`, `scales`, `durations`.
    """
    scales = torch.cat([params["durations"], params["scales"]], dim=-1).exp()
    left = params["quats"]
    return rotations_4d(left, product(left, params["motions"])) * scales[:, None, :]
