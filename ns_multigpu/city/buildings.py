"""Buildings of a city: houses, flats, shops and towers, with their rooftop structures."""

import numpy as np
from numpy.typing import NDArray

from ns_multigpu.city.plan import CityPlan, Lots, Use
from ns_multigpu.city.solids import Material, Pile, Shape

F = NDArray[np.float64]

BRICK, PLASTER, CONCRETE, GLASS = 0.0, 1.0, 2.0, 3.0
"""Styles of a facade (attribute `style`); 4 is added to a style whose ground floor is a row of shops."""
SHOPS = 4.0

# Linear colours. Walls by style; roofs of tiles; machines.
_WALLS = {
    BRICK: np.array([[0.36, 0.13, 0.08], [0.28, 0.12, 0.08], [0.42, 0.20, 0.12], [0.33, 0.22, 0.15]]),
    PLASTER: np.array(
        [[0.72, 0.62, 0.44], [0.68, 0.66, 0.60], [0.62, 0.42, 0.30], [0.50, 0.56, 0.58], [0.74, 0.52, 0.34]]
    ),
    CONCRETE: np.array([[0.42, 0.40, 0.37], [0.52, 0.50, 0.46], [0.34, 0.34, 0.35]]),
    GLASS: np.array([[0.16, 0.24, 0.30], [0.12, 0.20, 0.22], [0.24, 0.30, 0.34], [0.18, 0.20, 0.24]]),
}
_TILES = np.array([[0.36, 0.11, 0.06], [0.28, 0.10, 0.07], [0.16, 0.15, 0.16], [0.30, 0.17, 0.10]])
_METAL = np.array([0.45, 0.46, 0.47])


def _pick(rng: np.random.Generator, palette: F, n: int) -> F:
    """Return n colours of a palette, each slightly varied."""
    return np.clip(palette[rng.integers(len(palette), size=n)] * rng.uniform(0.85, 1.15, (n, 1)), 0.02, 0.9)


def _walls(rng: np.random.Generator, styles: F) -> F:
    colours = np.zeros((len(styles), 3))
    for style, palette in _WALLS.items():
        here = styles % SHOPS == style
        colours[here] = _pick(rng, palette, int(here.sum()))
    return colours


def add_buildings(plan: CityPlan, pile: Pile, rng: np.random.Generator) -> None:
    """Add the buildings of every lot of the plan to the pile."""
    _houses(plan.lots.of(Use.HOUSE), pile, rng)
    _flats(plan.lots.of(Use.FLATS), pile, rng)
    _shops(plan.lots.of(Use.SHOP), pile, rng)
    _towers(plan.lots.of(Use.TOWER), pile, rng)


def _houses(lots: Lots, pile: Pile, rng: np.random.Generator) -> None:
    n = len(lots)
    inset = rng.uniform(1.8, 3.6, (4, n))
    x0, x1 = lots.x0 + inset[0], lots.x1 - inset[1]
    y0, y1 = lots.y0 + inset[2], lots.y1 - inset[3]
    storeys = rng.integers(2, 4, n)
    floor = rng.uniform(2.7, 3.0, n)
    eaves = storeys * floor
    style = rng.choice([BRICK, PLASTER, PLASTER], n)
    wall = _walls(rng, style)
    random = rng.random(n)
    pile.add(
        Shape.BOX, [x0, y0, 0.0, x1, y1, eaves], Material.FACADE, wall, random, floor, rng.uniform(2.6, 3.4, n), style
    )
    # The ridge runs along the longer side; a third are hipped, so that all four slopes meet above the middle.
    along_x = (x1 - x0) > (y1 - y0)
    over = 0.45
    half = 0.5 * np.where(along_x, y1 - y0, x1 - x0) + over
    pitch = rng.uniform(0.6, 0.95, n)
    rise = half * pitch
    length = 0.5 * np.where(along_x, x1 - x0, y1 - y0) + over
    ends = np.where(rng.random(n) < 0.35, rise / length, 0.0)
    slope_x, slope_y = np.where(along_x, ends, pitch), np.where(along_x, pitch, ends)
    base = eaves - over * pitch * 0.5
    top = base + rise
    tiles = _pick(rng, _TILES, n)
    pile.add(
        Shape.ROOF,
        [x0 - over, y0 - over, base, x1 + over, y1 + over, top, slope_x, slope_y, top],
        Material.TILES, tiles, random, floor, 3.0, style,
    )  # fmt: skip
    cx = x0 + (x1 - x0) * rng.uniform(0.25, 0.75, n)
    cy = y0 + (y1 - y0) * rng.uniform(0.3, 0.7, n)
    pile.add(
        Shape.BOX,
        [cx - 0.4, cy - 0.4, eaves, cx + 0.4, cy + 0.4, top + 0.7],
        Material.PLAIN,
        np.array([0.3, 0.14, 0.1]),
    )


