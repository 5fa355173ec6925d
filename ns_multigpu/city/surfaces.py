"""Surfaces other than ground and walls: machines and poles, tiled roofs, leaves, cars."""

import torch
from torch import Tensor

from ns_multigpu.city.noise import fractal, hash_unit, mix, pulse, value_noise_3d
from ns_multigpu.city.shapes import Columns


def plain_colour(p: Columns, normal: Tensor, attributes: Columns, fp: Tensor) -> Tensor:
    """Return the colour [3, n] of machines (style 1: with grilles), bark and wood (style 2: with grain), or plain
    surfaces.
    """
    style, random = attributes[6], attributes[3]
    u = p[0] * normal[1].abs() + p[1] * normal[0].abs() + p[0] * normal[2].abs()
    v = p[2] + p[1] * normal[2].abs()
    grain = fractal(81, u, v, fp, (2.0, 0.5, 0.13, 0.05), (0.2, 0.2, 0.2, 0.2))
    bark = (style == 2).float() * fractal(82, u * 4, v, fp * 2, (0.6, 0.2), (0.6, 0.5))
    louvres = (style == 1).float() * 0.4 * (pulse(v / 0.22 + random, fp / 0.22, 0.0, 0.4) - 0.4) * (1 - normal[2].abs())
    fan = (style == 1).float() * normal[2].clamp_min(0) * 0.5 * (pulse(u / 0.9 + random, fp / 0.9, 0.1, 0.8) - 0.7)
    return torch.stack(attributes[:3]) * (1 + grain + bark + louvres + fan).clamp_min(0.1)


def tiles_colour(p: Columns, normal: Tensor, attributes: Columns, fp: Tensor) -> Tensor:
    """Return the colour [3, n] of tiled slopes, and of the plaster of gables."""
    random = attributes[3]
    steep = normal[2] < 0.2
    slope_x = normal[0].abs() > normal[1].abs()
    down = torch.where(slope_x, p[0], p[1]) / normal[2].clamp_min(0.3)
    level = torch.where(slope_x, p[1], p[0])
    row = down / 0.36
    column = level / 0.3 + 0.5 * (row.floor() % 2)
    near = (1.0 - fp / 0.4).clamp(0, 1)
    tile = hash_unit(91, column.floor().long(), row.floor().long()) - 0.5
    lap = pulse(row, fp / 0.36, 0.0, 0.22)
    joint = pulse(column, fp / 0.3, 0.0, 0.12)
    moss = fractal(92, p[0], p[1] + p[2], fp, (5.0, 1.7, 0.6, 0.2), (0.3, 0.25, 0.22, 0.2))
    colour = torch.stack(attributes[:3]) * (1 + moss + 0.45 * tile * near - 0.4 * lap - 0.15 * joint).clamp_min(0.15)
    plaster = (0.52 + 0.2 * random) * (1 + 0.6 * moss)
    gable = torch.stack([plaster, plaster * 0.93, plaster * 0.82])
    flat = normal[2] > 0.99
    return torch.where(steep, gable, torch.where(flat, colour * 0.55 + 0.05, colour))


def leaves_colour(p: Columns, normal: Tensor, attributes: Columns, fp: Tensor) -> tuple[Tensor, Tensor]:
    """Return the colour [3, n] of crowns, and normals [3, n] perturbed as by clumps of leaves."""
    random = attributes[3]
    one, two = torch.zeros_like(fp), torch.zeros_like(fp)
    for wavelength, gain in ((0.95, 0.8), (0.4, 1.0), (0.16, 1.1)):
        fade = gain * (1.25 - (2.5 / wavelength) * fp).clamp(0, 1)
        if not bool(fade.any()):
            continue
        q = [c / wavelength for c in p]
        one += fade * (value_noise_3d(101, q[0], q[1], q[2]) - 0.5)
        two += fade * (value_noise_3d(102, q[1] + 31.7, q[0], q[2]) - 0.5)
    bumpy = normal + 0.9 * torch.stack([one, two, 0.7 * (one - two)])
    bumpy = bumpy / bumpy.norm(dim=0).clamp_min(1e-6)
    clump = (1 + 0.6 * (one + two)).clamp(0.15, 2.0)
    inner = 0.62 + 0.38 * (normal[2] * 0.5 + 0.5)  # the lower side of a crown is darker
    autumn = (random > 0.9).float()
    colour = torch.stack(attributes[:3])
    colour = mix(colour, colour * torch.tensor([[2.4], [1.15], [0.5]], device=fp.device), autumn)
    return colour * clump * inner, bumpy


def car_colour(p: Columns, normal: Tensor, g: Columns, attributes: Columns, fp: Tensor) -> tuple[Tensor, Tensor]:
    """Return colour [3, n] and gloss [n] of cars: paint, dark windows, wheels."""
    cabin = attributes[6] > 0.5
    along_x = (g[3] - g[0]) > (g[4] - g[1])
    along = torch.where(along_x, p[0] - g[0], p[1] - g[1])
    length = torch.where(along_x, g[3] - g[0], g[4] - g[1])
    z = p[2] - g[2]
    window = cabin & (normal[2] < 0.8) & (z > 0.06)
    pillar = pulse(along / length * 2, fp / length * 2, 0.0, 0.07)
    side = torch.where(along_x, normal[1].abs(), normal[0].abs()) > 0.5
    glass = window.float() * (1 - pillar * side.float())
    wheel = torch.minimum((along - 0.19 * length).abs(), (along - 0.81 * length).abs())
    tyre = (~cabin & side).float() * ((wheel * wheel + (z - 0.08) * (z - 0.08)) < 0.36 * 0.36).float()
    sill = (~cabin).float() * (z < 0.12).float() * (normal[2] < 0.5).float()
    front = torch.where(along_x, normal[0].abs(), normal[1].abs()) > 0.5
    across = torch.where(along_x, p[1] - 0.5 * (g[1] + g[4]), p[0] - 0.5 * (g[0] + g[3])).abs()
    lights = (~cabin & front).float() * ((z > 0.36) & (z < 0.5) & (across > 0.5) & (across < 0.8)).float()
    paint = torch.stack(attributes[:3])
    dark = torch.full_like(paint, 0.025)
    colour = mix(paint, dark, torch.maximum(torch.maximum(glass, tyre), sill))
    colour = mix(colour, torch.full_like(paint, 0.55), lights * 0.7)
    return colour, 0.12 + 0.5 * glass - 0.12 * tyre
