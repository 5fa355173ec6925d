"""The four axes of 4D Gaussians."""

from collections.abc import Mapping

import torch
from torch import Tensor

from cuda_ext.reference.conditioning import product, rotations_4d


@torch.no_grad()
def turn(params: Mapping[str, Tensor]) -> Tensor:
    """Factors [N, 4, 4] of the points' covariances over (t, x, y, z): a column for each axis, as long as its deviation.

    To the bit the same for a point whatever others there are, as `primitives.deterministic` wants it.

    Args:
        params: of `MovingGaussians`: `quats`, `motions`, `scales`, `durations`.
    """
    scales = torch.cat([params["durations"], params["scales"]], dim=-1).exp()
    left = params["quats"]
    return rotations_4d(left, product(left, params["motions"])) * scales[:, None, :]
