"""The plan of a city: a square of blocks between roads, each block cut into lots, each lot given a use.

Plain arrays over blocks and lots, drawn from one seeded generator, so that a city of thousands of blocks is planned in
a moment. The centre of the city is the origin; x points east, y north; metres.
"""

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

PITCH = 70.0
"""Distance between the middles of neighbouring roads."""
ROAD = 11.0
"""Width of a carriageway: two lanes of 3.3 m between two rows of parked cars."""
WALK = 3.2
"""Width of a pavement."""
INNER = PITCH - ROAD - 2 * WALK
"""Side of the part of a block that is cut into lots."""
SLOTS = 3
"""Largest number of lots along one side of a block."""


class Use(IntEnum):
    """Use of a lot; it also sets the colour of its ground."""

    NONE = 0
    GARDEN = 1
    HOUSE = 2
    FLATS = 3
    SHOP = 4
    TOWER = 5


@dataclass(frozen=True)
class Lots:
    """The lots of a city, as columns of length n (metres; block: index of the block; density: 0 edge to 1 centre)."""

    x0: NDArray[np.float64]
    y0: NDArray[np.float64]
    x1: NDArray[np.float64]
    y1: NDArray[np.float64]
    block: NDArray[np.int64]
    density: NDArray[np.float64]
    use: NDArray[np.int64]

    def of(self, use: Use) -> "Lots":
        """Return the lots of one use."""
        keep = self.use == use
        return Lots(*(getattr(self, name)[keep] for name in self.__dataclass_fields__))

    def __len__(self) -> int:
        return len(self.x0)