def _flats(lots: Lots, pile: Pile, rng: np.random.Generator) -> None:
    n = len(lots)
    inset = rng.uniform(0.3, 1.6, (4, n))
    x0, x1 = lots.x0 + inset[0], lots.x1 - inset[1]
    y0, y1 = lots.y0 + inset[2], lots.y1 - inset[3]
    floor = rng.uniform(2.9, 3.4, n)
    storeys = rng.integers(4, 7, n) + np.round(2.0 * lots.density).astype(int)
    height = storeys * floor
    style = rng.choice([BRICK, BRICK, PLASTER, CONCRETE], n) + SHOPS * (rng.random(n) < 0.5)
    wall, bay, random = _walls(rng, style), rng.uniform(2.5, 3.6, n), rng.random(n)
    # A third are L-shaped: a tall wing along one side and a lower one behind.
    bent = rng.random(n) < 0.38
    split = np.where(bent, x0 + (x1 - x0) * rng.uniform(0.42, 0.6, n), x1)
    pile.add(Shape.BOX, [x0, y0, 0.0, split, y1, height], Material.FACADE, wall, random, floor, bay, style)
    low = np.maximum(height - floor * rng.integers(1, 4, n), floor)
    depth = y0 + (y1 - y0) * rng.uniform(0.45, 0.7, n)
    pick = np.flatnonzero(bent)
    pile.add(
        Shape.BOX,
        [split[pick], y0[pick], 0.0, x1[pick], depth[pick], low[pick]],
        Material.FACADE, wall[pick], random[pick], floor[pick], bay[pick], style[pick],
    )  # fmt: skip
    # A quarter carry a tiled roof with a flat top (a mansard); the others machines.
    mansard = rng.random(n) < 0.28
    m = np.flatnonzero(mansard)
    rise = rng.uniform(2.2, 3.2, len(m))
    slope = rng.uniform(1.1, 1.8, len(m))
    half_width = 0.5 * np.maximum(split[m] - x0[m], y1[m] - y0[m]) + 0.3
    apex = height[m] + slope * 0.5 * np.minimum(split[m] - x0[m], y1[m] - y0[m])
    wide = (split[m] - x0[m]) > (y1[m] - y0[m])
    other = (apex - height[m]) / half_width
    pile.add(
        Shape.ROOF,
        [x0[m] - 0.3, y0[m] - 0.3, height[m], split[m] + 0.3, y1[m] + 0.3, height[m] + rise,
         np.where(wide, other, slope), np.where(wide, slope, other), apex],
        Material.TILES, _pick(rng, _TILES, len(m)), random[m], floor[m], 3.0, style[m],
    )  # fmt: skip
    f = np.flatnonzero(~mansard)
    _parapet(pile, x0[f], y0[f], split[f], y1[f], height[f], wall[f])
    _machines(pile, rng, x0[f], y0[f], split[f], y1[f], height[f], count=3)


def _shops(lots: Lots, pile: Pile, rng: np.random.Generator) -> None:
    n = len(lots)
    inset = rng.uniform(0.5, 3.0, (4, n))
    x0, x1 = lots.x0 + inset[0], lots.x1 - inset[1]
    y0, y1 = lots.y0 + inset[2], lots.y1 - inset[3]
    floor = rng.uniform(3.6, 4.4, n)
    height = rng.integers(1, 3, n) * floor
    style = rng.choice([BRICK, CONCRETE, PLASTER], n) + SHOPS
    wall = _walls(rng, style)
    pile.add(
        Shape.BOX,
        [x0, y0, 0.0, x1, y1, height],
        Material.FACADE,
        wall,
        rng.random(n),
        floor,
        rng.uniform(3.5, 5, n),
        style,
    )
    _parapet(pile, x0, y0, x1, y1, height, wall)
    _machines(pile, rng, x0, y0, x1, y1, height, count=4)


