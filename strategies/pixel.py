"""`pixel`: space is cut into convex cells, each rank draws its own, and pixels travel instead of splats.

The scheme of Splaxel (Jia et al., section 4.2): what crosses the wire does not depend on the number of points. Where a
part of a cell's layer has few splats, these may travel instead: then it is drawn where its pixels are owned.
"""

from typing import Literal, TypeAlias

from ns_multigpu.cells.crossing import CellsInViews
from ns_multigpu.cells.exchange import PLAIN, WAYS, Exchange
from ns_multigpu.cells.options import PixelOptions
from ns_multigpu.cells.placing import ByCells
from ns_multigpu.cells.sharing import CellPixels
from ns_multigpu.core.cell_rows import CellRows
from ns_multigpu.core.composite import CompositePixels
from ns_multigpu.core.crossing import RowsCross
from ns_multigpu.core.legs import GradientsToOwner, RowsStay
from ns_multigpu.core.strategy import Choice, Strategy
from ns_multigpu.core.trials import Trials
from ns_multigpu.core.world import World

Asked: TypeAlias = Literal["pixels", "splats", "mixed", "auto"]
TIMED_ON = ["cuda"]
"""Devices on which "auto" goes by time. Not CPUs: there a run that goes on is to give the same bits as one that was not
stopped, and time is never the same."""


def pixel(world: World, options: PixelOptions | None = None, exchange: Asked = "pixels") -> Strategy:
    """The strategy `pixel` for `world`.

    Args:
        exchange: what travels. "mixed" takes whichever is fewer bytes; "auto" whichever of the others is fastest in
            fused steps on GPUs, and elsewhere "mixed". One rank sends nothing.

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
    space = ByCells(world, options)
    if exchange == "pixels" or world.size == 1:
        views = CellPixels(space, hide=options.hide)
        return _by_pixels(space, views, world, options)
    half, ghosts = options.wire == "half", options.crossing == "ghosts"
    homes = [space.rank_of(cell) for cell in range(space.cells)]
    trials = Trials(WAYS, world.size, PLAIN) if exchange == "auto" and world.device.type in TIMED_ON else None
    decides = Exchange(
        "splats" if exchange == "splats" else "mixed", homes, half=half, ghosts=ghosts, trials=trials,
    )  # fmt: skip
    views, crossing = CellPixels(space, exchange=decides, trials=trials), CellsInViews(space) if ghosts else None
    pixels = CompositePixels(space.layers if crossing is None else space.local, half=half, crossing=crossing)
    rows = CellRows(space.layers, views.learn) if crossing is None else RowsCross(crossing, views.learn)
    choice = None
    if trials is not None:  # where pixels alone are fastest nothing counts splats, or sends them as a plan foresees
        alone = CellPixels(space, trials=trials, keeps=decides)
        choice = Choice(trials, {"pixels": _by_pixels(space, alone, world, options)})
    return Strategy("pixel", space, views, rows, pixels, GradientsToOwner(world), world, choice)


def _by_pixels(space: ByCells, views: CellPixels, world: World, options: PixelOptions) -> Strategy:
    """Where all layers travel as pixels."""
    crossing = CellsInViews(space) if options.crossing == "ghosts" else None
    pixels = CompositePixels(space.local, half=options.wire == "half", crossing=crossing)
    pixels.told = views.learn if options.hide else None
    rows = RowsStay() if crossing is None else RowsCross(crossing)
    return Strategy("pixel", space, views, rows, pixels, GradientsToOwner(world), world)
