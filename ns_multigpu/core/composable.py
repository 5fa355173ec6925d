"""Which strategies a step that reads nothing back can be composed for."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from ns_multigpu.core.crossing import RowsCross
from ns_multigpu.core.legs import GradientsToOwner, RowsStay, SummedGradients
from ns_multigpu.core.pixel_carriers import carrier_of
from ns_multigpu.core.strategy import Strategy
from ns_multigpu.core.travelling_rows import RowsTravel
from ns_multigpu.core.types import View


def why_no_step(strategy: Strategy, batch: int) -> str | None:
    """Why no `Step` does what a strategy's pieces say with so many views; None if it does. The same on every rank.

    The legs' own types count: a class derived from one of them may do something else.
    """
    if type(strategy.rows) not in (RowsStay, RowsTravel, RowsCross):
        return f"the step's operators know no way for rows like {type(strategy.rows).__name__}"
    if carrier_of(strategy.pixels, strategy.world) is None:
        return f"the step's operators know no way for pixels like {type(strategy.pixels).__name__}"
    if type(strategy.gradients) not in (GradientsToOwner, SummedGradients):
        return f"the step's operators know no way for gradients like {type(strategy.gradients).__name__}"
    plan = strategy.plan([View(torch.eye(4), torch.eye(3), 256, 256, index=-1) for _ in range(batch)])
    for rank in range(strategy.world.size):
        positions = strategy.placement.views_to_splat(plan, replace(strategy.world, rank=rank))
        if not follow_each_other(positions):
            return (
                f"rank {rank} would splat its points for the views {positions} of a step; operators want at least one, "
                "and views that follow each other"
            )
    return None


def follow_each_other(positions: Sequence[int]) -> bool:
    """Whether these are one stretch of positions."""
    return len(positions) > 0 and list(positions) == list(range(positions[0], positions[-1] + 1))
