"""Rectangles of tiles in which a view shows boxes. Every rank computes the same without communication.

This is Splaxel's removal of spatial redundancy (section 4.3). A box clipped by the near plane is convex, and so is its
image. The corners of the image are images of the clipped box's corners. The result is the image's bounding rectangle.
"""

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ns_multigpu.core.assign.image_part import Rectangle
from ns_multigpu.core.types import TILE, View

Floats = NDArray[np.float64]

NEAR = 0.01
"""Depth below which nothing is drawn, world units: that of `Gaussians`."""
MARGIN = 2.0
"""Pixels around the image of a box: a splat is blurred by half a pixel, and is cut off at about 3.4 of these."""
_CORNERS = np.array([[k >> axis & 1 for axis in range(3)] for k in range(8)])
"""[8, 3] for each corner of a box and each axis: 0 for the lower end, 1 for the upper."""
_FROM, _TO = np.array([(a, a | 1 << k) for a in range(8) for k in range(3) if not a & 1 << k]).T
"""Corners at the ends of the 12 edges."""


def tiles_seen(boxes: Floats, view: View) -> list[Rectangle | None]:
    """Return the pixel rectangle (x0, y0, x1, y1), of whole tiles, that each box touches; None for boxes out of view.

    Tiles at the right and lower border end with the image.

    Args:
        boxes: [cells, 2, 3] lower and upper corner, world units. An empty one, whose lower corner is above its upper,
            is never seen; one that has no end is seen in the whole view.
        view: its tensors are read on the host. If it has a lens, each box is seen in the whole view: see
            `cells.boundary`.
    """
    if len(view.K) > 3:
        return [(0, 0, view.width, view.height)] * len(boxes)
    viewmat, K = _host(view.viewmat), _host(view.K)
    low, high = boxes[:, 0], boxes[:, 1]
    empty, endless = (low > high).any(1), ~np.isfinite(boxes).all((1, 2))
    bounded = np.where(np.isfinite(boxes), boxes, 0.0)
    there = bounded[:, _CORNERS, (0, 1, 2)] @ viewmat[:3, :3].T + viewmat[:3, 3]  # [cells, 8, 3]
    a, b = there[:, _FROM], there[:, _TO]
    before, cut = there[..., 2] >= NEAR, (a[..., 2] >= NEAR) != (b[..., 2] >= NEAR)
    deep = np.where(cut, b[..., 2] - a[..., 2], 1.0)
    clipped = a + ((NEAR - a[..., 2]) / deep)[..., None] * (b - a)
    seen, counts = np.concatenate([there, clipped], 1), np.concatenate([before, cut], 1)[..., None]
    image = seen @ K[:2].T / np.maximum(seen[..., 2:], NEAR)
    first = np.floor((np.where(counts, image, np.inf).min(1) - MARGIN) / TILE).clip(0) * TILE
    end = np.ceil((np.where(counts, image, -np.inf).max(1) + MARGIN) / TILE) * TILE
    whole = endless & ~empty
    first, end = np.where(whole[:, None], 0.0, first), np.where(whole[:, None], np.inf, end)
    end = np.minimum(end, (view.width, view.height))
    shown = ~empty & (first < end).all(1)
    rectangles = np.concatenate([first, end], 1)[shown].astype(np.int64).tolist()
    found: list[Rectangle | None] = [None] * len(boxes)
    for cell, rectangle in zip(np.flatnonzero(shown).tolist(), rectangles, strict=True):
        found[cell] = tuple(rectangle)
    return found


def camera_position(view: View) -> tuple[float, float, float]:
    """Return the position of the view's camera, world units."""
    matrix = _host(view.viewmat)
    x, y, z = (-matrix[:3, :3].T @ matrix[:3, 3]).tolist()
    return x, y, z


def _host(matrix: Tensor) -> Floats:
    return np.asarray(matrix.detach().cpu().double().numpy())
