"""`tile`: each rank owns a range of the points and renders a band of the images; splats are exchanged between them.

The scheme of torch-dgx (section 4): per-point work where the points are, per-pixel work where the pixels are.
"""

from ns_multigpu.core.assign.assignment import TileRanges
from ns_multigpu.core.assign.placement import Sharded
from ns_multigpu.core.assign.tile_work import TileWork
from ns_multigpu.core.dist.world import World
from ns_multigpu.core.exchange.exchanged_rows import ExchangedRows
from ns_multigpu.core.exchange.legs import GradientsToOwner, WholePixels
from ns_multigpu.core.strategy import Strategy


def tile(world: World) -> Strategy:
    """Return the strategy `tile` for `world`."""
    work = TileWork()
    legs = ExchangedRows(work), WholePixels(), GradientsToOwner(world)
    return Strategy("tile", Sharded(), TileRanges(work), *legs, world)
