"""Walls with windows, and the flat roofs above them."""

import torch
from torch import Tensor

from ns_multigpu.city.buildings import BRICK, CONCRETE, GLASS, PLASTER, SHOPS
from ns_multigpu.city.ground import grass
from ns_multigpu.city.noise import fractal, hash_unit, mix, pulse
from ns_multigpu.city.shapes import Columns

_WARM = (1.0, 0.62, 0.26)


def _colour(values: tuple[float, float, float], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=torch.float32, device=like.device)[:, None]


def wall_colour(
    p: Columns, side: Tensor, g: Columns, attributes: Columns, fp: Tensor, number: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the colour of the walls of buildings.

    Args:
        p: 3 columns [n], the place on the wall, metres.
        side: [n] true on walls that face along x (so that they run along y).
        g: 6 columns [n], the building's box.
        attributes: columns [n] of solids.ATTRIBUTES.
        fp: [n] width of a pixel on the wall, metres.
        number: [n] of the solid.

    Returns:
        (albedo [3, n], gloss [n], glow [3, n] light that comes out of lit windows).
    """
    red, green, blue, random, floor, bay, style = attributes[:7]
    shops = (style >= SHOPS).float()
    style = style - SHOPS * shops
    glass, brick = (style == GLASS).float(), (style == BRICK).float()
    plaster, concrete = (style == PLASTER).float(), (style == CONCRETE).float()
    start, end = torch.where(side, g[1], g[0]), torch.where(side, g[4], g[3])
    along = torch.where(side, p[1], p[0]) - start
    length, height, z = end - start, g[5] - g[2], p[2] - g[2]
    bays = (length / bay).round().clamp_min(1)
    storeys = (height / floor).round().clamp_min(1)
    u, v = along / length * bays, z / height * storeys
    wu, wv = fp / length * bays, fp / height * storeys
    ground_floor = (v < 1).float() * (g[2] < 0.1).float()
    shop = ground_floor * shops

    # The window's rectangle in its bay and storey, by style; the frame is a few centimetres wider.
    narrow = 0.26 + 0.1 * random
    u0 = torch.where(glass > 0, torch.full_like(u, 0.03), narrow) * (1 - shop) + 0.06 * shop
    v0 = torch.where(glass > 0, torch.full_like(u, 0.07), 0.28 + 0.06 * random) * (1 - shop) + 0.08 * shop
    v1 = torch.where(glass > 0, torch.full_like(u, 0.97), torch.full_like(u, 0.80)) * (1 - shop) + 0.76 * shop
    pane = pulse(u, wu, u0, 1 - u0) * pulse(v, wv, v0, v1)
    fu, fv = 0.07 * bays / length, 0.07 * storeys / height
    framed = pulse(u, wu, (u0 - fu).clamp_min(0), (1 - u0 + fu).clamp_max(1)) * pulse(v, wv, v0 - fv, v1 + fv)
    bars = pulse(u, wu, 0.5 - 0.4 * fu, 0.5 + 0.4 * fu)
    across = pulse(v, wv, v0 + 0.68 * (v1 - v0), v0 + 0.68 * (v1 - v0) + 0.8 * fv)
    pane = pane * (1 - torch.maximum(bars, across) * (1 - shop))
    framed = (framed - pane).clamp(0, 1)

    # The wall itself: bricks in rows, plaster with stains, panels of concrete, a band at each storey.
    dirt = fractal(61, along + 37 * random, p[2], fp, (6.0, 1.6, 0.5, 0.16, 0.06), (0.22, 0.16, 0.16, 0.16, 0.2))
    row = z / 0.10
    shift = along / 0.28 + 0.5 * (row.floor() % 2)
    near = (1.0 - fp / 0.13).clamp(0, 1)
    stone = hash_unit(62, shift.floor().long(), row.floor().long()) - 0.5
    mortar = 1 - pulse(shift, fp / 0.28, 0.05, 1.0) * pulse(row, fp / 0.10, 0.14, 1.0)
    bricks = brick * (0.5 * stone * near - 0.12 * mortar)
    panels = concrete * -0.35 * (1 - pulse(u, wu, 0.012, 1.0) * pulse(v, wv, 0.015, 1.0))
    streaks = plaster * fractal(63, along * 3.0, p[2] * 0.35, fp * 2, (1.3, 0.4), (0.14, 0.12))
    low = -0.25 * torch.exp(-z.clamp_min(0) * 0.9) * (g[2] < 0.1).float()
    wall = torch.stack([red, green, blue]) * (
        1.0 + dirt * (1 - 0.6 * glass) + bricks + panels + streaks + low
    ).clamp_min(0.15)
    band = pulse(v + 0.04, wv, 0.0, 0.07) * (1 - glass) * (0.35 + 0.65 * (random > 0.5).float())
    wall = mix(wall, wall * 0.55 + 0.26, band)
    sign = shop * pulse(v, wv, 0.80, 0.97)
    unit = (along / length * bays / 2).floor().long()
    tone = hash_unit(64, number, unit)
    signs = torch.stack([0.1 + 0.5 * tone, 0.12 + 0.3 * (tone * 7 % 1), 0.1 + 0.45 * (tone * 13 % 1)])
    wall = mix(wall, signs, sign)
    frame_tone = torch.where(random > 0.55, torch.full_like(u, 0.62), torch.full_like(u, 0.09))
    wall = mix(wall, frame_tone.expand(3, -1), framed)

    # Behind the glass: dark interiors, blinds, here and there a lamp. From afar all windows fade to their mean.
    face = side.long() + 2 * ((p[0] + p[1]) > 0.5 * (g[0] + g[1] + g[3] + g[4])).long()
    interior = hash_unit(65, number * 4 + face, (along / length * bays).floor().long(), v.floor().long())
    fade = (1.4 - 0.9 * torch.maximum(wu, wv)).clamp(0, 1)
    blinds = ((interior > 0.62) & (interior < 0.86)).float() * fade + 0.24 * (1 - fade)
    lamps = (interior > 0.93).float() * fade + 0.07 * (1 - fade)
    lamps = torch.maximum(lamps, 0.5 * shop)
    inner = mix(_colour((0.030, 0.036, 0.045), u), _colour((0.42, 0.39, 0.33), u), 0.75 * blinds)
    inner = mix(inner, torch.stack([red, green, blue]) * 0.5, 0.7 * glass)
    albedo = mix(wall, inner, pane)
    glow = _colour(_WARM, u) * (0.42 * lamps * pane * (1 - 0.6 * glass))
    gloss = pane * (0.55 + 0.3 * glass) * (1 - 0.5 * blinds)
    return albedo, gloss, glow


def roof_colour(p: Columns, g: Columns, attributes: Columns, fp: Tensor) -> Tensor:
    """Return the colour [3, n] of flat roofs: gravel, tar with seams, pale membrane, a few lawns (arguments as
    above).
    """
    random = attributes[3]
    x, y = p[0], p[1]
    base = fractal(71, x, y, fp, (8.0, 2.2, 0.7), (0.3, 0.28, 0.2))
    grit = fractal(72, x, y, fp, (0.3, 0.12, 0.05), (0.3, 0.34, 0.3))
    gravel = _colour((0.40, 0.375, 0.34), x) * (1 + base + 1.3 * grit)
    seams = 1 - pulse((x - g[0]) / 1.1, fp / 1.1, 0.06, 1.0)
    tar = _colour((0.115, 0.115, 0.12), x) * (1 + base + 0.5 * grit + 0.5 * seams)
    pale = _colour((0.58, 0.57, 0.55), x) * (1 + 0.7 * base + 0.2 * grit - 0.25 * seams)
    result = torch.where(random < 0.42, gravel, torch.where(random < 0.68, tar, pale))
    return torch.where(random > 0.93, grass(x, y, fp), result)
