"""Measurement, before training, of how much the exposures of a capture's photographs differ.

A seed point has the mean colour of the photographs that observe it. The ratio of a photograph's colour to the point's
gives that photograph's relative exposure. Occluded points would give wrong ratios. Only the nearest point of each image
cell counts, and the result is the median.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from ns_multigpu.core.types import View

MANY = 0.25
"""Threshold in stops above which exposures differ: see `Exposures.spread`. Measured in
benchmarks/results/recipes.md.
"""
_POINTS = 20_000
"""Largest number of seed points that are compared."""
_FEW = 30
"""Smallest number of points that a photograph must show."""
_CELLS = 48
"""Number of cells along a photograph's longer side."""
_GAMMA = 2.2
"""Approximate display gamma of photographs; sufficient because colours are only compared."""
_BLACK, _WHITE = 16 / 255, 245 / 255
"""Limits of usable brightness: darker values are noise, brighter ones may be clipped."""
_THREADS = 8
"""Largest number of threads that read photographs."""


@dataclass(frozen=True)
class Exposures:
    """Measured exposures.

    Attributes:
        stops: relative exposure of each measurable photograph against the median one.
        spread: half the distance between the 90th and the 10th percentile, in stops.
    """

    stops: Sequence[float]
    spread: float


def differ(exposures: Exposures) -> bool:
    """True if exposures differ enough that a correction pays off."""
    return exposures.spread > MANY


def measured(points: Tensor, colours: Tensor, views: Sequence[View], read: Callable[[int], Tensor]) -> Exposures | None:
    """Measure how much exposures differ; see the module.

    Args:
        points: [N, 3].
        colours: [N, 3] up to 255.
        views: of the photographs.
        read: returns the photograph [H, W, 3 or 4] of a view by position, uint8 or float up to 1. Several threads call
            it.

    Returns:
        None if fewer than three photographs can be measured.
    """
    stride = max(1, -(-len(points) // _POINTS))
    points, colours = points[::stride].detach().float().cpu(), colours[::stride].detach().float().cpu() / 255

    def stops_of(place: int) -> float | None:
        seen, x, y = _nearest(points, views[place])
        return _stops(colours[seen], x, y, read(place))

    cores = torch.get_num_threads()
    try:  # one thread per photograph: nested threads of torch's small operations would block each other
        with ThreadPoolExecutor(min(_THREADS, cores), initializer=torch.set_num_threads, initargs=(1,)) as threads:
            stops_found = [stops for stops in threads.map(stops_of, range(len(views))) if stops is not None]
    finally:
        torch.set_num_threads(cores)
    if len(stops_found) < 3:
        return None
    stops = torch.tensor(stops_found, dtype=torch.float64)
    stops -= stops.median()
    low, high = stops.quantile(torch.tensor([0.1, 0.9], dtype=torch.float64)).tolist()
    return Exposures(stops.tolist(), (high - low) / 2)


def _nearest(points: Tensor, view: View) -> tuple[Tensor, Tensor, Tensor]:
    """Return the indices of the nearest point in each image cell, and their pixels x and y [n]."""
    local = points @ view.viewmat[:3, :3].T + view.viewmat[:3, 3]
    depth = local[:, 2]
    x, y = (local[:, axis] / depth * view.K[axis, axis] + view.K[axis, 2] for axis in (0, 1))
    inside = (depth > 0) & (x >= 1) & (y >= 1) & (x < view.width - 1) & (y < view.height - 1)
    seen = inside.nonzero()[:, 0]
    seen = seen[depth[seen].argsort(stable=True)]
    side = max(view.width, view.height) / _CELLS
    cells = (y[seen] / side).long() * _CELLS + (x[seen] / side).long()
    order = cells.argsort(stable=True)  # stable: the nearest stays first within a cell
    first = torch.ones(len(seen), dtype=torch.bool)
    first[1:] = cells[order][1:] != cells[order][:-1]
    seen = seen[order[first]]
    return seen, x[seen].long(), y[seen].long()


def _stops(colours: Tensor, x: Tensor, y: Tensor, image: Tensor) -> float | None:
    """Return by how many stops an image is brighter than colours [n, 3] at pixels; None if too few are comparable."""
    steps = torch.arange(-1, 2)  # average 3 x 3 pixels: a point is seldom centred in its pixel
    nine = image[y[:, None, None] + steps[:, None], x[:, None, None] + steps, :3].flatten(1, 2)
    around = nine.float().mean(1) / (1.0 if image.dtype.is_floating_point else 255.0)
    fair = torch.ones(len(x), dtype=torch.bool)
    for shown in (around, colours):
        fair &= (shown.mean(1) > _BLACK) & (shown.amax(1) < _WHITE)
    if int(fair.sum()) < _FEW:
        return None
    return float(_GAMMA * (around[fair].mean(1) / colours[fair].mean(1)).log2().median())
