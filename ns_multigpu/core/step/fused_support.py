"""Check of a strategy's support for fused steps, which read nothing back."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from ns_multigpu.core.strategy import Strategy
from ns_multigpu.core.types import View


def unsupported_reason(strategy: Strategy, batch: int) -> str | None:
    """Return why a fused step cannot run this strategy with `batch` views; None if it can. The same on every rank."""
    for leg in (strategy.rows, strategy.pixels, strategy.gradients):
        if leg.unsupported_reason is not None:
            return leg.unsupported_reason
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
    """Return True if these are one stretch of positions."""
    return len(positions) > 0 and list(positions) == list(range(positions[0], positions[-1] + 1))
