"""Parts of space that overlap, as fields that are trained independently need: the baselines of NeRF-XL (appendix A.4).

Mega-NeRF (Turki et al. 2022) trains a field a tile, with the rays that meet the tile, and blends density and colour of
samples where tiles overlap. Block-NeRF (Tancik et al. 2022) trains a field a group of cameras, with the group's images,
and blends rendered pixels.
"""

import torch
from torch import Tensor

from ns_multigpu.radiance.partition import Partition
from ns_multigpu.radiance.segments import Segments

_TRIMMED = 0.005
"""The part of points that may lie outside of a focus, at either side of each axis: a reconstruction has outliers."""
_SMALLEST = 1e-3
"""Of a focus' extent, in the coordinates that cells are cut in."""
_POWER = 4
"""Of the distance, in Block-NeRF's weights (section 3.3.2 there)."""


def widened(boxes: Tensor, part: float) -> Tensor:
    """Widen boxes [C, 2, 3] by `part` of their extent along each axis, half of it at each side."""
    more = (boxes[:, 1] - boxes[:, 0]) * (part / 2)
    return torch.stack([boxes[:, 0] - more, boxes[:, 1] + more], 1)


def focuses(points: Tensor, cells: Partition, part: float, *, trim: bool = True) -> Tensor:
    """Return for each cell a finite, widened box around its points: the space of a field that is trained alone.

    Args:
        points: [N, 3] in the world.
        cells: of space.
        part: of the extent, to widen by.
        trim: whether a few of the points may lie outside.

    Returns:
        [C, 2, 3] float64 in the world; of a cell without points, its own box without what is far away.
    """
    points = points.detach().to("cpu", torch.float64)
    points = points[cells.domain.holds(points)]
    owners, inward = cells.of(points), cells.domain.inward(points)
    # Half as far as infinity, where space is contracted.
    low, high = (torch.tensor(corner, dtype=torch.float64) for corner in (cells.domain.lower, cells.domain.upper))
    most = torch.stack([low, high]) * (0.75 if cells.domain.contracted else 1.0)
    found: list[Tensor] = []
    for number, extent in enumerate(cells.extents()):
        inside = inward[owners == number]
        if len(inside):
            ends = [_TRIMMED, 1 - _TRIMMED] if trim else [0.0, 1.0]
            extent = inside.quantile(torch.tensor(ends, dtype=torch.float64), dim=0)
        else:
            extent = torch.stack([extent[0].maximum(most[0]), extent[1].minimum(most[1])])
        middle, half = extent.mean(0), ((extent[1] - extent[0]) / 2).clamp_min(_SMALLEST / 2)
        found.append(torch.stack([middle - half, middle + half]))
    tight = torch.stack(found)
    if cells.domain.contracted:
        tight = tight.clamp(most[0, 0], most[1, 0])
    return widened(cells.domain.outward(tight), part)


def tiles(cells: Partition, part: float) -> Tensor:
    """Widen each cell, but not beyond the domain. Return [C, 2, 3] float64 in the coordinates in which cells are
    cut."""
    low, high = (torch.tensor(c, dtype=torch.float64) for c in (cells.domain.lower, cells.domain.upper))
    wide = widened(cells.extents(), part)
    return torch.stack([wide[:, 0].maximum(low), wide[:, 1].minimum(high)], 1)


def weight_in_tile(inward: Tensor, tile: Tensor, extent: Tensor) -> Tensor:
    """Return the weight of a tile's field at positions (not normalised): 1 in its middle, 0 from its faces on.

    It falls linearly over the overlap, which lies on both sides of the cell's own face; at a face that the domain ends
    at there is no overlap. In its own cell a field counts one half at least.

    Args:
        inward: [N, 3] positions, in the coordinates that cells are cut in.
        tile: [2, 3] of `tiles`. extent: [2, 3] of the cell.
    """
    ramp_width = (extent - tile).abs() * 2
    inside = torch.stack([inward - tile[0], tile[1] - inward], 1)  # [N, 2, 3]
    ramp = torch.where(ramp_width > 0, inside / ramp_width.clamp_min(1e-12), (inside >= 0).to(inside))
    return ramp.clamp(0, 1).flatten(1).amin(1)


def camera_weights(origins: Tensor, boxes: Tensor, home: Tensor) -> Tensor:
    """Return the weight of each camera group's field for rays, by their origins: [R, C], each row sums to 1.

    Fields count whose box of cameras has the origin; by the distance from its middle to the power of -4.

    Args:
        origins: [R, 3] in the world. boxes: [C, 2, 3] of the groups, widened.
        home: [R] int64 a group that counts wherever the ray begins.
    """
    boxes = boxes.to(origins)
    inside = ((origins[:, None] >= boxes[:, 0]) & (origins[:, None] <= boxes[:, 1])).all(2)
    inside[torch.arange(len(home), device=home.device), home] = True
    away = (origins[:, None] - boxes.mean(1)).norm(dim=2)
    # From the nearest on, so that no power of a small distance overflows.
    nearest = away.masked_fill(~inside, torch.inf).amin(1, keepdim=True)
    weights = torch.where(inside, ((nearest + 1e-6) / (away + 1e-6)) ** _POWER, 0.0)
    return weights / weights.sum(1, keepdim=True)


def whole_rays(hits: Tensor, nears: Tensor, fars: Tensor) -> tuple[Tensor, Segments]:
    """Return rays for fields that are trained alone: each ray whole, once for each field that gets it.

    Args:
        hits: [R, C] bool, which fields a ray is shown to. nears, fars: [R, C] or [R, 1] where it begins and ends.

    Returns:
        [M] which ray each is; and segments of M rays that have one each, those of field 0 first.
    """
    field, ray = hits.t().nonzero(as_tuple=True)
    near, far = (ends.expand(hits.shape)[ray, field] for ends in (nears, fars))
    begins = (0, *hits.sum(0).cumsum(0).tolist())
    number = torch.arange(begins[-1], device=hits.device)
    return ray, Segments(begins[-1], number, near, far, begins, number[:, None], torch.ones_like(number))
