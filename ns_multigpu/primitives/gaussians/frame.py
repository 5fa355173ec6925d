"""Gaussians in another frame of space."""

import math
from collections.abc import Callable, Mapping

import torch
from scipy.spatial.transform import Rotation
from torch import Tensor

from cuda_ext.reference.projection import sh_basis
from ns_multigpu.core.schema import degree_of

_DIRECTIONS = 64
"""Directions at which harmonics are compared: more than the coefficients of any degree."""


def moved(points: Mapping[str, Tensor], transform: Tensor, scale: float) -> dict[str, Tensor]:
    """Return Gaussians that look in the new frame as `points` do in theirs.

    Args:
        points: raw parameters, see `initial_gaussians`, or some of them; two or three scales. Each keeps its dtype.
        transform: [3, 4] a rotation, or a reflection, and a translation.
        scale: factor on lengths, after the transform.

    Raises:
        ValueError: the transform is no rotation.
    """
    rotation, shift = transform.double().cpu().split((3, 1), dim=1)
    if not torch.allclose(rotation @ rotation.T, torch.eye(3, dtype=torch.float64), atol=1e-4):
        raise ValueError(f"{rotation.tolist()} is no rotation")
    proper = rotation * rotation.det().sign()  # an ellipsoid is its own mirror image
    x, y, z, w = Rotation.from_matrix(proper.numpy()).as_quat().tolist()
    product = torch.tensor([[w, -x, -y, -z], [x, w, -z, y], [y, z, w, -x], [z, -y, x, w]], dtype=torch.float64)
    changes: dict[str, Callable[[Tensor], Tensor]] = {
        "means": lambda value: (value @ rotation.T + shift.T) * scale,
        "quats": lambda value: value @ product.T,
        "scales": lambda value: value + math.log(scale),
        "features_rest": lambda value: _rotated(value, rotation),
    }
    return {k: changes[k](v.double()).to(v.dtype) if k in changes else v for k, v in points.items()}


def _rotated(rest: Tensor, rotation: Tensor) -> Tensor:
    """Return coefficients [N, K, 3] of harmonics above degree 0 in directions turned by `rotation` [3, 3]."""
    directions = torch.randn(_DIRECTIONS, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    directions = torch.nn.functional.normalize(directions, dim=-1)
    degree, result = degree_of(rest.shape[1]), torch.empty_like(rest)
    before, after = (sh_basis(degree, some) for some in (directions, directions @ rotation.T))
    for band in range(1, degree + 1):
        part = slice(band * band, (band + 1) ** 2)
        own = slice(part.start - 1, part.stop - 1)
        result[:, own] = torch.linalg.lstsq(after[:, part], before[:, part]).solution @ rest[:, own]
    return result
