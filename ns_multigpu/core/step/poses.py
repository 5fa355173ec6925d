"""Pose corrections in a fused step: six numbers for each training view, trained with the points. See
`cuda_ext.ops.optim.poses`."""

from dataclasses import dataclass, field

from torch import Tensor

from cuda_ext.ops.optim.adam import adam_step
from cuda_ext.ops.optim.poses import Mode, correct_views, correction_gradients
from ns_multigpu.core.dist.collectives import all_gather_into
from ns_multigpu.core.dist.world import World
from ns_multigpu.core.exchange.transport import Collective, Parts


@dataclass
class StepPoses:
    """The corrections in a step that reads nothing back. Every rank has all of them, and takes the same steps.

    Args:
        corrections: [N, 6] of all training views, contiguous; changed by steps.
        exp_avg, exp_avg_sq: [N, 6] Adam's moments.
        views: of a batch.
        mode, penalties: see `correction_gradients`.
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
        self.viewmats, self.v_viewmats = new(self.views, 4, 4), new(self.views, 4, 4)
        ranks = 1 if self.world is None else self.world.size
        self._of_ranks = new(ranks, self.views, 4, 4) if ranks > 1 else self.v_viewmats[None]

    def begin(self) -> None:
        """Correct the matrices of the step's views, and clear their gradients."""
        correct_views(self.given, self.corrections, self.indices, self.mode, self.viewmats)
        self.v_viewmats.zero_()

    def step(self, scalars: Tensor) -> Parts[None]:
        """Take Adam's step.

        Args:
            scalars: [1, 8], see `cuda_ext.ops.optim.adam.adam_scalars`; of no step where the step is not to count.
        """
        if self.world is not None and self.world.size > 1:
            world = self.world
            yield Collective(lambda: all_gather_into(self._of_ranks, self.v_viewmats, world))
        views = (self.given, self.corrections, self.indices, self.mode)
        gradient = correction_gradients(*views, self._of_ranks, self.penalties)
        adam_step([self.corrections], [gradient], [self.exp_avg], [self.exp_avg_sq], scalars)
