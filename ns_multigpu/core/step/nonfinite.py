"""Agreement of all ranks, on the device, to skip a step whose gradients are not finite."""

from collections.abc import Sequence

import torch
from torch import Tensor

from cuda_ext.ops.exchange.row_layout import real_rows
from ns_multigpu.core.dist.collectives import all_gather_into
from ns_multigpu.core.dist.world import World
from ns_multigpu.core.exchange.transport import Collective, Parts, Returned


class NonFiniteSteps:
    """Counts of non-finite steps for `step_gate`, whose limit is 0.

    Args:
        world: the ranks. gradient_floats: see `Kernels`.
        skips: False to look for nothing and to leave out no step.

    Attributes:
        by_rank: [ranks] int64, 1 of each rank that found such a gradient in the present step.
    """

    def __init__(self, world: World, gradient_floats: int, *, skips: bool) -> None:
        self._world, self._gradient_floats, self._skips = world, gradient_floats, skips
        self.by_rank = torch.zeros(world.size, dtype=torch.int64, device=world.device)

    def agree(self, back: Returned, counts: Sequence[Tensor], limits: Tensor, more: Tensor) -> Parts[Tensor]:
        """Find gradients that are not finite, and share the result with all ranks.

        Args:
            back: the rows and their gradients.
            counts, limits: other counts of `step_gate`. Where one exceeds its limit, gradients are incomplete.
            more: [ranks, words] int64: further gradients, float32, the same on all ranks.

        Returns:
            `more`, or zeros if the step is left out: not even a rate of 0 makes NaN harmless.
        """
        if not self._skips:
            return more
        records = back.records[:, : self._gradient_floats]
        finite = (records.isfinite().all(-1) | ~real_rows(back.rows.point_ids, back.rows.count)).all()
        finite &= more.contiguous().view(torch.float32).isfinite().all()
        fits = (torch.stack(list(counts), dim=1) <= limits[: len(counts)]).all()
        own = (~finite & fits).long().view(1)
        if back.finite_flag_views is None and self._world.size > 1:  # each rank has gradients of its own points only
            yield Collective(lambda: all_gather_into(self.by_rank.view(-1, 1), own, self._world))
        else:
            self.by_rank.copy_(own.expand_as(self.by_rank))
        return more.masked_fill(self.by_rank.any(), 0)

    def mark(self, finite_flag: Tensor) -> None:
        """Set the finite flag [1] of a step that is left out, on all ranks, to NaN."""
        if self._skips:
            finite_flag.masked_fill_(self.by_rank.any(), torch.nan)
