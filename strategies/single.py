"""`single`: everything on one rank. The reference that every other strategy must equal."""

from ns_multigpu.core.assignment import AllViewsHere
from ns_multigpu.core.legs import GradientsToOwner, LocalRows, WholePixels
from ns_multigpu.core.placement import AllHere
from ns_multigpu.core.strategy import Strategy
from ns_multigpu.core.world import World


def single(world: World) -> Strategy:
    """The strategy `single` for a world of one.

    Raises:
        ValueError: the world has more ranks.
    """
    if world.size != 1:
        raise ValueError(f"the strategy `single` runs on one rank, not {world.size}: choose another, such as `batch`")
    return Strategy("single", AllHere(), AllViewsHere(), LocalRows(), WholePixels(), GradientsToOwner(world), world)
