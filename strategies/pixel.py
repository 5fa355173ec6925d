"""`pixel`: space is cut into convex cells, each rank draws its own, and pixels travel instead of splats.

The scheme of Splaxel (Jia et al., section 4.2): what crosses the wire does not depend on the number of points. Where a
part of a cell's layer has few splats, these may travel instead: then it is drawn where its pixels are owned.
"""

from ns_multigpu.cells.crossing import CellsInViews
from ns_multigpu.cells.exchange import Exchange, Kind
from ns_multigpu.cells.options import PixelOptions
from ns_multigpu.cells.placing import ByCells
from ns_multigpu.cells.sharing import CellPixels
from ns_multigpu.core.cell_rows import CellRows
from ns_multigpu.core.composite import CompositePixels
from ns_multigpu.core.crossing import RowsCross
from ns_multigpu.core.legs import GradientsToOwner, RowsStay
from ns_multigpu.core.strategy import Strategy
from ns_multigpu.core.world import World


def pixel(world: World, options: PixelOptions | None = None, exchange: Kind = "pixels") -> Strategy:
    """The strategy `pixel` for `world`.

    Args:
        exchange: what travels; "auto" takes whichever is fewer bytes. One rank sends nothing.

    Raises:
        ValueError: an option is out of range, or there are to be fewer cells than ranks.
    """
    options = options or PixelOptions()
    if problem := options.problem():
        raise ValueError(f"pixel: {problem}.")
    if options.hide and exchange != "pixels":
        raise ValueError(
            f"--pipeline.pixel.hide True: what is hidden is left out of pixels alone, and --pipeline.exchange is "
            f"{exchange}. Leave out one of the two."
        )
    space, half = ByCells(world, options), options.wire == "half"
    crossing = CellsInViews(space) if options.crossing == "ghosts" else None
    if exchange == "pixels" or world.size == 1:
        pixels = CompositePixels(space.local, half=half, crossing=crossing)
        views, rows = CellPixels(space, hide=options.hide), RowsStay() if crossing is None else RowsCross(crossing)
        pixels.told = views.learn if options.hide else None
    else:
        homes = [space.rank_of(cell) for cell in range(space.cells)]
        views = CellPixels(space, exchange=Exchange(exchange, homes, half=half, ghosts=crossing is not None))
        pixels = CompositePixels(space.layers if crossing is None else space.local, half=half, crossing=crossing)
        rows = CellRows(space.layers, views.learn) if crossing is None else RowsCross(crossing, views.learn)
    return Strategy("pixel", space, views, rows, pixels, GradientsToOwner(world), world)
