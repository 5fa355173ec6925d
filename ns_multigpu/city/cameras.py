"""Camera positions of a capture's views; any number, computed at once."""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ns_multigpu.city.city import City

F = NDArray[np.float64]

AERIAL_FOV = 52.0
STREET_FOV = 75.0
"""Horizontal field of view, degrees."""
_OBLIQUE = math.radians(48.0)
"""Angle of oblique views below the horizon, radians."""


@dataclass(frozen=True)
class ViewPoses:
    """Poses and moments of n views.

    Attributes:
        c2w: [n, 3, 4] float64 camera to world, OpenGL axes (x right, y up, looking along -z), metres.
        times: [n] in [0, 1].
        fov: horizontal field of view, degrees.
    """

    c2w: F
    times: F
    fov: float


def look(position: F, forward: F, top: F) -> F:
    """Return poses [n, 3, 4] at positions [n, 3], looking along forward [n, 3], with top [n, 3] about up in the
    picture.
    """
    back = -forward / np.linalg.norm(forward, axis=1, keepdims=True)
    right = np.cross(top, back)
    right /= np.linalg.norm(right, axis=1, keepdims=True)
    return np.stack([right, np.cross(back, right), back, position], axis=2)


def aerial(city: City, views: int, seed: int, altitude: float | None = None) -> ViewPoses:
    """Return aerial views: at each station of a grid a nadir view and four oblique ones, towards N, E, S and W.

    The stations are what the views look at, so that oblique views at the rim look at the city and not past it.

    Args:
        city: to fly over.
        views: how many, at least 2.
        seed: of the small deviations from the planned path.
        altitude: metres; by default low enough for detail, high enough that neighbouring views overlap, and well
            above the roofs.

    Returns:
        The views, all five of a station together, row after row of stations, back and forth.

    Raises:
        ValueError: the altitude is not above the roofs.
    """
    stations = math.ceil(views / 5)
    rows = max(1, round(math.sqrt(stations)))
    limit = city.half - 4.0
    # Rows differ by at most one station, so that any number of stations covers the square evenly.
    ends = (np.arange(rows + 1) * stations) // rows
    station = np.arange(views) // 5
    row = np.searchsorted(ends, station, side="right") - 1
    length = (ends[1:] - ends[:-1])[row]
    along = (station - ends[row] + 0.5) / length * 2 - 1
    along = np.where(row % 2 == 0, along, -along)
    across = (row + 0.5) / rows * 2 - 1
    spacing = 2 * limit / rows
    rng = np.random.default_rng([seed, views, 1])
    if altitude is not None and altitude < city.tallest * 1.05 + 1.0:
        raise ValueError(f"altitude is {altitude} m: the city's roofs are at {city.tallest:.0f} m, fly 5 % above")
    lowest = max(90.0, 1.4 * city.tallest)
    height = altitude if altitude is not None else max(2.1 * spacing, lowest)
    target = np.stack([along * limit, across * limit, np.zeros(views)], axis=1)
    target[:, :2] += rng.uniform(-0.12, 0.12, (views, 2)) * spacing
    target[:, 2] = 8.0
    kind = _turn(views, 5)
    heading = np.deg2rad(90.0 * (kind - 1)) + rng.uniform(-0.12, 0.12, views)
    down = np.where(kind == 0, math.radians(89.0), _OBLIQUE + rng.uniform(-0.05, 0.05, views))
    flat = np.stack([np.cos(heading), np.sin(heading), np.zeros(views)], axis=1)
    forward = flat * np.cos(down)[:, None] - np.array([0.0, 0.0, 1.0]) * np.sin(down)[:, None]
    z = height * rng.uniform(0.96, 1.04, views)
    position = target - forward * ((z - target[:, 2]) / np.sin(down))[:, None]
    top = flat * np.sin(down)[:, None] + np.array([0.0, 0.0, 1.0]) * np.cos(down)[:, None]
    return ViewPoses(look(position, forward, top), _times(views), AERIAL_FOV)


def street(city: City, views: int, seed: int, altitude: float | None = None) -> ViewPoses:
    """Return street views along the middle of every road, alternately ahead, right, back and left.

    Args:
        city: to drive through.
        views: how many, at least 2.
        seed: of the small deviations.
        altitude: height of the camera above the road, metres; 2.2 by default.

    Returns:
        The views in the order of the drive: the roads along x, then those along y, back and forth.
    """
    stations = math.ceil(views / 4)
    roads = city.plan.roads()
    length = 2 * city.half
    rng = np.random.default_rng([seed, views, 2])
    station = np.arange(views) // 4
    at = (station + 0.5) / stations * (2 * len(roads))
    road = np.minimum(at.astype(np.int64), 2 * len(roads) - 1)
    along = (at - road - 0.5) * length
    along = np.where(road % 2 == 0, along, -along)
    across = roads[road % len(roads)] + rng.uniform(-0.25, 0.25, views)
    along_x = road < len(roads)
    height = 2.2 if altitude is None else altitude
    x, y = np.where(along_x, along, across), np.where(along_x, across, along)
    position = np.stack([x, y, height + rng.uniform(-0.1, 0.1, views)], axis=1)
    ahead = np.where(along_x, 0.0, 0.5 * math.pi) + np.where(road % 2 == 0, 0.0, math.pi)
    heading = ahead - _turn(views, 4) * 0.5 * math.pi + rng.uniform(-0.2, 0.2, views)
    pitch = np.deg2rad(rng.uniform(2.0, 7.0, views))
    flat = np.stack([np.cos(heading), np.sin(heading), np.zeros(views)], axis=1)
    forward = flat * np.cos(pitch)[:, None] + np.array([0.0, 0.0, 1.0]) * np.sin(pitch)[:, None]
    top = np.tile([0.0, 0.0, 1.0], (views, 1))
    return ViewPoses(look(position, forward, top), _times(views), STREET_FOV)


def _turn(views: int, looks: int) -> NDArray[np.int64]:
    """Return the direction index of each view: each once per station, in an order that shifts between stations.

    Without the shift, holding out every 8th of views that take turns by 4 would hold out one and the same look.
    """
    view = np.arange(views)
    return (view + view // looks // 2) % looks


def _times(views: int) -> F:
    return np.linspace(0.0, 1.0, views) if views > 1 else np.zeros(views)
