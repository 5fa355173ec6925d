"""Radius clip: splats that are small on the screen are not drawn."""

from typing import Any

import torch


def clip_rows(rows: Any, limit: float) -> Any:
    """Return rows without splats whose half extents are at most `limit`; the same rows for 0.

    Their `radii` become 0: they are neither sent, drawn nor counted, and have no gradient. This is gsplat's
    `radius_clip`, but for the extents: here they are those of alpha >= 1/255.

    Args:
        rows: a named tuple with `radii` [M, 2] int32, pixels; a negative one counts by its magnitude.
        limit: pixels, at least 0.
    """
    if limit <= 0:
        return rows
    small = (rows.radii.abs() <= limit).all(-1, keepdim=True)
    return rows._replace(radii=torch.where(small, 0, rows.radii))
