"""The noise of MCMC on the means of Gaussians: one launch, where torch's operators are sixty."""

from typing import Any

import torch
from torch import Tensor

from cuda_ext.dispatch.load import compiled_serves
from cuda_ext.ops.common.checks import check_floats, check_tensors
from cuda_ext.reference import noise as reference


@torch.no_grad()
def add_noise(
    means: Tensor, quats: Tensor, log_scales: Tensor, logits: Tensor, *, start: int, scale: float, steepness: float,
    threshold: float, first: int = 0, rows: Tensor | None = None, taken: Tensor | None = None,
) -> None:  # fmt: skip
    """Move means by scale * gate * covariance @ noise (Kheradmand et al. 2024, equation 10), in place.

    The gate is sigmoid(steepness * (threshold - opacity)). The noise is three normal numbers: a Gaussian's line of an
    endless table that `start` determines (see `cuda_ext.reference.noise.table_normals`). It does not depend on the rank
    that holds the Gaussian. The same inputs give the same bits on one type of device; others may round differently.

    Args:
        means: [N, 3], contiguous; overwritten. quats: [N, 4] (w, x, y, z) of any length but zero.
        log_scales: [N, 3]. logits: [N], of the opacities.
        start: where the table begins. first: line of the first Gaussian; the others follow it.
        rows: [N] int64, the lines, where they do not follow each other.
        scale: a factor. taken: [] another on the device.

    Raises:
        TypeError, ValueError: types or shapes are wrong.
        NativeBuildError: the operators cannot be compiled.
    """
    points = means.shape[0]
    check_floats(
        means, means=(means, (-1, 3)), quats=(quats, (points, 4)), log_scales=(log_scales, (points, 3)),
        logits=(logits, (points,)), **({} if taken is None else {"taken": (taken, ())}),
    )  # fmt: skip
    if rows is not None:
        check_tensors(torch.int64, means.device, rows=(rows, (points,)))
    op: Any = torch.ops.ns_multigpu.add_noise if compiled_serves(means) else reference.add_noise
    op(means, quats, log_scales, logits, rows, first, start, scale, taken, steepness, threshold)
