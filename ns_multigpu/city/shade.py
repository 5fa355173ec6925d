"""Shading: the light along rays, from the surfaces that they hit."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ns_multigpu.city import facade, ground, sky, surfaces
from ns_multigpu.city.grid import FAR, Layer
from ns_multigpu.city.solids import Material
from ns_multigpu.city.trace import GROUND, SKY, Geometry, Width, surface_normal, trace


@dataclass(frozen=True)
class ShadedCity:
    """City at one moment on one device: geometry for rays, and data for shading.

    Attributes:
        geometry: what rays meet.
        attributes: [ATTRIBUTES, n] of all solids, by number.
        plan: of the ground.
        surroundings: for the light of the sky.
    """

    geometry: Geometry
    attributes: Tensor
    plan: ground.GroundPlan
    surroundings: sky.Surroundings

    @property
    def device(self) -> torch.device:
        """Device of the tensors."""
        return self.attributes.device


@dataclass
class _Surface:
    """Properties of the points hit by rays: [3, n] or [n]."""

    albedo: Tensor
    gloss: Tensor
    glow: Tensor
    normal: Tensor

    def write(self, pick: Tensor, albedo: Tensor, gloss: Tensor | None = None, glow: Tensor | None = None) -> None:
        for channel in range(3):
            self.albedo[channel].index_copy_(0, pick, albedo[channel])
            if glow is not None:
                self.glow[channel].index_copy_(0, pick, glow[channel])
        if gloss is not None:
            self.gloss.index_copy_(0, pick, gloss)


def _rows(table: Tensor, pick: Tensor) -> list[Tensor]:
    return [row.index_select(0, pick) for row in table.unbind(0)]


def radiance(scene: ShadedCity, origin: Tensor, direction: Tensor, spread: float) -> Tensor:
    """Return the light along rays.

    Args:
        scene: what is looked at.
        origin, direction: [3, n] rays, metres and unit vectors.
        spread: width of a pixel at distance 1.

    Returns:
        [3, n] linear colour.
    """
    t, number = trace(scene.geometry, origin, direction, Width(torch.zeros_like(origin[0]), spread))
    result = torch.empty_like(origin)
    up = (number == SKY).nonzero().squeeze(1)
    seen = (number != SKY).nonzero().squeeze(1)
    if len(up):
        found = sky.sky_colour(torch.stack(_rows(direction, up)))
        for channel in range(3):
            result[channel].index_copy_(0, up, found[channel])
    if len(seen):
        o, d = torch.stack(_rows(origin, seen)), torch.stack(_rows(direction, seen))
        found = _surface_light(scene, o, d, t.index_select(0, seen), number.index_select(0, seen), spread)
        for channel in range(3):
            result[channel].index_copy_(0, seen, found[channel])
    return result


def _surface_light(scene: ShadedCity, o: Tensor, d: Tensor, t: Tensor, number: Tensor, spread: float) -> Tensor:
    """Return the colour [3, n] of surface points at distance t along rays."""
    p = o + d * t
    normal = surface_normal(scene.geometry, o, d, t, number)
    facing = -(normal * d).sum(0)
    footprint = spread * t * facing.clamp(0.06, 1.0).rsqrt()
    surface = _surface(scene, p, normal, number, footprint)

    sun = torch.tensor(sky.SUN, dtype=torch.float32, device=p.device)
    # The geometric normal decides what can be lit at all, the ruffled one how much.
    lit = surface.normal[0] * sun[0] + surface.normal[1] * sun[1] + surface.normal[2] * sun[2]
    lit = lit.clamp_min(0)
    front = normal[0] * sun[0] + normal[1] * sun[1] + normal[2] * sun[2]
    ask = ((front > 0) & (lit > 0)).nonzero().squeeze(1)
    visible = torch.zeros_like(t)
    if len(ask):
        start = torch.stack(_rows(p, ask)) + 0.02 * torch.stack(_rows(normal, ask))
        towards = sun[:, None].expand(3, len(ask)).contiguous()
        width = Width(footprint.index_select(0, ask), 0.0)
        blocked, _ = trace(scene.geometry, start, towards, width, shadow=True)
        visible.index_copy_(0, ask, (blocked >= FAR).to(t.dtype))

    away = p + 1.5 * normal
    open_sky = scene.surroundings.openness(away[0], away[1], p[2])
    upward = 0.5 + 0.5 * surface.normal[2]

    def light(values: tuple[float, float, float]) -> Tensor:
        return torch.tensor(values, device=p.device)[:, None]

    ambient = light(sky.SKYLIGHT) * (upward * open_sky) + light(sky.BOUNCE) * ((1 - upward) * (0.35 + 0.65 * open_sky))
    colour = surface.albedo * (light(sky.SUNLIGHT) * (lit * visible) + ambient) + surface.glow
    colour = _reflect(colour, surface, d, normal, facing, open_sky)
    haze = 1 - torch.exp(-t * (1 / sky.HAZE_LENGTH))
    return colour + (light(sky.HAZE) - colour) * haze


def _reflect(colour: Tensor, surface: _Surface, d: Tensor, normal: Tensor, facing: Tensor, open_sky: Tensor) -> Tensor:
    """Add the sky's reflection on glossy surfaces (Schlick, "An inexpensive BRDF model", 1994)."""
    pick = (surface.gloss > 0.02).nonzero().squeeze(1)
    if not len(pick):
        return colour
    n, into = torch.stack(_rows(normal, pick)), torch.stack(_rows(d, pick))
    cosine = facing.index_select(0, pick).clamp(0, 1)
    mirrored = into + 2 * cosine * n
    image = sky.sky_colour(mirrored, clouds=False)
    # Below the horizon, or deep between houses, the mirror shows walls and street.
    seen = (mirrored[2] * 4 + 0.5).clamp(0, 1) * (0.25 + 0.75 * open_sky.index_select(0, pick))
    image = image * seen + 0.10 * (1 - seen)
    weight = surface.gloss.index_select(0, pick) * (0.10 + 0.90 * (1 - cosine).pow(4))
    for channel in range(3):
        old = colour[channel].index_select(0, pick)
        colour[channel].index_copy_(0, pick, old + (image[channel] - old * 0.5) * weight)
    return colour


