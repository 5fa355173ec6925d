"""The ground: roads with their markings, pavements, gardens, parks, courtyards, fields outside."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ns_multigpu.city.noise import fractal, hash_unit, mix, pulse, stripe, value_noise
from ns_multigpu.city.plan import INNER, PITCH, ROAD, WALK, CityPlan, Use

EDGE = 0.5 * ROAD


@dataclass(frozen=True)
class GroundPlan:
    """Tensors of a plan that the ground's colours need, on one device (cuts: [4, blocks^2], use: [blocks^2 * 9])."""

    blocks: int
    half: float
    park: Tensor
    cuts: Tensor
    use: Tensor

    @staticmethod
    def of(plan: CityPlan, device: torch.device) -> "GroundPlan":
        """Return the tensors of a plan."""
        return GroundPlan(
            plan.blocks,
            plan.half,
            torch.from_numpy(plan.park).to(device),
            torch.from_numpy(plan.cuts.T.copy()).float().to(device),
            torch.from_numpy(plan.ground.reshape(-1)).to(device),
        )


def _rgb(r: float, g: float, b: float, like: Tensor) -> Tensor:
    return torch.tensor([[r], [g], [b]], dtype=torch.float32, device=like.device)


def grass(x: Tensor, y: Tensor, fp: Tensor) -> Tensor:
    """Return the colour [3, n] of a lawn."""
    broad = fractal(11, x, y, fp, (23.0, 7.0, 2.3), (0.5, 0.45, 0.4))
    blades = fractal(12, x, y, fp, (0.7, 0.26, 0.09), (0.8, 0.8, 0.7))
    green = mix(_rgb(0.085, 0.17, 0.035, x), _rgb(0.20, 0.23, 0.07, x), (0.5 + broad).clamp(0, 1))
    return green * (1.0 + blades)


def _asphalt(x: Tensor, y: Tensor, fp: Tensor) -> Tensor:
    broad = fractal(21, x, y, fp, (13.0, 3.1, 0.9), (0.25, 0.2, 0.2))
    grit = fractal(22, x, y, fp, (0.33, 0.13, 0.05), (0.28, 0.32, 0.3))
    patch = ((value_noise(23, x * 0.11, y * 0.19) - 0.72) * 14.0).clamp(0, 1)
    return _rgb(0.105, 0.105, 0.110, x) * (1.0 + broad + grit - 0.28 * patch)


def _slabs(x: Tensor, y: Tensor, fp: Tensor, side: float, seed: int) -> Tensor:
    """Return the brightness factor of paving stones: around 1 per stone, darker joints."""
    u, v, w = x / side, y / side, fp / side
    far = (w * 1.6).clamp(0, 1)
    stone = (hash_unit(seed, u.floor().long(), v.floor().long()) - 0.5) * 0.26 * (1 - far)
    gap = 0.035 / side
    joint = 1 - pulse(u, w, gap, 1.0) * pulse(v, w, gap, 1.0)
    dirt = fractal(seed + 1, x, y, fp, (5.0, 1.1, 0.22, 0.08), (0.22, 0.18, 0.16, 0.2))
    return 1.0 + stone + dirt - 0.42 * joint


def _road_marks(along: Tensor, across: Tensor, to_junction: Tensor, fp: Tensor, outside: Tensor) -> Tensor:
    """Return the coverage [n] of a road by white paint: along and across it, and past the crossing's edge, metres."""
    open_road = ((to_junction > 6.0) | outside).float()
    dashes = stripe(across, fp, 0.0, 0.075) * pulse(along / 6.0, fp / 6.0, 0.0, 0.5)
    edges = stripe(across.abs(), fp, EDGE - 2.2, 0.05) * (~outside).float()
    bays = pulse(along / 6.4, fp / 6.4, 0.0, 0.016) * stripe(across.abs(), fp, EDGE - 1.1, 1.1) * (~outside).float()
    zebra = stripe(to_junction, fp, 2.7, 1.5) * pulse(across / 1.1 + 0.25, fp / 1.1, 0.0, 0.5)
    stop = stripe(to_junction, fp, 5.2, 0.2) * (across.abs() < EDGE - 2.2).float()
    town = (~outside).float()
    return (open_road * torch.maximum(torch.maximum(dashes, edges), bays) + town * (zebra + stop)).clamp(0, 1)


