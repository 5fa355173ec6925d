"""Picture of the ownership: points coloured by rank, cameras by the machine of their views."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from nerfstudio.utils.rich_utils import CONSOLE
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont
from rich.text import Text

from ns_multigpu.plugin.render.palette import machine_color, rank_colors

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

PARTITION = "partition.png"
MOST_POINTS = 200_000
"""Points that are worth drawing: of more, a sample."""
SIZE = 1000, 800

_LEGEND, _EDGE, _HEAD = 236, 26, 46
_LEFT_OUT = 0.005
"""The part of the points, and of the cameras, that may lie outside on either side of an axis."""
_MARGIN = 0.5
"""Maximum margin of the picture around the points to include cameras, on either side, in extents of the points."""
_INK, _PALE, _NOWHERE = (28, 32, 38), (120, 126, 134), (250, 250, 250)
_AXES = "xyz"


@dataclass(frozen=True)
class PictureContent:
    """Contents of a picture.

    Attributes:
        positions: [S, 3] of some of the points, world units. What is not finite is left out.
        owners: [S] the rank that owns each.
        points: [ranks] how many each rank owns in all.
        cameras: [V, 3] the training views' centres, world units.
        view_owners: [V] the machine that each view is at home on; empty where views have none.
        machines: how many; each has as many ranks.
    """

    positions: Floats
    owners: Ints
    points: Sequence[int]
    cameras: Floats
    view_owners: Ints
    machines: int

    def __post_init__(self) -> None:
        ranks = len(self.points)
        if self.positions.shape != (len(self.owners), 3) or self.cameras.ndim != 2 or self.cameras.shape[1] != 3:
            raise ValueError(
                f"positions {self.positions.shape}, owners {self.owners.shape} and cameras {self.cameras.shape}: give "
                "[S, 3], [S] and [V, 3]"
            )
        if len(self.view_owners) not in (0, len(self.cameras)):
            raise ValueError(
                f"{len(self.view_owners)} view owners for {len(self.cameras)} views: give one each, or none"
            )
        if ranks == 0 or self.machines < 1 or ranks % self.machines != 0:
            raise ValueError(f"{ranks} ranks on {self.machines} machines: each must have as many")

    @cached_property
    def axes(self) -> tuple[int, int]:
        """The two axes along which the points extend most, ascending: seen along the third."""
        low, high = _bounds(_finite(self.positions))
        least = 2 - int(np.argmin((high - low)[::-1]))  # of equal ones the last: mostly that is up
        first, second = (axis for axis in range(3) if axis != least)
        return first, second


@dataclass(frozen=True)
class Window:
    """Position of the world in a picture.

    Attributes:
        low: [2] the lower corner of what is shown, world units. scale: pixels a unit.
        left, bottom: where that corner is, pixels.
    """

    low: Floats
    scale: float
    left: float
    bottom: float

    def pixels(self, where: Floats) -> Floats:
        """Return the pixels [N, 2] of positions [N, 2] in world units; x is to the right, y downwards."""
        return np.stack(
            [
                self.left + (where[:, 0] - self.low[0]) * self.scale,
                self.bottom - (where[:, 1] - self.low[1]) * self.scale,
            ],
            axis=1,
        )


def window(seen: PictureContent, size: tuple[int, int] = SIZE) -> Window:
    """Return the part of the world that a picture of this size shows, and its scale: nearly all points, near
    cameras."""
    axes = list(seen.axes)
    points, cameras = _finite(seen.positions)[:, axes], _finite(seen.cameras)[:, axes]
    low, high = _bounds(points)
    if len(cameras):
        near, far = _bounds(cameras)
        if len(points) == 0:
            low, high = near, far
        spare = _MARGIN * max(float((high - low).max()), 1e-9)
        low, high = np.minimum(low, np.maximum(near, low - spare)), np.maximum(high, np.minimum(far, high + spare))
    extent = np.maximum(high - low, 1e-9 + 1e-3 * float((high - low).max()))
    available = np.array([size[0] - _LEGEND - 2 * _EDGE, size[1] - _HEAD - 2 * _EDGE], dtype=np.float64)
    scale = float((available / extent).min()) * 0.98
    spare = (available - (high - low) * scale) / 2
    return Window(low, scale, _EDGE + spare[0], size[1] - _EDGE - spare[1])


def save(seen: PictureContent, folder: Path) -> Path | None:
    """Draw a picture into a run's folder and return the file. If the disk fails, print a message and return None."""
    file = folder / PARTITION
    try:
        draw(seen).save(file)
    except OSError as error:
        CONSOLE.print(Text(f"{file} cannot be written: {error}. Training goes on.", "bold yellow"), soft_wrap=True)
        return None
    return file


def draw(seen: PictureContent, size: tuple[int, int] = SIZE) -> Image.Image:
    """Return an RGB picture from above, on white, with a legend."""
    shown = window(seen, size)
    image = _dots(seen, shown, size)
    _cameras(image, seen, shown, size)
    _words(image, seen, size)
    return image


