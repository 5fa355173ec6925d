"""`batch`: every rank holds the whole model and renders its own views; gradients are summed.

The scheme of data-parallel training, and of the batching report (Kadawedduwa et al., section 2.1).
"""

from ns_multigpu.core.assign.assignment import RoundRobinViews
from ns_multigpu.core.assign.placement import Replicated
from ns_multigpu.core.dist.world import World
from ns_multigpu.core.exchange.legs import LocalRows, SummedGradients, WholePixels
from ns_multigpu.core.strategy import Strategy


def batch(world: World) -> Strategy:
    """Return the strategy `batch` for `world`."""
    return Strategy("batch", Replicated(), RoundRobinViews(), LocalRows(), WholePixels(), SummedGradients(world), world)
