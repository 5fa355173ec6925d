"""Corrected poses in torch's operators, differentiable: see `cuda_ext.ops.optim.poses`."""

import torch
from torch import Tensor

_SMALL = 1e-4
"""Squared angle below which nerfstudio's maps are approximated. Gradients there are those of the approximation."""


def corrected(viewmats: Tensor, corrections: Tensor, se3: bool) -> tuple[Tensor, Tensor]:
    """Return rotations [B, 3, 3] and translations [B, 3] of corrected world-to-camera matrices.

    All products are sums of elementwise ones: products of matrices may be of lower precision on a GPU.

    Args:
        viewmats: [B, 4, 4]. corrections: [B, 6].
        se3: whether by `exp_map_SE3` of nerfstudio, or by `exp_map_SO3xR3`.
    """
    shift, turn = corrections[:, :3], corrections[:, 3:]
    squared = turn.square().sum(1, keepdim=True)
    if not se3:
        angle = squared.clamp(min=_SMALL).sqrt()
        along, across = angle.sin() / angle, (1 - angle.cos()) / angle.square()
        straight = 1 - across * squared
    else:
        small = squared < _SMALL
        angle = torch.where(small, 1.0, squared).sqrt()
        sine, straight = angle.sin(), torch.where(small, 8 / (4 + squared) - 1, angle.cos())
        along = torch.where(small, 0.5 * straight + 0.5, sine / angle)
        across = torch.where(small, 0.5 * along, (1 - straight) / angle.square())
        screw = torch.where(small, 1 / 6 - squared / 120, (angle - sine) / angle**3)
        shift = (
            torch.where(small, 1 - squared / 6, along) * shift
            + torch.where(small, 0.5 - squared / 24, across) * torch.linalg.cross(turn, shift)
            + screw * turn * (turn * shift).sum(1, keepdim=True)
        )
    eye = torch.eye(3, dtype=turn.dtype, device=turn.device)
    # Its column j is the product of the rotation vector and axis j.
    skew = torch.linalg.cross(turn[:, :, None].expand(-1, 3, 3), eye.expand(len(turn), 3, 3), dim=1)
    inverse = straight[:, None] * eye - along[:, None] * skew + across[:, None] * turn[:, :, None] * turn[:, None]
    axes, offset = viewmats[:, :3, :3], viewmats[:, :3, 3]
    rotation = (axes[..., None] * inverse[:, None]).sum(2)
    middle = (axes * offset[:, :, None]).sum(1) - shift
    return rotation, (rotation * middle[:, None]).sum(2)