def _dots(seen: PictureContent, shown: Window, size: tuple[int, int]) -> Image.Image:
    """Draw points as squares in random order, so that no rank hides the others."""
    pixels = np.full((size[1], size[0], 3), 255, dtype=np.uint8)
    axes, whole = list(seen.axes), np.isfinite(seen.positions).all(1)
    where = np.floor(shown.pixels(seen.positions[whole][:, axes])).astype(np.int64)
    machines, ranks = seen.machines, len(seen.points)
    colors = np.round(255 * np.array(rank_colors(machines, ranks // machines))).astype(np.uint8)[seen.owners[whole]]
    order = np.random.default_rng(0).permutation(len(where))
    where, colors = where[order], colors[order]
    field = (size[0] - _LEGEND) * (size[1] - _HEAD)
    side = round(np.clip(np.sqrt(0.5 * field / max(len(where), 1)), 2, 7).item())
    for dy in range(side):
        for dx in range(side):
            x, y = where[:, 0] + dx - side // 2, where[:, 1] + dy - side // 2
            inside = (x >= 0) & (x < size[0] - _LEGEND) & (y >= _HEAD) & (y < size[1])
            pixels[y[inside], x[inside]] = colors[inside]
    return Image.fromarray(pixels)


def _cameras(image: Image.Image, seen: PictureContent, shown: Window, size: tuple[int, int]) -> None:
    whole = np.isfinite(seen.cameras).all(1)
    where = shown.pixels(seen.cameras[whole][:, list(seen.axes)])
    view_owners = seen.view_owners[whole] if len(seen.view_owners) else np.full(int(whole.sum()), -1)
    radius = 8.0 if len(where) <= 150 else 6.0 if len(where) <= 600 else 4.0
    pen = ImageDraw.Draw(image)
    for (x, y), home in zip(where.tolist(), view_owners.tolist(), strict=True):
        if radius <= x < size[0] - _LEGEND - radius and _HEAD + radius <= y < size[1] - radius:
            _triangle(pen, x, y, radius, _NOWHERE if home < 0 else _bytes(machine_color(home)))


def _triangle(pen: ImageDraw.ImageDraw, x: float, y: float, radius: float, fill: tuple[int, int, int]) -> None:
    def corners(r: float) -> list[tuple[float, float]]:
        return [(x, y - r), (x - 0.9 * r, y + 0.7 * r), (x + 0.9 * r, y + 0.7 * r)]

    pen.polygon(corners(1.45 * radius), fill=(255, 255, 255))  # apart from points of the same hue
    pen.polygon(corners(radius), fill=fill, outline=_INK, width=2 if radius > 5 else 1)


def _words(image: Image.Image, seen: PictureContent, size: tuple[int, int]) -> None:
    pen, left = ImageDraw.Draw(image), size[0] - _LEGEND + 8
    machines, ranks = seen.machines, len(seen.points)
    along = next(axis for axis in range(3) if axis not in seen.axes)
    several = f" of {machines} machines" if machines > 1 else ""
    title = f"{sum(seen.points):,} points on {ranks} {'rank' if ranks == 1 else 'ranks'}{several}"
    pen.text((_EDGE, 14), title, _INK, _font(20))
    from_where = f"{_AXES[seen.axes[0]]} to the right, {_AXES[seen.axes[1]]} up, seen along {_AXES[along]}"
    pen.text((size[0] - 14, 20), from_where, _PALE, _font(13), anchor="ra")
    lines = _legend(seen)
    pitch = min(24.0, (size[1] - _HEAD - 3 * _EDGE) / max(len(lines), 1))
    font, y = _font(max(9, int(pitch * 0.62))), float(_HEAD + _EDGE)
    for color, text, machine in lines:
        middle, half = y + pitch / 2, pitch * 0.3
        if machine:
            _triangle(pen, left + half, middle, half * 1.15, color)
        else:
            pen.rectangle((left, middle - half, left + 2 * half, middle + half), fill=color)
        pen.text((left + 2 * half + 8, middle), text, _INK, font, anchor="lm")
        y += pitch


def _legend(seen: PictureContent) -> list[tuple[tuple[int, int, int], str, bool]]:
    """Return the lines of the legend: colour, text, whether it is of a machine."""
    machines, ranks = seen.machines, len(seen.points)
    colors = [_bytes(color) for color in rank_colors(machines, ranks // machines)]
    views = len(seen.cameras)
    view_owners = np.bincount(seen.view_owners, minlength=machines) if len(seen.view_owners) else None
    lines: list[tuple[tuple[int, int, int], str, bool]] = []
    if view_owners is None:
        lines.append((_NOWHERE, f"{views:,} training views", True))
    for rank, (color, points) in enumerate(zip(colors, seen.points, strict=True)):
        machine, first = divmod(rank, ranks // machines)
        if view_owners is not None and first == 0:
            lines.append((_bytes(machine_color(machine)), f"machine {machine}: {view_owners[machine]:,} views", True))
        lines.append((color, f"rank {rank}: {points:,} points", False))
    return lines


def _bounds(where: Floats) -> tuple[Floats, Floats]:
    """Return the corners of a box around positions [N, d], without a few outliers."""
    if len(where) == 0:
        return np.zeros(where.shape[1]), np.zeros(where.shape[1])
    far = int(_LEFT_OUT * len(where))
    ordered = np.partition(where, (far, len(where) - 1 - far), axis=0)
    return ordered[far], ordered[len(where) - 1 - far]


def _finite(where: Floats) -> Floats:
    return where[np.isfinite(where).all(1)]


def _bytes(color: tuple[float, float, float]) -> tuple[int, int, int]:
    red, green, blue = (round(255 * part) for part in color)
    return red, green, blue


def _font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(size)
