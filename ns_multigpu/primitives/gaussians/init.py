"""Initial Gaussians."""

import math

import numpy as np
import scipy  # its parts are loaded when they are first asked for
import torch
from torch import Tensor

SH_C0 = 0.28209479177387814
"""The constant spherical harmonic, 1 / (2 sqrt(pi))."""

SMALLEST_SPACING = 1e-7
"""Seed points may coincide; their Gaussians' size still needs a logarithm."""


def initial_gaussians(
    seeds: tuple[Tensor, Tensor] | None, *, sh_degree: int, count: int, extent: float, generator: torch.Generator,
    opacity: float = 0.1, scale: float = 1.0,
) -> dict[str, Tensor]:  # fmt: skip
    """Return raw parameters of the first Gaussians (Kerbl et al. 2023, section 5.1; Splatfacto's conventions).

    Args:
        seeds: positions [N, 3] and colours [N, 3] in 0..255 (or no colours, [0, 3]); None scatters random ones.
        sh_degree: highest degree of spherical harmonics; 0 means plain colours, stored as logits.
        count, extent: how many random ones, in a cube of which side.
        generator: for all that is random.
        opacity: of each, in (0, 1).
        scale: standard deviations in units of the mean distance to the three nearest others.

    Returns:
        means [N, 3], scales [N, 3] (log), quats [N, 4], opacities [N, 1] (logits of `opacity`), features_dc [N, 3],
        features_rest [N, (sh_degree + 1)^2 - 1, 3], float32.

    Raises:
        ValueError: there is no seed point, or opacity or scale is out of range.
    """
    if not 0 < opacity < 1 or not 0 < scale < math.inf:
        raise ValueError(f"opacity {opacity} must be above 0 and below 1, and scale {scale} above 0")
    if seeds is None:
        means = (torch.rand(count, 3, generator=generator) - 0.5) * extent
    else:
        means = seeds[0].detach().float().cpu()
    n = len(means)
    if n == 0:
        raise ValueError("no point to start from: give seed points or use random initialisation")
    spacing = torch.from_numpy(_mean_spacing(means.numpy())).clamp(min=SMALLEST_SPACING)
    features_rest = torch.zeros(n, (sh_degree + 1) ** 2 - 1, 3)
    if seeds is not None and len(seeds[1]) > 0:
        colors = seeds[1].detach().float().cpu() / 255.0
        features_dc = (colors - 0.5) / SH_C0 if sh_degree > 0 else torch.logit(colors, eps=1e-6)
    else:
        features_dc = torch.rand(n, 3, generator=generator)
    quats = torch.nn.functional.normalize(torch.randn(n, 4, generator=generator), dim=-1)
    return {
        "means": means.clone(),
        "scales": (spacing.log() + math.log(scale))[:, None].repeat(1, 3),
        "quats": quats,
        "opacities": torch.logit(torch.full((n, 1), opacity)),
        "features_dc": features_dc,
        "features_rest": features_rest,
    }


def _mean_spacing(points: np.ndarray) -> np.ndarray:
    """Return the mean distance of each point to its three nearest others, [N] float32."""
    nearest = min(3, len(points) - 1)
    if nearest < 1:
        return np.ones(len(points), dtype=np.float32)
    distances, _ = scipy.spatial.KDTree(points).query(points, k=nearest + 1, workers=-1)
    return distances[:, 1:].mean(axis=1).astype(np.float32)
