"""Export of a checkpoint to a .splat file for browser viewers: 32 bytes per Gaussian instead of 248.

The format of antimatter15's viewer (github.com/antimatter15/splat, main.js, `processPlyBuffer`) is little-endian and
has no header. Each Gaussian has three float32 of position, three float32 of scale, four bytes of colour and opacity,
and four of rotation (w, x, y, z), with 128 as 0. Colours have only the constant harmonic. Gaussians are in the
checkpoint's order, so a viewer that is still loading shows region by region, not the largest first. Points are read in
chunks, and none is kept.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from nerfstudio.data.scene_box import OrientedBox
from torch import Tensor

from ns_multigpu.core.schema import POSITION
from ns_multigpu.plugin.export.ply import (
    CHUNK,
    PointSource,
    Progress,
    nothing_to_write,
    plain_colors,
    visible,
)  # fmt: skip
from ns_multigpu.plugin.faults.errors import InputError, whole_file
from ns_multigpu.primitives.registry import FIRST, titled

RECORD = np.dtype([("position", "<f4", 3), ("scale", "<f4", 3), ("rgba", "u1", 4), ("rotation", "u1", 4)])
"""Record of one Gaussian in the file."""
_NAMES = [POSITION, "scales", "quats", "opacities", "features_dc"]


def export_splat(
    checkpoint: Path,
    output: Path,
    *,
    overwrite: bool = False,
    chunk: int = CHUNK,
    progress: Progress = lambda chunks, total: chunks,
    crop: OrientedBox | None = None,
) -> tuple[int, int]:
    """Write a checkpoint's points to a .splat file atomically. Arguments as `export_ply`'s.

    Returns:
        the number of points written, and the total number.

    Raises:
        InputError: the checkpoint is unreadable, the file exists, or no point would be written.
        OSError: the disk rejected the data.
    """
    if output.exists() and not overwrite:
        raise InputError(f"{output} exists already: give another name, or --overwrite.")
    source, kept = PointSource(checkpoint), 0
    if source.kind != FIRST:
        raise InputError(
            f"{checkpoint} is a checkpoint of {titled(source.kind)}: .splat files have three scales. Write a .ply."
        )
    with whole_file(output) as part:
        with part.open("wb") as file:
            begins = range(0, source.count, chunk)
            for begin in progress(begins, len(begins)):
                rows = range(begin, min(begin + chunk, source.count))
                table = records(source.rows(_NAMES, rows), source.degree, crop)
                file.write(table.data)
                kept += len(table)
        if kept == 0:
            raise nothing_to_write(checkpoint, source.count, crop)
    return kept, source.count


def records(points: dict[str, Tensor], degree: int, crop: OrientedBox | None) -> "np.ndarray[Any, np.dtype[Any]]":
    """Return the `RECORD`s of the visible points."""
    count = len(points[POSITION])
    quats = torch.nn.functional.normalize(points["quats"].float(), dim=-1)
    scales, colors = points["scales"].float().exp(), plain_colors(points["features_dc"].float(), degree)
    rgba = torch.cat([colors, points["opacities"].float().reshape(count, 1).sigmoid()], 1)
    kept = visible(points, crop)
    for value in (points[POSITION], scales, quats, rgba):
        kept &= value.isfinite().all(-1)
    table = np.empty(int(kept.sum()), dtype=RECORD)
    table["position"], table["scale"] = points[POSITION][kept].numpy(), scales[kept].numpy()
    table["rgba"] = (rgba[kept] * 255).round().to(torch.uint8).numpy()
    table["rotation"] = (quats[kept] * 128 + 128).round().clamp(0, 255).to(torch.uint8).numpy()
    return table
