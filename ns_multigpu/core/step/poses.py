"""Pose corrections: six numbers for each training view, trained with the points, as nerfstudio's camera optimizer has
them (a shift, then a rotation vector).

A correction is a rotation R and a shift t of the world. A camera with the axes C and the centre o gets the axes R C and
the centre o + t. Its world-to-camera matrix (A | b) becomes (A R^T | A R^T (A^T b - t)).

All products are sums of elementwise ones: products of matrices may be of lower precision on a GPU.
"""

from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from cuda_ext.ops.optim.adam import adam_step
from ns_multigpu.core.dist.collectives import all_gather_into
from ns_multigpu.core.dist.world import World
from ns_multigpu.core.exchange.transport import Collective, Parts

Mode = Literal["SO3xR3", "SE3"]
_SMALL = 1e-4
"""Squared angle below which nerfstudio's maps are approximated. Gradients there are those of the approximation."""


def corrected(viewmats: Tensor, corrections: Tensor, mode: Mode) -> tuple[Tensor, Tensor]:
    """Return rotations [B, 3, 3] and translations [B, 3] of corrected world-to-camera matrices. Differentiable.

    Args:
        viewmats: [B, 4, 4]. corrections: [B, 6].
        mode: how six numbers become a rotation and a shift: `exp_map_SO3xR3` or `exp_map_SE3` of nerfstudio.
    """
    shift, turn = corrections[:, :3], corrections[:, 3:]
    squared = turn.square().sum(1, keepdim=True)
    if mode == "SO3xR3":
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


@dataclass
class StepPoses:
    """The corrections in a step that reads nothing back. Every rank has all of them, and takes the same steps.

    Args:
        corrections: [N, 6] of all training views, contiguous; changed by steps.
        exp_avg, exp_avg_sq: [N, 6] Adam's moments.
        views: of a batch.
        mode: see `corrected`.
        penalties: weights in the loss of the mean length of shifts, and of rotation vectors.
        world: ranks over which gradients are summed; None where each rank has those of all points.

    Attributes:
        indices: [B] index of each view's correction. given: [B, 4, 4] the views' matrices. Both are inputs of the step.
        viewmats: [B, 4, 4] the corrected matrices.
        v_viewmats: [B, 4, 4] the loss's gradient by them, of this rank's points.
    """

    corrections: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    views: int
    mode: Mode
    penalties: tuple[float, float]
    world: World | None
    indices: Tensor = field(init=False)
    given: Tensor = field(init=False)

    def __post_init__(self) -> None:
        # CUDA graphs hold these addresses: the tensors are never reallocated.
        new = self.corrections.new_zeros
        self.indices, self.given = new(self.views), new(self.views, 4, 4)
        self.viewmats = torch.eye(4).to(self.corrections).repeat(self.views, 1, 1)
        self.v_viewmats = new(self.views, 4, 4)
        self._of_ranks = new(1 if self.world is None else self.world.size, self.views, 4, 4)

    def begin(self) -> None:
        """Correct the matrices of the step's views, and clear their gradients."""
        rotation, translation = corrected(self.given, self.corrections.index_select(0, self.indices.long()), self.mode)
        self.viewmats[:, :3, :3] = rotation
        self.viewmats[:, :3, 3] = translation
        self.v_viewmats.zero_()

    def step(self, scalars: Tensor) -> Parts[None]:
        """Take Adam's step.

        Args:
            scalars: [1, 8], see `cuda_ext.ops.optim.adam.adam_scalars`; of no step where the step is not to count.
        """
        total = self.v_viewmats
        if self.world is not None and self.world.size > 1:
            world = self.world
            yield Collective(lambda: all_gather_into(self._of_ranks, self.v_viewmats, world))
            total = self._of_ranks.sum(0)
        adam_step([self.corrections], [self._gradient(total)], [self.exp_avg], [self.exp_avg_sq], scalars)

    def _gradient(self, v_viewmats: Tensor) -> Tensor:
        """Return the loss's gradient [N, 6] by the corrections."""
        which = self.indices.long()
        # Autograd's graph must not span a collective, where a CUDA graph ends: `corrected` is run again.
        with torch.enable_grad():
            used = self.corrections.index_select(0, which).requires_grad_()
            found = corrected(self.given, used, self.mode)
        (by_view,) = torch.autograd.grad(found, used, (v_viewmats[:, :3, :3], v_viewmats[:, :3, 3]))
        # A view may be in a batch twice. Each of its places gets the same sum, so either may be copied.
        same = (which[:, None] == which).to(by_view.dtype)
        gradient = self._penalised()
        total = gradient.index_select(0, which) + (same[:, :, None] * by_view).sum(1)
        return gradient.index_copy_(0, which, total)

    def _penalised(self) -> Tensor:
        """Return the gradient [N, 6] of the penalties."""
        parts: list[Tensor] = []
        for weight, part in zip(self.penalties, self.corrections.split(3, 1), strict=True):
            length = part.norm(dim=1, keepdim=True)
            parts.append(torch.where(length > 0, part / length, 0.0) * (weight / len(part)))
        return torch.cat(parts, 1)
