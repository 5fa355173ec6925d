"""Whether a capture's photographs differ in exposure, measured before training.

A seed point has the mean colour of the photographs that it was found in. So where a photograph shows it, it tells by
how much that one is brighter than the others. Points that something hides tell nothing true: of those in one small part
of a photograph only the nearest counts, and of all that count the median.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from ns_multigpu.core.types import View

MANY = 0.25
"""Stops from which on photographs differ: see `Exposures.spread`. Measured in benchmarks/results/recipes.md."""
_POINTS = 20_000
"""Seed points that are looked at, at most."""
_FEW = 30
"""Points that a photograph has to show, at least."""
_CELLS = 48
"""Parts of a photograph along its longer side."""
_GAMMA = 2.2
"""Of the displays that photographs are made for, near enough: here colours are only compared."""
_BLACK, _WHITE = 16 / 255, 245 / 255
"""What is darker is noise, and what is brighter may have been cut off."""
_THREADS = 8
"""That read photographs, at most."""


@dataclass(frozen=True)
class Exposures:
    """What was measured.

    Attributes:
        stops: by how much each photograph that could be measured is brighter than the middle one.
        spread: half the distance of the tenth brightest of a hundred from the tenth darkest, in stops.
    """

    stops: Sequence[float]
    spread: float


def differ(exposures: Exposures) -> bool:
    """Whether photographs differ by so much that a correction pays."""
    return exposures.spread > MANY


def measured(points: Tensor, colours: Tensor, views: Sequence[View], read: Callable[[int], Tensor]) -> Exposures | None:
    """How exposures differ; see the module.

    Args:
        points: [N, 3]. colours: [N, 3] up to 255.
        views: of the photographs. read: gives the photograph [H, W, 3 or 4] of the view at a place, uint8 or float up
            to 1; called from several threads.

    Returns:
        None where fewer than three photographs tell.
    """
    stride = max(1, -(-len(points) // _POINTS))
    points, colours = points[::stride].detach().float().cpu(), colours[::stride].detach().float().cpu() / 255

    def stops_of(place: int) -> float | None:
        seen, x, y = _nearest(points, views[place])
        return _stops(colours[seen], x, y, read(place))

    cores = torch.get_num_threads()
    try:  # each photograph has a thread: split further, torch's small operations would wait for each other
        with ThreadPoolExecutor(min(_THREADS, cores), initializer=torch.set_num_threads, initargs=(1,)) as threads:
            told = [stops for stops in threads.map(stops_of, range(len(views))) if stops is not None]
    finally:
        torch.set_num_threads(cores)
    if len(told) < 3:
        return None
    stops = torch.tensor(told, dtype=torch.float64)
    stops -= stops.median()
    low, high = stops.quantile(torch.tensor([0.1, 0.9], dtype=torch.float64)).tolist()
    return Exposures(stops.tolist(), (high - low) / 2)


def _nearest(points: Tensor, view: View) -> tuple[Tensor, Tensor, Tensor]:
    """Which points are the nearest of their part of the image, and the pixels x and y [n] that they are in."""
    local = points @ view.viewmat[:3, :3].T + view.viewmat[:3, 3]
    depth = local[:, 2]
    x, y = (local[:, axis] / depth * view.K[axis, axis] + view.K[axis, 2] for axis in (0, 1))
    inside = (depth > 0) & (x >= 1) & (y >= 1) & (x < view.width - 1) & (y < view.height - 1)
    seen = inside.nonzero()[:, 0]
    seen = seen[depth[seen].argsort(stable=True)]
    side = max(view.width, view.height) / _CELLS
    cells = (y[seen] / side).long() * _CELLS + (x[seen] / side).long()
    order = cells.argsort(stable=True)  # within a cell the nearest stays first
    first = torch.ones(len(seen), dtype=torch.bool)
    first[1:] = cells[order][1:] != cells[order][:-1]
    seen = seen[order[first]]
    return seen, x[seen].long(), y[seen].long()


def _stops(colours: Tensor, x: Tensor, y: Tensor, image: Tensor) -> float | None:
    """By how many stops an image is brighter than colours [n, 3] at pixels; None where too few can be compared."""
    steps = torch.arange(-1, 2)  # a point is seldom in the middle of its pixel
    nine = image[y[:, None, None] + steps[:, None], x[:, None, None] + steps, :3].flatten(1, 2)
    around = nine.float().mean(1) / (1.0 if image.dtype.is_floating_point else 255.0)
    fair = torch.ones(len(x), dtype=torch.bool)
    for shown in (around, colours):
        fair &= (shown.mean(1) > _BLACK) & (shown.amax(1) < _WHITE)
    if int(fair.sum()) < _FEW:
        return None
    return float(_GAMMA * (around[fair].mean(1) / colours[fair].mean(1)).log2().median())