def ground_colour(plan: GroundPlan, x: Tensor, y: Tensor, fp: Tensor) -> tuple[Tensor, Tensor]:
    """Return the colour of the ground.

    Args:
        plan: of the city.
        x, y: [n] metres.
        fp: [n] width of a pixel on the ground, metres.

    Returns:
        (albedo [3, n] linear, gloss [n] share of mirror-like reflection).
    """
    blocks = plan.blocks
    place = [(v / PITCH + 0.5 * blocks).round().clamp(0, blocks) for v in (x, y)]
    rx, ry = x - (place[0] - 0.5 * blocks) * PITCH, y - (place[1] - 0.5 * blocks) * PITCH
    outside = torch.maximum(x.abs(), y.abs()) > plan.half
    on_y, on_x = rx.abs() < EDGE, ry.abs() < EDGE  # on a road along y, along x
    road = on_x | on_y
    albedo, gloss = torch.empty(3, len(x), device=x.device), torch.zeros_like(x)

    def put(pick: Tensor, colour: Tensor) -> None:
        for channel in range(3):
            albedo[channel].index_copy_(0, pick, colour[channel])

    pick = road.nonzero().squeeze(1)
    if len(pick):
        px, py, f, a, b, out = (v.index_select(0, pick) for v in (x, y, fp, rx, ry, outside))
        along_y = b.abs() >= EDGE  # the crossing itself has no marks
        along_x = a.abs() >= EDGE
        paint_y = _road_marks(py, a, b.abs() - EDGE, f, out) * along_y.float()
        paint_x = _road_marks(px, b, a.abs() - EDGE, f, out) * along_x.float()
        worn = 0.82 + 0.5 * fractal(24, px, py, f, (1.3, 0.2), (0.5, 0.5))
        put(pick, mix(_asphalt(px, py, f), _rgb(0.62, 0.62, 0.60, x), (paint_x + paint_y).clamp(0, 1) * worn))
    pick = (~road & outside).nonzero().squeeze(1)
    if len(pick):
        px, py, f = (v.index_select(0, pick) for v in (x, y, fp))
        put(pick, _fields(px, py, f))
    pick = (~road & ~outside).nonzero().squeeze(1)
    if len(pick):
        colour, shine = _block_colour(plan, *(v.index_select(0, pick) for v in (x, y, fp)))
        put(pick, colour)
        gloss.index_copy_(0, pick, shine)
    return albedo, gloss


def _fields(x: Tensor, y: Tensor, fp: Tensor) -> Tensor:
    """Return the colour of meadows and crops outside the city."""
    kind = hash_unit(31, (x / 90.0 + 0.37).floor().long(), (y / 60.0 + 0.71).floor().long())
    crop = mix(_rgb(0.22, 0.21, 0.08, x), _rgb(0.24, 0.17, 0.10, x), (kind * 3 % 1.0))
    rows = (
        1.0
        + 0.25 * (pulse(x / 1.6, fp / 1.6, 0.0, 0.5) - 0.5)
        + fractal(32, x, y, fp, (9.0, 1.2, 0.3), (0.3, 0.4, 0.4))
    )
    return mix(grass(x, y, fp), crop * rows, (kind > 0.5).float())


