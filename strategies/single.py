"""`single`: everything on one rank. The reference that every other strategy must equal."""

from ns_multigpu.core.assign.assignment import AllViewsHere
from ns_multigpu.core.assign.placement import AllHere
from ns_multigpu.core.dist.world import World
from ns_multigpu.core.exchange.legs import GradientsToOwner, LocalRows, WholePixels
from ns_multigpu.core.strategy import Strategy


def single(world: World) -> Strategy:
    """Return the strategy `single` for a world of one rank.

    Raises:
        ValueError: the world has more ranks.
    """
    if world.size != 1:
        raise ValueError(f"the strategy `single` runs on one rank, not {world.size}: choose another, such as `batch`")
    return Strategy("single", AllHere(), AllViewsHere(), LocalRows(), WholePixels(), GradientsToOwner(world), world)
