"""The four axes of 4D Gaussians."""

from collections.abc import Mapping

import torch
from torch import Tensor

from cuda_ext.reference.conditioning import rotations_4d


@torch.no_grad()
def turn(params: Mapping[str, Tensor]) -> Tensor:
    """Factors [N, 4, 4] of the points' covariances over (t, x, y, z): a column for each axis, as long as its deviation.

    To the bit the same for a point whatever others there are, as `primitives.steady` wants it.

    Args:
        params: of `MovingGaussians`: `quats`, `motions`, `scales`, `durations`.
    """
    scales = torch.cat([params["durations"], params["scales"]], dim=-1).exp()
    return rotations_4d(params["quats"], right_of(params)) * scales[:, None, :]


def right_of(params: Mapping[str, Tensor]) -> Tensor:
    """The right ones [N, 4] of the points' two quaternions (see `cuda_ext.condition`): `quats` times `motions`.

    So `quats` turns a point in space, whatever its motion. Had each of the two a learning rate of its own, any step of
    either would move the point.
    """
    a, b, c, d = params["quats"].unbind(-1)
    p, q, r, s = params["motions"].unbind(-1)
    product = (
        a * p - b * q - c * r - d * s, a * q + b * p + c * s - d * r,
        a * r - b * s + c * p + d * q, a * s + b * r - c * q + d * p,
    )  # fmt: skip
    return torch.stack(product, dim=-1)