def _towers(lots: Lots, pile: Pile, rng: np.random.Generator) -> None:
    n = len(lots)
    x0, x1, y0, y1 = lots.x0 + 0.5, lots.x1 - 0.5, lots.y0 + 0.5, lots.y1 - 0.5
    floor = rng.uniform(3.1, 3.6, n)
    style = rng.choice([GLASS, GLASS, CONCRETE, BRICK], n)
    wall, bay, random = _walls(rng, style), rng.uniform(1.8, 3.2, n), rng.random(n)
    podium = rng.integers(2, 4, n) * floor
    base_style = rng.choice([CONCRETE, BRICK, PLASTER], n) + SHOPS
    base_wall = _walls(rng, base_style)
    pile.add(
        Shape.BOX,
        [x0, y0, 0.0, x1, y1, podium],
        Material.FACADE,
        base_wall,
        random,
        floor,
        rng.uniform(3, 4.5, n),
        base_style,
    )
    _parapet(pile, x0, y0, x1, y1, podium, base_wall)
    height = podium
    stages = rng.integers(1, 4, n)
    storeys = rng.integers(6, 10, n) + np.round(7 * lots.density**2).astype(int)
    shrink = rng.uniform(1.5, 3.2, (4, n))
    for stage in range(3):
        pick = np.flatnonzero(stages > stage)
        x0, x1 = x0 + shrink[0] * (0.75**stage), x1 - shrink[1] * (0.75**stage)
        y0, y1 = y0 + shrink[2] * (0.75**stage), y1 - shrink[3] * (0.75**stage)
        top = height + floor * np.maximum(np.round(storeys / (stage * 0.9 + 1)), 2)
        pile.add(
            Shape.BOX, [x0[pick], y0[pick], height[pick] - 0.02, x1[pick], y1[pick], top[pick]],
            Material.FACADE, wall[pick], random[pick], floor[pick], bay[pick], style[pick],
        )  # fmt: skip
        last = np.flatnonzero(stages == stage + 1)
        _parapet(pile, x0[last], y0[last], x1[last], y1[last], top[last], wall[last])
        _machines(pile, rng, x0[last], y0[last], x1[last], y1[last], top[last], count=3)
        mast = last[rng.random(len(last)) < 0.3]
        mx, my = 0.5 * (x0 + x1)[mast], 0.5 * (y0 + y1)[mast]
        pile.add(
            Shape.BOX, [mx - 0.2, my - 0.2, top[mast], mx + 0.2, my + 0.2, top[mast] + rng.uniform(5, 11, len(mast))],
            Material.PLAIN, np.array([0.5, 0.12, 0.1]),
        )  # fmt: skip
        height = np.where(stages > stage, top, height)


def _parapet(pile: Pile, x0: F, y0: F, x1: F, y1: F, z: F, wall: F) -> None:
    """Add a low wall around each flat roof."""
    thick, high = 0.3, 0.75
    for ax0, ay0, ax1, ay1 in (
        (x0, y0, x1, y0 + thick), (x0, y1 - thick, x1, y1),
        (x0, y0 + thick, x0 + thick, y1 - thick), (x1 - thick, y0 + thick, x1, y1 - thick),
    ):  # fmt: skip
        pile.add(Shape.BOX, [ax0, ay0, z - 0.02, ax1, ay1, z + high], Material.PLAIN, np.clip(wall * 0.9 + 0.05, 0, 1))


def _machines(pile: Pile, rng: np.random.Generator, x0: F, y0: F, x1: F, y1: F, z: F, count: int) -> None:
    """Add a stair head and up to `count` air-conditioning boxes on each flat roof."""
    n = len(x0)
    width, depth = x1 - x0, y1 - y0

    def put(low: float, high: float, tall: tuple[float, float], keep: NDArray[np.bool_], colour: F) -> None:
        w, d = rng.uniform(low, high, (2, n))
        cx = x0 + 1.2 + w / 2 + rng.random(n) * np.maximum(width - w - 2.4, 0)
        cy = y0 + 1.2 + d / 2 + rng.random(n) * np.maximum(depth - d - 2.4, 0)
        h = rng.uniform(*tall, n)
        k = np.flatnonzero(keep & (width > w + 3) & (depth > d + 3))
        pile.add(
            Shape.BOX, [(cx - w / 2)[k], (cy - d / 2)[k], z[k] - 0.02, (cx + w / 2)[k], (cy + d / 2)[k], (z + h)[k]],
            Material.PLAIN, colour[k], rng.random(n)[k], style=1.0,
        )  # fmt: skip

    put(2.6, 4.0, (2.3, 3.0), rng.random(n) < 0.8, np.tile([0.42, 0.38, 0.34], (n, 1)))
    for _ in range(count):
        put(1.0, 2.2, (0.9, 1.6), rng.random(n) < 0.75, _METAL * rng.uniform(0.7, 1.3, (n, 1)))
