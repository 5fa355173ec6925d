"""`pixel`: space is cut into convex cells, each rank draws its own, and pixels are exchanged instead of splats.

The scheme of Splaxel (Jia et al., section 4.2): what crosses the wire does not depend on the number of points.
"""

from ns_multigpu.cells.boundary import CellsInViews
from ns_multigpu.cells.options import PixelOptions
from ns_multigpu.cells.placing import ByCells
from ns_multigpu.cells.sharing import CellPixels
from ns_multigpu.core.dist.world import World
from ns_multigpu.core.exchange.boundary_rows import BoundaryRows
from ns_multigpu.core.exchange.composite import CompositePixels
from ns_multigpu.core.exchange.legs import GradientsToOwner, LocalRows
from ns_multigpu.core.strategy import Strategy


def pixel(world: World, options: PixelOptions | None = None) -> Strategy:
    """Return the strategy `pixel` for `world`.

    Raises:
        ValueError: an option is out of range, or there are to be fewer cells than ranks.
    """
    options = options or PixelOptions()
    if problem := options.problem():
        raise ValueError(f"pixel: {problem}.")
    space = ByCells(world, options)
    views = CellPixels(space, hide=options.hide)
    regions = CellsInViews(space) if options.crossing == "ghosts" else None
    pixels = CompositePixels(space.local, half=options.wire == "half", regions=regions)
    pixels.feedback = views.learn if options.hide else None
    rows = LocalRows() if regions is None else BoundaryRows(regions)
    return Strategy("pixel", space, views, rows, pixels, GradientsToOwner(world), world)
