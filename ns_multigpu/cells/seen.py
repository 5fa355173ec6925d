"""Visible rectangle of tiles of boxes in a view. Every rank computes the same without communication.

Splaxel's removal of spatial redundancy (section 4.3): a box cut off by the near plane is convex, and so is its image,
whose corners are images of the corners of what was left. The image's bounding rectangle is what a view sees of it.
"""

import numpy as np
from numpy.typing import NDArray

from ns_multigpu.core.types import TILE, View

Floats = NDArray[np.float64]
Rectangle = tuple[int, int, int, int]

NEAR = 0.01
"""Depth below which nothing is drawn, world units: that of `Gaussians`."""
MARGIN = 2.0
"""Pixels around the image of a box: a splat is blurred by half a pixel, and is cut off at about 3.4 of these."""
_EDGES = [(a, a | 1 << k) for a in range(8) for k in range(3) if not a & 1 << k]


def tiles_seen(boxes: Floats, view: View) -> list[Rectangle | None]:
    """The rectangle (x0, y0, x1, y1) in pixels, of whole tiles, that each box touches; None where it is not seen.

    Tiles at the right and lower border end with the image.

    Args:
        boxes: [cells, 2, 3] lower and upper corner, world units. An empty one, whose lower corner is above its upper,
            is never seen; one that has no end is seen in the whole view.
        view: pinhole camera; its tensors are read on the host.
    """
    viewmat = np.asarray(view.viewmat.detach().cpu().double().numpy())
    K = np.asarray(view.K.detach().cpu().double().numpy())
    return [_seen(box, viewmat, K, view.width, view.height) for box in boxes]


def camera_position(view: View) -> tuple[float, float, float]:
    """Return the position of the view's camera, world units."""
    matrix = np.asarray(view.viewmat.detach().cpu().double().numpy())
    x, y, z = (-matrix[:3, :3].T @ matrix[:3, 3]).tolist()
    return x, y, z


def _seen(box: Floats, viewmat: Floats, K: Floats, width: int, height: int) -> Rectangle | None:
    low, high = box
    if (low > high).any():
        return None
    if not np.isfinite(box).all():
        return (0, 0, width, height)
    corners = np.array([[box[k >> axis & 1, axis] for axis in range(3)] for k in range(8)])
    there = corners @ viewmat[:3, :3].T + viewmat[:3, 3]
    before = there[:, 2] >= NEAR
    if not before.any():
        return None
    found = [there[k] for k in range(8) if before[k]]
    for a, b in _EDGES:
        if before[a] != before[b]:
            share = (NEAR - there[a, 2]) / (there[b, 2] - there[a, 2])
            found.append(there[a] + share * (there[b] - there[a]))
    seen = np.array(found)
    image = seen @ K[:2].T / np.maximum(seen[:, 2:], NEAR)
    x0, y0 = np.floor((image.min(0) - MARGIN) / TILE)
    x1, y1 = np.ceil((image.max(0) + MARGIN) / TILE)
    left, top = (int(max(value, 0)) * TILE for value in (x0, y0))
    right, bottom = int(min(x1 * TILE, width)), int(min(y1 * TILE, height))
    return (left, top, right, bottom) if left < right and top < bottom else None