def _surface(scene: ShadedCity, p: Tensor, normal: Tensor, number: Tensor, fp: Tensor) -> _Surface:
    """Return colour, gloss and glow of each point, by its material."""
    surface = _Surface(torch.zeros_like(p), torch.zeros_like(fp), torch.zeros_like(p), normal.clone())
    pick = (number == GROUND).nonzero().squeeze(1)
    if len(pick):
        albedo, gloss = ground.ground_colour(
            scene.plan, p[0].index_select(0, pick), p[1].index_select(0, pick), fp.index_select(0, pick)
        )
        surface.write(pick, albedo, gloss)
    solid = (number >= 0).nonzero().squeeze(1)
    if not len(solid):
        return surface
    material = scene.attributes[7].index_select(0, number.index_select(0, solid)).long()
    for kind in Material:
        pick = solid.index_select(0, (material == kind).nonzero().squeeze(1))
        if len(pick):
            _SHADERS[kind](scene, surface, pick, p, number, fp)
    return surface


def _at(scene: ShadedCity, pick: Tensor, p: Tensor, number: Tensor, fp: Tensor) -> tuple:
    """Return position, number, attributes and footprint of the picked points."""
    which = number.index_select(0, pick)
    return _rows(p, pick), which, _rows(scene.attributes, which), fp.index_select(0, pick)


def _geometry(layers: tuple[Layer, ...], which: Tensor) -> list[Tensor]:
    """Return the geometry (the first six columns) of solids by number, from any layer."""
    result = [torch.zeros(len(which), device=which.device) for _ in range(6)]
    for layer in layers:
        n = layer.geometry.shape[1]
        here = ((which >= layer.first) & (which < layer.first + n)).nonzero().squeeze(1)
        if len(here):
            index = which.index_select(0, here) - layer.first
            for column in range(6):
                result[column].index_copy_(0, here, layer.geometry[column].index_select(0, index))
    return result


def _shade_facade(scene: ShadedCity, s: _Surface, pick: Tensor, p: Tensor, number: Tensor, fp: Tensor) -> None:
    flat = s.normal[2].index_select(0, pick) > 0.5
    top = pick.index_select(0, flat.nonzero().squeeze(1))
    if len(top):
        place, which, attributes, width = _at(scene, top, p, number, fp)
        s.write(top, facade.roof_colour(place, _geometry(scene.geometry.layers, which), attributes, width))
    wall = pick.index_select(0, (~flat).nonzero().squeeze(1))
    if len(wall):
        place, which, attributes, width = _at(scene, wall, p, number, fp)
        side = s.normal[0].index_select(0, wall).abs() > 0.5
        g = _geometry(scene.geometry.layers, which)
        s.write(wall, *facade.wall_colour(place, side, g, attributes, width, which))


def _shade_plain(scene: ShadedCity, s: _Surface, pick: Tensor, p: Tensor, number: Tensor, fp: Tensor) -> None:
    place, _, attributes, width = _at(scene, pick, p, number, fp)
    s.write(pick, surfaces.plain_colour(place, torch.stack(_rows(s.normal, pick)), attributes, width))


def _shade_tiles(scene: ShadedCity, s: _Surface, pick: Tensor, p: Tensor, number: Tensor, fp: Tensor) -> None:
    place, _, attributes, width = _at(scene, pick, p, number, fp)
    s.write(pick, surfaces.tiles_colour(place, torch.stack(_rows(s.normal, pick)), attributes, width))


def _shade_leaves(scene: ShadedCity, s: _Surface, pick: Tensor, p: Tensor, number: Tensor, fp: Tensor) -> None:
    place, _, attributes, width = _at(scene, pick, p, number, fp)
    colour, bumpy = surfaces.leaves_colour(place, torch.stack(_rows(s.normal, pick)), attributes, width)
    s.write(pick, colour)
    for axis in range(3):
        s.normal[axis].index_copy_(0, pick, bumpy[axis])


def _shade_car(scene: ShadedCity, s: _Surface, pick: Tensor, p: Tensor, number: Tensor, fp: Tensor) -> None:
    place, which, attributes, width = _at(scene, pick, p, number, fp)
    g = _geometry(scene.geometry.layers, which)
    s.write(pick, *surfaces.car_colour(place, torch.stack(_rows(s.normal, pick)), g, attributes, width))


_SHADERS = {
    Material.FACADE: _shade_facade,
    Material.PLAIN: _shade_plain,
    Material.TILES: _shade_tiles,
    Material.LEAVES: _shade_leaves,
    Material.CAR: _shade_car,
}
