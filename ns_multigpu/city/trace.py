"""Ray tracing: a grid traversal over all rays at once.

Rays step from cell to cell (Amanatides and Woo, "A fast voxel traversal algorithm for ray tracing", Eurographics 1987).
At each step the rays that dip below a cell's tallest solid meet the solids of that cell's list, as one flat batch of
(ray, solid) pairs; rays that are done leave the working set. The nearest hit is kept as one 64-bit key, distance above
number, so that taking the least key is exact and does not depend on the order in which pairs are met.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ns_multigpu.city import shapes
from ns_multigpu.city.grid import CELL, FAR, Frame, Layer
from ns_multigpu.city.noise import value_noise_3d
from ns_multigpu.city.solids import Shape

SKY = -2
"""Number of a ray without a hit."""
GROUND = -1
"""Number of the ground, the plane z = 0."""
_NONE = 0x7FFFFFFF


@dataclass(frozen=True)
class Geometry:
    """Geometry for rays at one moment.

    Attributes:
        frame: the grid.
        layers: the solids, by shape.
        top: [cells] height of the tallest solid of each cell, at least 0.
        tallest: the greatest of them.
        clear: [cells] height above which nothing hides the sun.
    """

    frame: Frame
    layers: tuple[Layer, ...]
    top: Tensor
    tallest: float
    clear: Tensor

    def to(self, device: torch.device) -> "Geometry":
        """Return the same on another device."""
        return replace(
            self,
            layers=tuple(layer.to(device) for layer in self.layers),
            top=self.top.to(device),
            clear=self.clear.to(device),
        )


def reciprocal(d: Tensor) -> Tensor:
    """Return 1 / d, with zeros replaced by tiny numbers to avoid infinity times zero."""
    tiny = torch.full_like(d, 1e-9)
    return 1.0 / torch.where(d.abs() < 1e-9, tiny, d)


def _keys(t: Tensor, numbers: Tensor | int) -> Tensor:
    """Return sortable keys: the bits of a positive float increase with its value."""
    return (t.view(torch.int32).to(torch.int64) << 32) | numbers


def _distance(keys: Tensor) -> Tensor:
    return (keys >> 32).to(torch.int32).view(torch.float32)


LEAF = 0.09
"""Pixel width below which gaps between leaves are visible, metres; from further away crowns are closed."""


@dataclass(frozen=True)
class Width:
    """Width of rays: at + spread * distance, metres (at: [n])."""

    at: Tensor
    spread: float


def trace(
    scene: Geometry, origin: Tensor, direction: Tensor, width: Width | None = None, *, shadow: bool = False
) -> tuple[Tensor, Tensor]:
    """Return the first hit of each ray.

    Args:
        scene: what can be met.
        origin: [3, n] float32 metres.
        direction: [3, n] unit vectors.
        width: of the rays, which pass between leaves where they are narrow; None for wide ones, which never do.
        shadow: rays go to the sun; stop at any hit, leave out the ground, and give up where nothing hides the sun.

    Returns:
        (t, number): [n] distance in metres (FAR where there is nothing), and [n] int64 number of the solid, GROUND or
        SKY. With shadow, number is only good for telling SKY from the rest.
    """
    frame, n_cells = scene.frame, scene.frame.n
    o, d = list(origin.unbind(0)), list(direction.unbind(0))
    inv = list(reciprocal(direction).unbind(0))
    ground = -o[2] * inv[2]
    ground = torch.where((ground > 0) & (d[2] < 0), ground, torch.full_like(ground, FAR))
    best = _keys(torch.full_like(ground, FAR) if shadow else ground, _NONE)

    # The part of each ray over the grid and below its tallest solid.
    rim = frame.low + CELL
    begin, end = torch.zeros_like(ground), torch.full_like(ground, FAR)
    for axis in (0, 1):
        a, b = (rim - o[axis]) * inv[axis], (-rim - o[axis]) * inv[axis]
        begin, end = torch.maximum(begin, torch.minimum(a, b)), torch.minimum(end, torch.maximum(a, b))
    a, b = (scene.tallest - o[2]) * inv[2], (-1e-3 - o[2]) * inv[2]
    begin, end = torch.maximum(begin, torch.minimum(a, b)), torch.minimum(end, torch.maximum(a, b))
    end = torch.minimum(end, _distance(best))

    # Rays along the rim of the grid would come to it at no finite distance.
    rays = (begin < end.clamp_max(1e6)).nonzero().squeeze(1)
    t_in = begin.index_select(0, rays)

    def start_cell(axis: int) -> Tensor:
        at = o[axis].index_select(0, rays) + d[axis].index_select(0, rays) * t_in
        return ((at - frame.low) * (1.0 / CELL)).long().clamp_(1, n_cells - 2)

    cx, cy = start_cell(0), start_cell(1)
    ahead = [(inv[axis] > 0).to(torch.int64) for axis in (0, 1)]
    while len(rays):
        cell = cy * n_cells + cx
        height, rise = o[2].index_select(0, rays), d[2].index_select(0, rays)
        z_in = height + rise * t_in
        if shadow:  # what is above the clear height of its cell sees the sun
            keep = (z_in < scene.clear.index_select(0, cell)).nonzero().squeeze(1)
            if len(keep) < len(rays):
                rays, cx, cy, cell, t_in, z_in, height, rise = (
                    v.index_select(0, keep) for v in (rays, cx, cy, cell, t_in, z_in, height, rise)
                )
        ahead_x, ahead_y = ahead[0].index_select(0, rays), ahead[1].index_select(0, rays)
        tx = ((cx + ahead_x) * CELL + frame.low - o[0].index_select(0, rays)) * inv[0].index_select(0, rays)
        ty = ((cy + ahead_y) * CELL + frame.low - o[1].index_select(0, rays)) * inv[1].index_select(0, rays)
        t_out = torch.minimum(tx, ty)
        lowest = torch.minimum(z_in, height + rise * t_out).clamp_min_(0.0)  # below an empty cell there is only ground
        near = (lowest < scene.top.index_select(0, cell)).nonzero().squeeze(1)
        if len(near):
            some, at, low = (v.index_select(0, near) for v in (rays, cell, lowest))
            _meet_cells(scene, some, at, low, o, d, inv, width, best)
        step_x = (tx <= ty).to(torch.int64)
        cx = cx + (2 * ahead_x - 1) * step_x
        cy = cy + (2 * ahead_y - 1) * (1 - step_x)
        found = best.index_select(0, rays)
        limit = torch.minimum(end.index_select(0, rays), _distance(found))
        if shadow:
            limit = torch.where((found & _NONE) != _NONE, torch.zeros_like(limit), limit)
        keep = (t_out < limit).nonzero().squeeze(1)
        rays, cx, cy, t_in = (v.index_select(0, keep) for v in (rays, cx, cy, t_out))
    t, number = _distance(best), best & _NONE
    nothing = torch.where(t < FAR, torch.full_like(number, GROUND), torch.full_like(number, SKY))
    return t, torch.where(number == _NONE, nothing, number)


def _meet_cells(
    scene: Geometry,
    rays: Tensor,
    cell: Tensor,
    lowest: Tensor,
    o: shapes.Columns,
    d: shapes.Columns,
    inv: shapes.Columns,
    width: Width | None,
    best: Tensor,
) -> None:
    """Lower `best` to the nearest hit of each ray [m] with the solids listed in its cell [m]."""
    for layer in scene.layers:
        if not layer.numbers.numel():
            continue
        near = (lowest < layer.top.index_select(0, cell)).nonzero().squeeze(1)
        if not len(near):
            continue
        at = cell.index_select(0, near)
        count = layer.count.index_select(0, at)
        owner, rank = expand(count)
        slot = layer.start.index_select(0, at).index_select(0, owner) + rank
        ray = rays.index_select(0, near).index_select(0, owner)
        t, hit = shapes.entry(
            layer.shape,
            [row.index_select(0, slot) for row in layer.slots],
            [row.index_select(0, ray) for row in o],
            [row.index_select(0, ray) for row in d],
            [row.index_select(0, ray) for row in inv],
        )
        hits = hit.nonzero().squeeze(1)
        ray, t, slot = (v.index_select(0, hits) for v in (ray, t, slot))
        if width is not None and layer.shape is Shape.BLOB:
            gaps = layer.slots[6].index_select(0, slot)
            leaf = _leaves(ray, t, gaps, o, d, width).nonzero().squeeze(1)
            ray, t, slot = (v.index_select(0, leaf) for v in (ray, t, slot))
        best.scatter_reduce_(0, ray, _keys(t, layer.numbers.index_select(0, slot)), "amin")


def _leaves(ray: Tensor, t: Tensor, gaps: Tensor, o: shapes.Columns, d: shapes.Columns, width: Width) -> Tensor:
    """Return [n] True if rays hit a leaf, not a gap, on the skin of a crown at distance t.

    gaps: [n] about which share of the skin is open.
    """
    result = torch.ones_like(t, dtype=torch.bool)
    wide = width.at.index_select(0, ray) + width.spread * t
    fine = ((wide < LEAF) & (gaps > 0)).nonzero().squeeze(1)
    if len(fine):
        at, which = t.index_select(0, fine), ray.index_select(0, fine)
        p = [o[k].index_select(0, which) + d[k].index_select(0, which) * at for k in range(3)]
        noise = 0.6 * value_noise_3d(111, *(c / 0.21 for c in p)) + 0.4 * value_noise_3d(112, *(c / 0.09 for c in p))
        # The gaps close smoothly towards the width from which on there are none.
        closing = (wide.index_select(0, fine) * (1.6 / LEAF) - 0.6).clamp(0, 1)
        most = 1.0 - gaps.index_select(0, fine) * (1.0 - closing)
        result[fine] = noise < most
    return result


def expand(count: Tensor) -> tuple[Tensor, Tensor]:
    """Return, for counts [m], all at least 1, the entry of each of sum(count) items, and its rank in the entry.

    The same as repeat_interleave, several times faster on a CPU.
    """
    ends = count.cumsum(0)
    total = int(ends[-1])
    owner = torch.zeros(total, dtype=torch.int64, device=count.device)
    owner[ends[:-1]] = 1
    owner = owner.cumsum(0)
    rank = torch.arange(total, device=count.device) - (ends - count).index_select(0, owner)
    return owner, rank


def surface_normal(scene: Geometry, origin: Tensor, direction: Tensor, t: Tensor, number: Tensor) -> Tensor:
    """Return the outward unit normals [3, n] at the hits of `trace`; up for ground and sky."""
    result = torch.zeros_like(origin)
    result[2] = 1.0
    for layer in scene.layers:
        last = layer.first + layer.geometry.shape[1]
        pick = ((number >= layer.first) & (number < last)).nonzero().squeeze(1)
        if not len(pick):
            continue
        solid = number.index_select(0, pick) - layer.first
        o, d = ([row.index_select(0, pick) for row in table.unbind(0)] for table in (origin, direction))
        found = shapes.normal(
            layer.shape,
            [row.index_select(0, solid) for row in layer.geometry],
            o,
            d,
            list(reciprocal(torch.stack(d)).unbind(0)),
            t.index_select(0, pick),
        )
        for axis in range(3):
            result[axis].index_copy_(0, pick, found[axis])
    return result
