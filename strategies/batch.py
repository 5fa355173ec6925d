"""`batch`: every rank holds the whole model and renders its own views; gradients are summed.

The scheme of data-parallel training, and of the batching report (Kadawedduwa et al., section 2.1).
"""

from ns_multigpu.core.assignment import DealtViews
from ns_multigpu.core.legs import LocalRows, SummedGradients, WholePixels
from ns_multigpu.core.placement import Replicated
from ns_multigpu.core.strategy import Strategy
from ns_multigpu.core.world import World


def batch(world: World) -> Strategy:
    """The strategy `batch` for `world`."""
    return Strategy("batch", Replicated(), DealtViews(), LocalRows(), WholePixels(), SummedGradients(world), world)
