"""Cells of space with equal numbers of points, as cubic as possible (NeRF-XL, section 4.4 and appendix A.3)."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ns_multigpu.cells.tree import CellTree, Split
from ns_multigpu.radiance.contraction import Domain

_MARGIN = 1e-6
"""Minimum distance of a plane from its box's faces, relative to the extent: every cell has volume."""
VIEWS_A_CELL = 75
"""Training views per cell below which a run warns. With one background for all and default networks, two cells were
0.2 dB ahead of one to 1.7 behind on held-out views, with 22 to 70 a cell (benchmarks/results/nerfacto-xl.md). Nothing
above has been measured so."""


@dataclass(frozen=True)
class Partition:
    """Cells that share no volume and fill their domain.

    Attributes:
        tree: the planes, in the coordinates that cells are cut in (see `Domain`).
        domain: the space that they fill.
    """

    tree: CellTree
    domain: Domain

    @property
    def cells(self) -> int:
        """Number of cells."""
        return self.tree.cells

    def extents(self) -> Tensor:
        """Return the lower and upper corner of each cell in partition coordinates, [cells, 2, 3] float64."""
        boxes = self.tree.boxes()
        low, high = (torch.tensor(c, dtype=torch.float64) for c in (self.domain.lower, self.domain.upper))
        return torch.stack([boxes[:, 0].maximum(low), boxes[:, 1].minimum(high)], 1)

    def boxes(self) -> Tensor:
        """Return the lower and upper corner of each cell in the world, [cells, 2, 3] float64; infinite in unbounded
        space."""
        return self.domain.outward(self.extents())

    def of(self, positions: Tensor) -> Tensor:
        """Return the cells [N] int64 of world positions [N, 3] within the domain."""
        return self.tree.of(self.domain.inward(positions.double()))


def partition(points: Tensor, cells: int, domain: Domain) -> Partition:
    """Split a domain into cells with equal numbers of points.

    A part with k cells is split where floor(k / 2) of k parts of its points lie below (for even k the paper's plane at
    CDF 0.5). The axis is that for which the longest side of the two parts' boxes is closest to the shortest. Boxes are
    those around the points, and every plane is inside its part's own box. Without points, or with all at one place, a
    box is split in its middle.

    Args:
        points: [N, 3] in the world, from a reconstruction or along rays; the same on every rank. Points outside the
            domain, or not finite, are ignored.
        cells: number of cells, at least 1.
        domain: space to split.

    Raises:
        ValueError: `cells` is below 1.
    """
    if cells < 1:
        raise ValueError(f"{cells} cells: at least 1 is needed")
    points = points.detach().to("cpu", torch.float64)
    where = domain.inward(points[domain.holds(points)])
    low, high = torch.tensor(domain.lower, dtype=torch.float64), torch.tensor(domain.upper, dtype=torch.float64)
    splits: list[Split] = []

    def cut(inside: Tensor, box: Tensor, count: int, first: int) -> int:
        """Split the points in `box` [2, 3] into cells from `first` on; return its number, as in `Split`."""
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
    """Return the axis and position of the plane that splits points [N, 3] in a box [2, 3]."""
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
    """Return the longest over the shortest side of a part of a box; its corner on the split axis moves to the plane."""
    part = around.clone()
    part[corner, axis] = plane
    sides = (part[1] - part[0]).tolist()
    return max(sides) / max(min(sides), 1e-12)


def points_along(origins: Tensor, directions: Tensor, near: float, far: float, samples: int) -> Tensor:
    """Return points along rays, to partition space without a reconstruction (NeRF-XL, section 4.4).

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
    """Return nerfacto's piecewise coordinate along a ray: t / 2 up to distance 1, then 1 - 1 / (2 t)."""
    return torch.where(t < 1, t / 2, 1 - 1 / (2 * t.clamp_min(1)))


def distance(s: Tensor) -> Tensor:
    """Invert `spacing`."""
    return torch.where(s < 0.5, 2 * s, 1 / (2 - 2 * s.clamp_min(0.5)))


def few_views(views: int, cells: int) -> str | None:
    """Return a warning if there are likely too few training views for the cells; else None."""
    if cells < 2 or views >= VIEWS_A_CELL * cells:
        return None
    return (
        f"{views} training views for {cells} cells. Below {VIEWS_A_CELL} per cell, several cells gave no better "
        "PSNR of held-out views than one on one GPU (--machine.num-devices 1)."
    )