def _block_colour(plan: GroundPlan, x: Tensor, y: Tensor, fp: Tensor) -> tuple[Tensor, Tensor]:
    """Return the colour of pavements and of the ground of lots and parks."""
    blocks = plan.blocks
    column, row = ((v / PITCH + 0.5 * blocks).floor().clamp(0, blocks - 1) for v in (x, y))
    u = x - (column - 0.5 * blocks) * PITCH - EDGE - WALK  # from the inner corner of the block
    v = y - (row - 0.5 * blocks) * PITCH - EDGE - WALK
    block = (row * blocks + column).long()
    inset = torch.minimum(torch.minimum(u, v), torch.minimum(INNER - u, INNER - v))
    # Pavement with a kerb of pale stone along its outer edge.
    stones = _rgb(0.36, 0.345, 0.325, x) * _slabs(x, y, fp, 0.8, 41)
    kerb = stripe(inset, fp, -WALK + 0.12, 0.14)
    colour = mix(stones, _rgb(0.50, 0.49, 0.47, x), kerb)

    cuts = [c.index_select(0, block) for c in plan.cuts]
    slot = (u > cuts[0]).long() + (u > cuts[1]).long() + 3 * ((v > cuts[2]).long() + (v > cuts[3]).long())
    use = plan.use.index_select(0, block * 9 + slot.clamp(0, 8))
    inside = inset > 0
    lawn = inside & ((use == Use.GARDEN) | (use == Use.HOUSE))
    yard = inside & ~lawn
    green = grass(x, y, fp)
    # Between the lots: hedges' shade on lawns, worn concrete in yards.
    border = torch.minimum((u - cuts[0]).abs(), (v - cuts[2]).abs())
    border = torch.minimum(border, torch.minimum((u - cuts[1]).abs(), (v - cuts[3]).abs()))
    green = green * (1.0 - 0.45 * stripe(border, fp, 0.0, 0.35))
    colour = torch.where(lawn, green, colour)
    worn = _rgb(0.25, 0.235, 0.21, x) * _slabs(x, y, fp, 2.4, 43)
    colour = torch.where(yard, worn, colour)

    park = inside & plan.park.index_select(0, block)
    pick = park.nonzero().squeeze(1)
    gloss = torch.zeros_like(x)
    if len(pick):
        px, py, f = (w.index_select(0, pick) for w in (x, y, fp))
        pu, pv = u.index_select(0, pick) - 0.5 * INNER, v.index_select(0, pick) - 0.5 * INNER
        inside_park, water = _park(px, py, pu, pv, f)
        gloss.index_copy_(0, pick, water * 0.55)
        for channel in range(3):
            colour[channel].index_copy_(0, pick, inside_park[channel])
    return colour, gloss


def _park(x: Tensor, y: Tensor, u: Tensor, v: Tensor, fp: Tensor) -> tuple[Tensor, Tensor]:
    """Return the colour of a park around its centre (u = v = 0), and the fraction of water: lawn, gravel paths, a
    pond.
    """
    radius = (u * u + v * v).sqrt()
    gravel = _rgb(0.44, 0.37, 0.27, x) * (1.0 + fractal(51, x, y, fp, (2.0, 0.5, 0.12, 0.05), (0.2, 0.25, 0.35, 0.4)))
    cross = torch.maximum(stripe(u, fp, 0.0, 1.4), stripe(v, fp, 0.0, 1.4)) * (radius > 12).float()
    ring = stripe(radius, fp, 14.0, 2.0)
    colour = mix(grass(x, y, fp), gravel, torch.maximum(cross, ring))
    flowers = stripe(radius, fp, 10.4, 1.0) * (0.4 + fractal(52, x, y, fp, (0.8, 0.35), (1.2, 0.8))).clamp(0, 1)
    tint = hash_unit(53, (x * 0.7).floor().long(), (y * 0.7).floor().long())
    colour = mix(colour, mix(_rgb(0.6, 0.08, 0.1, x), _rgb(0.7, 0.5, 0.06, x), tint), flowers)
    water = stripe(radius, fp, 0.0, 8.0)
    rim = stripe(radius, fp, 8.25, 0.3)
    colour = mix(colour, _rgb(0.03, 0.075, 0.075, x), water)
    return mix(colour, _rgb(0.45, 0.44, 0.42, x), rim), water
