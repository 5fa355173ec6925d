"""Cells of space with equally much in each, as close to cubes as can be (NeRF-XL, section 4.4 and appendix A.3)."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ns_multigpu.cells.tree import CellTree, Split
from ns_multigpu.radiance.contraction import Domain

_MARGIN = 1e-6
"""A plane keeps this part of its box's extent away from the box's faces: no cell is without volume."""
VIEWS_A_CELL = 150
"""Training views a cell from which on two cells were ahead of one in views that were held out. With 22, 70 and 105 they
were 3.7, 1.2 and 0.7 dB behind, with 157 they were 0.3 dB ahead (benchmarks/results/nerfacto-xl.md)."""


@dataclass(frozen=True)
class Partition:
    """Cells that share no volume and fill their domain.

    Attributes:
        tree: the planes, in the coordinates that cells are cut in (see `Domain`).
        domain: what they fill.
    """

    tree: CellTree
    domain: Domain

    @property
    def cells(self) -> int:
        """How many there are."""
        return self.tree.cells

    def extents(self) -> Tensor:
        """[cells, 2, 3] float64, the lower and upper corner of each, in the coordinates that cells are cut in."""
        boxes = self.tree.boxes()
        low, high = (torch.tensor(c, dtype=torch.float64) for c in (self.domain.lower, self.domain.upper))
        return torch.stack([boxes[:, 0].maximum(low), boxes[:, 1].minimum(high)], 1)

    def boxes(self) -> Tensor:
        """[cells, 2, 3] float64, the lower and upper corner of each in the world; infinite where space is."""
        return self.domain.outward(self.extents())

    def of(self, positions: Tensor) -> Tensor:
        """The cells [N] int64 of positions [N, 3] in the world, which lie in the domain."""
        return self.tree.of(self.domain.inward(positions.double()))


def partition(points: Tensor, cells: int, domain: Domain) -> Partition:
    """Cuts a domain into cells with equally many points each.

    A part that is to be k cells is cut where floor(k / 2) of k parts of its points lie below (half, where k is even:
    the paper's plane at which the CDF is 0.5), across the axis for which the longest side of the two parts' boxes is
    closest to the shortest. Boxes are those around the points, and every plane is inside its part's own box: where
    points lie at one place, or there are none, a box is cut in its middle.

    Args:
        points: [N, 3] in the world, from a reconstruction or along rays; the same on every rank. Those outside the
            domain, or not finite, do not count.
        cells: how many, at least 1.
        domain: what to cut.

    Raises:
        ValueError: there is to be no cell.
    """
    if cells < 1:
        raise ValueError(f"{cells} cells: at least 1 is needed")
    points = points.detach().to("cpu", torch.float64)
    where = domain.inward(points[domain.holds(points)])
    low, high = torch.tensor(domain.lower, dtype=torch.float64), torch.tensor(domain.upper, dtype=torch.float64)
    splits: list[Split] = []

    def cut(inside: Tensor, box: Tensor, count: int, first: int) -> int:
        """Cuts what lies in `box` [2, 3] into cells from `first` on; returns its number, as in `Split`."""
        if count == 1:
            return -1 - first
        node, lower = len(splits), count // 2
        splits.append(Split(0, 0.0, 0, 0))
        axis, plane = _plane(inside, box, lower, count)
        above, parts = inside[:, axis] >= plane, (box.clone(), box.clone())
        parts[0][1, axis] = parts[1][0, axis] = plane
        numbers = (
            cut(inside[~above], parts[0], lower, first),
            cut(inside[above], parts[1], count - lower, first + lower),
        )
        splits[node] = Split(axis, plane, *numbers)
        return node

    cut(where, torch.stack([low, high]), cells, 0)
    return Partition(CellTree(tuple(splits)), domain)


def _plane(inside: Tensor, box: Tensor, lower: int, count: int) -> tuple[int, float]:
    """The axis across which points [N, 3] in a box [2, 3] are cut, and where."""
    around = torch.stack([inside.amin(0), inside.amax(0)]) if len(inside) > 1 else box
    best, chosen = math.inf, (0, 0.0)
    for axis in range(3):
        start, end = box[:, axis].tolist()
        plane = (start + end) / 2
        if len(inside) > 1 and bool(around[0, axis] < around[1, axis]):
            along = inside[:, axis].sort().values
            at = len(along) * lower // count
            plane = float(along[max(at - 1, 0)] + along[at]) / 2
        margin = _MARGIN * (end - start)
        plane = min(max(plane, start + margin), end - margin)
        ratio = max(_ratio(around, axis, 1, plane), _ratio(around, axis, 0, plane))
        if ratio < best or axis == 0:
            best, chosen = ratio, (axis, plane)
    return chosen


def _ratio(around: Tensor, axis: int, corner: int, plane: float) -> float:
    """The longest side of a part of a box over its shortest; its corner on the cut axis is moved to the plane."""
    part = around.clone()
    part[corner, axis] = plane
    sides = (part[1] - part[0]).tolist()
    return max(sides) / max(min(sides), 1e-12)


def points_along(origins: Tensor, directions: Tensor, near: float, far: float, samples: int) -> Tensor:
    """Points along rays, to cut space by where no reconstruction is at hand (NeRF-XL, section 4.4).

    They are spaced as nerfacto's first samples: evenly up to distance 1, then evenly in 1 / distance.

    Args:
        origins, directions: [R, 3] in the world.
        near, far: distances from the origins.
        samples: on each ray.

    Returns:
        [R * samples, 3].
    """
    ends = spacing(torch.tensor([near, far], dtype=torch.float64))
    middles = (torch.arange(samples, dtype=torch.float64) + 0.5) / samples
    t = distance(ends[0] + (ends[1] - ends[0]) * middles).to(origins)
    return (origins[:, None] + directions[:, None] * t[:, None]).reshape(-1, 3)


def spacing(t: Tensor) -> Tensor:
    """nerfacto's piecewise coordinate along a ray: t / 2 up to distance 1, then 1 - 1 / (2 t)."""
    return torch.where(t < 1, t / 2, 1 - 1 / (2 * t.clamp_min(1)))


def distance(s: Tensor) -> Tensor:
    """The inverse of `spacing`."""
    return torch.where(s < 0.5, 2 * s, 1 / (2 - 2 * s.clamp_min(0.5)))


def few_views(views: int, cells: int) -> str | None:
    """What to say at the start where so many training views are likely too few for cells; None where they are not."""
    if cells < 2 or views >= VIEWS_A_CELL * cells:
        return None
    return (
        f"{views} training views for {cells} cells: where two cells had fewer than about {VIEWS_A_CELL} views "
        "each, views that were held out were worse than with one field. --pipeline.model.spread ddp trains one field "
        "on all GPUs."
    )
