"""Objects in streets, gardens and parks: trees, lamps, benches, parked and moving cars."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ns_multigpu.city.plan import INNER, PITCH, ROAD, WALK, CityPlan, Use
from ns_multigpu.city.solids import Material, Pile, Shape, Solids

F = NDArray[np.float64]

LANE = 1.75
"""Distance from the middle of the road to the middle of a lane, metres."""
PARKED = 0.5 * ROAD - 1.15
"""Distance from the middle of the road to the middle of the parked cars, metres."""
SECONDS = 10.0
"""Duration in seconds of the times from 0 to 1 of a time-varying capture."""

_PAINT = np.array(
    [[0.62, 0.62, 0.63], [0.05, 0.05, 0.06], [0.42, 0.03, 0.03], [0.04, 0.09, 0.30], [0.25, 0.26, 0.28],
     [0.70, 0.68, 0.60], [0.06, 0.20, 0.14], [0.72, 0.38, 0.04]]
)  # fmt: skip


def add_trees(plan: CityPlan, pile: Pile, rng: np.random.Generator) -> None:
    """Add the trees along the pavements, in gardens, in parks, and a few outside the city."""
    corner_x, corner_y = plan.corners()
    places: list[tuple[F, F, F]] = []  # x, y, height
    # Pavements: both kerbs of every block, a tree each 9 m, some missing, none near the corners.
    along = np.arange(8.0, PITCH - ROAD - 6.0, 9.0)
    for side in range(4):
        keep = rng.random((len(corner_x), len(along))) < 0.62
        shift = along + rng.uniform(-1.2, 1.2, keep.shape)
        kerb = np.full_like(shift, -WALK + 0.9 if side % 2 == 0 else INNER + WALK - 0.9)
        dx, dy = (shift - WALK, kerb) if side < 2 else (kerb, shift - WALK)
        x, y = (corner_x[:, None] + dx)[keep], (corner_y[:, None] + dy)[keep]
        places.append((x, y, rng.uniform(5.0, 7.5, len(x))))
    lots = plan.lots.of(Use.GARDEN)
    for _ in range(6):
        places.append(_scatter(rng, lots.x0, lots.y0, lots.x1, lots.y1, (4.0, 9.0)))
    lots = plan.lots.of(Use.HOUSE)
    for _ in range(2):  # in the corners of the gardens, clear of the house
        corner = rng.integers(0, 2, (2, len(lots)))
        x = np.where(corner[0] == 0, lots.x0 + 1.0, lots.x1 - 1.0)
        y = np.where(corner[1] == 0, lots.y0 + 1.0, lots.y1 - 1.0)
        places.append((x, y, rng.uniform(3.0, 5.0, len(x))))
    park = np.flatnonzero(plan.park)
    for _ in range(34):
        x, y, h = _scatter(
            rng, corner_x[park], corner_y[park], corner_x[park] + INNER, corner_y[park] + INNER, (6.0, 12.0)
        )
        u, v = np.abs(x - corner_x[park] - INNER / 2), np.abs(y - corner_y[park] - INNER / 2)
        clear = (np.hypot(u, v) > 17.0) & (np.minimum(u, v) > 4.0)  # the pond and the paths stay open
        places.append((x[clear], y[clear], h[clear]))
    # Outside, a belt of wood that thickens outwards closes the view along the ground.
    outside = rng.uniform(-plan.half - 34, plan.half + 34, (2, 260 * (plan.blocks + 1)))
    past = np.abs(outside).max(0) - plan.half
    far = (past > 4) & (rng.random(len(past)) < np.clip(past / 34, 0.03, 1) ** 2) & (past > 0)
    near_road = (np.abs(outside[:, None, :] - plan.roads()[None, :, None]).min(1) < ROAD).any(0)
    x, y = outside[:, far & ~near_road]
    places.append((x, y, rng.uniform(5.0, 10.0, len(x))))
    _trees(pile, rng, *(np.concatenate(column) for column in zip(*places, strict=True)))


def _scatter(rng: np.random.Generator, x0: F, y0: F, x1: F, y1: F, tall: tuple[float, float]) -> tuple[F, F, F]:
    """Return one random position in each rectangle, 2 m from its sides where it is so wide, and a height."""
    margin = 2.0
    u, v = rng.random((2, len(x0)))
    x = x0 + margin + u * np.maximum(x1 - x0 - 2 * margin, 0)
    y = y0 + margin + v * np.maximum(y1 - y0 - 2 * margin, 0)
    return x, y, rng.uniform(*tall, len(x0))


def _trees(pile: Pile, rng: np.random.Generator, x: F, y: F, height: F) -> None:
    """Add a trunk and a crown of several overlapping blobs for each tree."""
    n = len(x)
    green = np.array([[0.075, 0.16, 0.030], [0.10, 0.19, 0.04], [0.055, 0.125, 0.035], [0.17, 0.19, 0.04]])
    colour = green[rng.integers(len(green), size=n)] * rng.uniform(0.8, 1.2, (n, 1))
    thick = 0.1 + 0.012 * height
    bark = np.array([0.13, 0.09, 0.06])
    pile.add(
        Shape.BOX, [x - thick, y - thick, 0.0, x + thick, y + thick, 0.62 * height], Material.PLAIN, bark, style=2.0
    )
    radius = height * rng.uniform(0.24, 0.31, n)
    middle = 0.66 * height
    random = rng.random(n)
    pile.add(
        Shape.BLOB, [x, y, middle, 0.92 * radius, 0.92 * radius, 0.32 * height, 0.3], Material.LEAVES, colour, random
    )
    turn = rng.uniform(0, 2 * np.pi, n)
    for part in range(5):
        angle = turn + part * 2 * np.pi / 5 + rng.uniform(-0.4, 0.4, n)
        out = radius * rng.uniform(0.5, 0.75, n)
        size = radius * rng.uniform(0.5, 0.72, n)
        z = middle + height * rng.uniform(-0.14, 0.2, n)
        tint = colour * rng.uniform(0.8, 1.25, (n, 1))
        pile.add(
            Shape.BLOB,
            [x + out * np.cos(angle), y + out * np.sin(angle), z, size, size, size * rng.uniform(0.7, 1.0, n), 0.46],
            Material.LEAVES, tint, random,
        )  # fmt: skip


def add_furniture(plan: CityPlan, pile: Pile, rng: np.random.Generator) -> None:
    """Add street lamps along the pavements and benches in the parks."""
    corner_x, corner_y = plan.corners()
    dark = np.array([0.09, 0.10, 0.10])
    for at in (3.5, INNER / 2, INNER - 3.5):
        for side in (-1, 1):
            x = corner_x + (-WALK + 0.45 if side < 0 else INNER + WALK - 0.45)
            y = corner_y + at
            pile.add(Shape.BOX, [x - 0.07, y - 0.07, 0.0, x + 0.07, y + 0.07, 6.2], Material.PLAIN, dark)
            end = x + side * 1.9
            x0, x1 = np.minimum(x, end), np.maximum(x, end)
            pile.add(Shape.BOX, [x0, y - 0.12, 6.2, x1, y + 0.12, 6.34], Material.PLAIN, dark)
    park = np.flatnonzero(plan.park)
    for turn in np.arange(8) * np.pi / 4 + np.pi / 8:
        x = corner_x[park] + INNER / 2 + 15.5 * np.cos(turn)
        y = corner_y[park] + INNER / 2 + 15.5 * np.sin(turn)
        wood = np.array([0.30, 0.19, 0.10])
        pile.add(
            Shape.BOX,
            [x - 0.8, y - 0.3, 0.0, x + 0.8, y + 0.3, 0.5],
            Material.PLAIN,
            wood,
            rng.random(len(park)),
            style=2.0,
        )


@dataclass(frozen=True)
class Cars:
    """Cars by their position at time 0, and their motion along their road.

    Attributes:
        along, across: [n] coordinate along the road's direction and across it, metres.
        along_x: [n] whether the road runs along x.
        speed: [n] metres per second, signed; 0 for a parked car.
        colour: [n, 3] linear.
        random: [n] in [0, 1).
        end: cars disappear at +end and reappear at -end, metres.
    """

    along: F
    across: F
    along_x: NDArray[np.bool_]
    speed: F
    colour: F
    random: F
    end: float

    def __len__(self) -> int:
        return len(self.along)

    def solids(self, time: float) -> Solids:
        """Return bodies and cabins (as roofs with cut tops) at a time in [0, 1]."""
        run = self.end * 2
        along = (self.along + self.speed * SECONDS * time + self.end) % run - self.end
        long, wide = 2.05 + 0.35 * self.random, 0.88
        heading = np.where(self.speed < 0, -1.0, 1.0)
        pile = Pile()

        def part(back: F, front: F, half: float, z0: float, z1: float, taper: float, style: float) -> None:
            low, high = along + np.minimum(back, front), along + np.maximum(back, front)
            left, right = self.across - half, self.across + half
            x0, x1 = np.where(self.along_x, low, left), np.where(self.along_x, high, right)
            y0, y1 = np.where(self.along_x, left, low), np.where(self.along_x, right, high)
            # All four slopes start at the foot's edges and would meet at one height, far above the cut at z1.
            ends = taper * half / (0.5 * (high - low))
            sx, sy = np.where(self.along_x, ends, taper), np.where(self.along_x, taper, ends)
            apex = z0 + taper * half if taper else z1
            pile.add(
                Shape.ROOF, [x0, y0, z0, x1, y1, z1, sx, sy, apex], Material.CAR, self.colour, self.random, style=style
            )

        part(-long, long, wide, 0.22, 0.92, 0.0, 0.0)
        length, middle = 0.62 * long, -0.12 * long * heading
        part(middle - length, middle + length, 0.8, 0.92, 1.45, 2.6, 1.0)
        return pile.solids(Shape.ROOF)


def make_cars(plan: CityPlan, density: float, rng: np.random.Generator) -> Cars:
    """Draw random parked and moving cars for every road.

    Args:
        plan: of the city.
        density: 1 for an ordinary day, 0 for no cars.
        rng: random numbers.

    Returns:
        The cars; moving ones keep clear of each other in their lane because all of a lane move at one speed.
    """
    columns: list[tuple[F, F, F, F]] = []  # along, across, along_x, speed
    end = plan.half + 20.0
    slots = np.arange(-end + 4.0, end - 4.0, 6.4)
    roads = plan.roads()
    for along_x in (0.0, 1.0):
        for road in roads:
            for side in (-1.0, 1.0):
                at = slots + rng.uniform(-0.4, 0.4, len(slots))
                at_junction = np.abs(at[:, None] - roads[None]).min(1) < 0.5 * ROAD + 7.0
                keep = ~at_junction & (np.abs(at) < plan.half) & (rng.random(len(at)) < 0.5 * density)
                at = at[keep]
                columns.append(
                    (at, np.full_like(at, road + side * PARKED), np.full_like(at, along_x), np.zeros_like(at))
                )
                # Right-hand traffic: along +x cars keep to -y, along +y to +x.
                direction = -side if along_x else side
                lane = slots[::3] + rng.uniform(0, 6)
                lane = lane[rng.random(len(lane)) < 0.42 * density]
                speed = np.full_like(lane, direction * rng.uniform(5.0, 9.0))
                columns.append((lane, np.full_like(lane, road + side * LANE), np.full_like(lane, along_x), speed))
    along, across, is_x, speed = (np.concatenate(c) for c in zip(*columns, strict=True))
    n = len(along)
    colour = _PAINT[rng.integers(len(_PAINT), size=n)] * rng.uniform(0.85, 1.15, (n, 1))
    return Cars(along, across, is_x > 0.5, speed, np.clip(colour, 0.02, 0.8), rng.random(n), end)
