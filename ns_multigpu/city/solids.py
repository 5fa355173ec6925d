"""Solids of a city, as plain tables.

Three shapes suffice: boxes (buildings, machines, trunks), roofs (boxes cut by up to four slopes: gables, hips,
mansards, cars' cabins) and blobs (ellipsoids: the crowns of trees). All are axis-aligned; lengths are metres, z is up.
"""

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float32]


class Shape(IntEnum):
    """Shape of a solid: it sets the ray intersection and the numbers that describe the solid."""

    BOX = 0  # x0 y0 z0 x1 y1 z1
    ROOF = 1  # the same, then slope_x, slope_y and the height at which the slopes meet
    BLOB = 2  # centre x y z, radii x y z, share of gaps between leaves

    @property
    def fields(self) -> int:
        """Count of numbers that describe one solid."""
        return (6, 9, 7)[self]


class Material(IntEnum):
    """Material of a solid's surface (facade.py, surfaces.py)."""

    FACADE = 0  # walls with windows, a flat roof on top
    PLAIN = 1  # one colour with grain: machines, chimneys, poles, trunks
    TILES = 2  # a tiled roof on plastered gables
    LEAVES = 3
    CAR = 4


ATTRIBUTES = 8
"""Columns of an attribute row: red, green, blue (linear), random, floor height, bay width, style, material."""


@dataclass(frozen=True)
class Solids:
    """Solids of one shape.

    Attributes:
        shape: their shape.
        geometry: [n, shape.fields] metres.
        attributes: [n, ATTRIBUTES].
    """

    shape: Shape
    geometry: Array
    attributes: Array

    def __post_init__(self) -> None:
        n = len(self.geometry)
        if self.geometry.shape != (n, self.shape.fields) or self.attributes.shape != (n, ATTRIBUTES):
            raise ValueError(
                f"{self.shape.name}: geometry {self.geometry.shape} and attributes {self.attributes.shape} "
                f"must be [n, {self.shape.fields}] and [n, {ATTRIBUTES}]"
            )

    def __len__(self) -> int:
        return len(self.geometry)

    def bounds(self) -> tuple[Array, Array]:
        """Return corners [n, 3] and [n, 3] of the solids' axis-aligned bounding boxes."""
        if self.shape is Shape.BLOB:
            return self.geometry[:, :3] - self.geometry[:, 3:6], self.geometry[:, :3] + self.geometry[:, 3:6]
        return self.geometry[:, :3], self.geometry[:, 3:6]


class Pile:
    """Collection of solids of every shape during planning."""

    def __init__(self) -> None:
        self._parts: dict[Shape, list[tuple[Array, Array]]] = {shape: [] for shape in Shape}

    def add(
        self,
        shape: Shape,
        geometry: list[NDArray[np.floating] | float],
        material: Material,
        colour: NDArray[np.floating],
        random: NDArray[np.floating] | float = 0.5,
        floor: NDArray[np.floating] | float = 3.0,
        bay: NDArray[np.floating] | float = 3.0,
        style: NDArray[np.floating] | float = 0.0,
    ) -> None:
        """Add n solids; geometry is a list of columns ([n] or numbers), colour is [n, 3] or [3], linear."""
        n = max(np.size(column) for column in geometry)
        if any(np.size(column) == 0 for column in geometry):
            return

        def columns(values: list[NDArray[np.floating] | float]) -> Array:
            return np.stack([np.broadcast_to(np.asarray(v, np.float32), n) for v in values], axis=1)

        rgb = np.broadcast_to(np.asarray(colour, np.float32), (n, 3))
        rest = columns([random, floor, bay, style, float(material)])
        self._parts[shape].append((columns(geometry), np.concatenate([rgb, rest], axis=1)))

    def solids(self, shape: Shape) -> Solids:
        """Return all solids of one shape, in the order in which they were added."""
        parts = self._parts[shape]
        if not parts:
            return Solids(shape, np.zeros((0, shape.fields), np.float32), np.zeros((0, ATTRIBUTES), np.float32))
        return Solids(shape, np.concatenate([p[0] for p in parts]), np.concatenate([p[1] for p in parts]))
