"""Measurement, before training, of how much the exposures of a capture's photographs differ.

Photographs that show the same seed points are compared: the logarithm of a point's brightness in a photograph is the
point's plus the photograph's gain. Gains are fitted to one half of the points and judged by the other half, because
photographs also differ by shadows, highlights and occlusion. Only the nearest point of each image cell counts.

A gain that neighbouring photographs share does no harm: training takes it for light that depends on the direction, and
held-out photographs between them have it, too. Only gains against the neighbours' count.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from ns_multigpu.core.image_points import image_points
from ns_multigpu.core.types import View

MANY = 0.25
"""Threshold in stops above which exposures differ: see `Exposures.spread`. Figures are in benchmarks/NOTES.md."""
_POINTS = 20_000
"""Largest number of seed points that are compared."""
_FEW = 30
"""Smallest number of points that a photograph must share with two others."""
_NEIGHBOURS = 4
"""Number of neighbours: the photographs that show most of a photograph's points."""
_SWEEPS = 6
"""Sweeps of Tukey's median polish, which fits gains."""
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
        stops: gain of each measurable photograph against the median one.
        spread: standard deviation, in stops, of the gains against the mean of their neighbours', times the share of the
            other points' variance that these differences explain.
    """

    stops: Sequence[float]
    spread: float


def differ(exposures: Exposures) -> bool:
    """True if exposures differ enough that a correction pays off."""
    return exposures.spread > MANY


def measured(points: Tensor, views: Sequence[View], read: Callable[[int], Tensor]) -> Exposures | None:
    """Measure how much exposures differ; see the module.

    Args:
        points: [N, 3].
        views: of the photographs.
        read: returns the photograph [H, W, 3 or 4] of a view by position, uint8 or float up to 1. Several threads call
            it.

    Returns:
        None if fewer than three photographs can be measured.
    """
    points = points[:: max(1, -(-len(points) // _POINTS))].detach().float().cpu()
    stops = torch.full((len(views), len(points)), torch.nan)

    def look(place: int) -> None:
        seen, x, y = _nearest(points, views[place])
        stops[place, seen] = _stops(x, y, read(place))

    cores = torch.get_num_threads()
    try:  # one thread per photograph: nested threads of torch's small operations would block each other
        with ThreadPoolExecutor(min(_THREADS, cores), initializer=torch.set_num_threads, initargs=(1,)) as threads:
            list(threads.map(look, range(len(views))))
    finally:
        torch.set_num_threads(cores)
    for _ in range(2):  # a photograph that is left out leaves some points with fewer
        stops = stops[:, stops.isfinite().sum(0) >= 3]
        stops = stops[stops.isfinite().sum(1) >= _FEW]
    return None if len(stops) < 3 else compared(stops)


def compared(stops: Tensor) -> Exposures:
    """Return the exposures of photographs, of whose points the brightness is known.

    Args:
        stops: [photographs, points] logarithms to base 2; NaN where a photograph does not show a point.
    """
    odd, even, spreads = stops[:, 1::2], stops[:, ::2], list[Tensor]()
    for fitted, other in ((odd, even), (even, odd)):
        gains, shown = _gains(fitted), fitted.isfinite().float()
        common = (shown @ shown.T).fill_diagonal_(-1)
        of_neighbours = gains[common.topk(min(_NEIGHBOURS, len(gains) - 1)).indices].mean(1)
        left, before = _residual(other, gains), _residual(other, of_neighbours)
        share = (1 - (left / before.clamp(min=1e-6)).square()).clamp(min=0)
        spreads.append(share * (gains - of_neighbours).square().mean().sqrt())
    return Exposures(_gains(stops).tolist(), float(sum(spreads)) / 2)


def _gains(stops: Tensor) -> Tensor:
    """Return the gains [photographs] of brightnesses, their median 0; 0 also where a photograph shows no point."""
    gains = stops.new_zeros(len(stops))
    for _ in range(_SWEEPS):
        of_points = (stops - gains[:, None]).nanmedian(0).values
        gains = (stops - of_points).nanmedian(1).values.nan_to_num()
        gains -= gains.median()
    return gains


def _residual(stops: Tensor, gains: Tensor) -> Tensor:
    """Return the median distance [] of brightnesses from their point's median, less the photographs' gains."""
    left = stops - gains[:, None]
    return (left - left.nanmedian(0).values).abs().nanmedian()


def _nearest(points: Tensor, view: View) -> tuple[Tensor, Tensor, Tensor]:
    """Return the indices of the nearest point in each image cell, and their pixels x and y [n]."""
    x, y, depth = image_points(view, points)
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


def _stops(x: Tensor, y: Tensor, image: Tensor) -> Tensor:
    """Return the brightness [n] of an image at pixels, as a logarithm to base 2; NaN where it is not usable."""
    steps = torch.arange(-1, 2)  # average 3 x 3 pixels: a point is seldom centred in its pixel
    nine = image[y[:, None, None] + steps[:, None], x[:, None, None] + steps, :3].flatten(1, 2)
    shown = nine.float().mean(1) / (1.0 if image.dtype.is_floating_point else 255.0)
    usable = (shown.mean(1) > _BLACK) & (shown.amax(1) < _WHITE)
    return torch.where(usable, _GAMMA * shown.mean(1).log2(), torch.nan)