@dataclass(frozen=True)
class CityPlan:
    """Positions of roads, blocks, parks and lots.

    Attributes:
        blocks: blocks along each side.
        lots: all lots.
        park: [blocks * blocks] whether a block is a park; block index = row * blocks + column.
        cuts: [blocks * blocks, 4] where a block is cut, from its inner corner: two cuts in x, two in y, metres.
        ground: [blocks * blocks, 9] the use of each slot, slot = row * 3 + column.
    """

    blocks: int
    lots: Lots
    park: NDArray[np.bool_]
    cuts: NDArray[np.float64]
    ground: NDArray[np.int64]

    @property
    def half(self) -> float:
        """Distance from the city's centre to the outer edge of its outermost road, metres."""
        return 0.5 * (self.blocks * PITCH + ROAD)

    def roads(self) -> NDArray[np.float64]:
        """Return [blocks + 1] the middle of the roads, the same along x and along y, metres."""
        return (np.arange(self.blocks + 1) - 0.5 * self.blocks) * PITCH

    def corners(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return x and y [blocks * blocks] of the lower inner corner of each block, metres."""
        low = self.roads()[:-1] + 0.5 * ROAD + WALK
        y, x = np.meshgrid(low, low, indexing="ij")
        return x.ravel(), y.ravel()


def _density(blocks: int, rng: np.random.Generator) -> NDArray[np.float64]:
    """Return [blocks * blocks] in [0, 1]: a centre, a few lesser centres, and random variation."""
    at = (np.arange(blocks) + 0.5) / blocks * 2 - 1
    y, x = np.meshgrid(at, at, indexing="ij")
    total = np.exp(-2.2 * (x**2 + y**2))
    for _ in range(min(12, blocks // 4)):
        cx, cy, width = *rng.uniform(-0.9, 0.9, 2), rng.uniform(0.1, 0.25)
        total += 0.6 * np.exp(-((x - cx) ** 2 + (y - cy) ** 2) / width**2)
    # A hamlet has no skyline: the middle of a small city is not as dense as that of a large one.
    total *= min(1.0, 0.45 + 0.14 * blocks)
    return np.clip(0.75 * total + rng.normal(0.0, 0.14, total.shape), 0.0, 1.0).ravel()


def make_plan(blocks: int, seed: int) -> CityPlan:
    """Plan a city.

    Args:
        blocks: blocks along each side, at least 1.
        seed: of the generator; the same seed and size give the same plan.

    Returns:
        The plan.

    Raises:
        ValueError: blocks is below 1 or seed negative.
    """
    if blocks < 1:
        raise ValueError(f"blocks is {blocks}: a city has at least 1 block along each side")
    if seed < 0:
        raise ValueError(f"seed is {seed}: give a seed of 0 or more")
    rng = np.random.default_rng([seed, blocks])
    n = blocks * blocks
    density = _density(blocks, rng)
    park = (rng.random(n) < 0.11) & (n > 1)
    if n > 1 and not park.any():
        park[rng.integers(n)] = True

    # Dense blocks are cut in two by two, others in three by two, two by three or three by three.
    three = rng.random((n, 2)) < np.clip(1.15 - 0.9 * density, 0.25, 0.95)[:, None]
    if n == 1:
        three[:] = True
    first = np.where(three, INNER / 3, INNER / 2) + rng.uniform(-2.5, 2.5, (n, 2))
    second = np.where(three, 2 * INNER / 3 + rng.uniform(-2.5, 2.5, (n, 2)), INNER)
    cuts = np.stack([first[:, 0], second[:, 0], first[:, 1], second[:, 1]], axis=1)

    # Each slot [n, 3, 3] (rows along y): its rectangle and use. An uncut third slot has no area and no use.
    edges_x = np.stack([np.zeros(n), first[:, 0], second[:, 0], np.full(n, INNER)], axis=1)
    edges_y = np.stack([np.zeros(n), first[:, 1], second[:, 1], np.full(n, INNER)], axis=1)
    exists = np.ones((n, SLOTS, SLOTS), bool)
    exists[:, :, 2] &= three[:, 0, None]
    exists[:, 2, :] &= three[:, 1, None]
    exists &= ~park[:, None, None]

    draw = rng.random((n, SLOTS, SLOTS))
    dense = np.clip(density[:, None, None] + rng.normal(0, 0.12, draw.shape), 0, 1)
    garden, shop = 0.10, 0.10
    tower = np.clip(1.5 * dense - 0.5, 0.02, 0.62)
    house = np.clip(0.85 - 1.7 * dense, 0.05, 0.7)
    use = np.full(draw.shape, int(Use.FLATS))
    bounds = np.cumsum([np.full_like(dense, garden), np.full_like(dense, shop), tower, house], axis=0)
    for bound, kind in reversed(list(zip(bounds, (Use.GARDEN, Use.SHOP, Use.TOWER, Use.HOUSE), strict=True))):
        use[draw < bound] = kind
    # Whatever the draw, a city has a bit of everything, also one of a single block.
    flat = use.reshape(-1)
    free = rng.permutation(np.flatnonzero(exists.reshape(-1)))
    for slot, kind in zip(free, (Use.TOWER, Use.HOUSE, Use.GARDEN, Use.FLATS, Use.SHOP), strict=False):
        if not (flat[exists.reshape(-1)] == kind).any():
            flat[slot] = kind
    use[~exists] = Use.NONE

    plan = CityPlan(blocks, _no_lots(), park, cuts, use.reshape(n, -1))
    corner_x, corner_y = plan.corners()
    block, row, column = np.nonzero(exists)
    lots = Lots(
        x0=corner_x[block] + edges_x[block, column],
        y0=corner_y[block] + edges_y[block, row],
        x1=corner_x[block] + edges_x[block, column + 1],
        y1=corner_y[block] + edges_y[block, row + 1],
        block=block,
        density=dense[block, row, column],
        use=use[block, row, column],
    )
    return CityPlan(blocks, lots, park, cuts, plan.ground)


def _no_lots() -> Lots:
    none = np.zeros(0)
    return Lots(none, none, none, none, np.zeros(0, np.int64), none, np.zeros(0, np.int64))
