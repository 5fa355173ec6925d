"""`locality`: points are placed near the views that see them, and patches are drawn near their points.

The scheme of Gaian (Zhao et al., section 4.2), which minimizes traffic between machines.
"""

from ns_multigpu.core.dist.world import World
from ns_multigpu.core.exchange.exchanged_rows import ExchangedRows
from ns_multigpu.core.exchange.legs import GradientsToOwner, WholePixels
from ns_multigpu.core.strategy import Strategy
from ns_multigpu.locality.options import LocalityOptions
from ns_multigpu.locality.patches import LocalPatches
from ns_multigpu.locality.placing import ByViews
from ns_multigpu.locality.rules import Access


def locality(world: World, options: LocalityOptions | None = None) -> Strategy:
    """Return the strategy `locality` for `world`.

    Raises:
        ValueError: an option is out of range.
    """
    options = options or LocalityOptions()
    if problem := options.problem():
        raise ValueError(f"locality: {problem}.")
    access = Access(options.patches**2, world.size)
    patches = LocalPatches(world, options, access)
    legs = ExchangedRows(patches, hierarchical=options.relays), WholePixels(), GradientsToOwner(world)
    return Strategy("locality", ByViews(world, options, access), patches, *legs, world)
