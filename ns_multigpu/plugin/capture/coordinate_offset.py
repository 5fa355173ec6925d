"""Offset of georeferenced captures: it is subtracted in float64, before coordinates become float32.

At UTM coordinates float32 has steps of half a metre. The transform of the dataparser's outputs includes the offset, in
float64: it maps the capture's own coordinates to the model's, as for any capture.
"""

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
import tyro
from nerfstudio.data.dataparsers.base_dataparser import DataparserOutputs
from numpy.typing import NDArray
from torch import Tensor

Offset = tuple[float, float, float]
NO_OFFSET: Offset = (0.0, 0.0, 0.0)
TRANSFORMS = "dataparser_transforms.json"
"""File in a run's folder with the transform from the capture's coordinates to the model's."""
_FAR = 20.0
"""Distance from the origin, in units of the extent, beyond which an offset is subtracted. Below, rounding to float32
moves a point by at most 1.2e-6 of the extent: 0.005 pixels of a picture of 4000, if its depth is the extent.
"""
_ONE_PLACE = 1e9
"""Distance, in units of the extent, from which on the extent is rounding: all views are taken from one place."""

_Floats = NDArray[np.float64]


@dataclass
class OffsetOption:
    """Setting of the datamanagers that config.yml keeps and `--help` omits."""

    offset: tyro.conf.Suppress[tuple[float, float, float] | None] = None
    """Offset that is subtracted from the coordinates of a capture in COLMAP's or nerfstudio's format before they are
    rounded to float32; None for `offset_for`."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Load attributes from a file or another process. Runs of versions without this option had no offset."""
        vars(self).update({"offset": NO_OFFSET, **state})


@dataclass
class ShiftedOutputs(DataparserOutputs):
    """Outputs of a dataparser that has subtracted `offset`; `dataparser_transform` is float64."""

    offset: Offset = NO_OFFSET

    def transform_poses_to_original_space(self, poses: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return poses in the capture's own coordinates, float64."""
        return super().transform_poses_to_original_space(poses.double(), *args, **kwargs)


def offset_for(positions: _Floats, given: Offset | None = None) -> _Floats:
    """Return the offset [3] to subtract: `given`, or the middle of the cameras if they are `_FAR` from the origin.

    It is rounded to a power of ten of at most the cameras' extent.

    Args:
        positions: [n, 3] of the cameras.
        given: the user's choice.
    """
    if given is not None:
        return np.array(given, np.float64)
    low, high = positions.min(axis=0), positions.max(axis=0)
    extent, distance = float((high - low).max()), float(np.maximum(np.abs(low), np.abs(high)).max())
    if not _FAR * extent < distance < _ONE_PLACE * extent:
        return np.zeros(3)
    return np.round((low + high) / 2, -math.floor(math.log10(extent)))


def shifted(
    outputs: DataparserOutputs, offset: _Floats, applied: _Floats | None = None, moved: _Floats | None = None
) -> DataparserOutputs:
    """Return the outputs of a dataparser with the transform of coordinates from which `offset` is not yet subtracted.

    Args:
        outputs: of coordinates less the offset; returned as they are if it is zero.
        offset: [3]
        applied, moved: [3, 3] rotation, included in the transform, and [3] translation, not included, from the
            coordinates that the transform maps from to those of the offset; by default none.
    """
    if not offset.any():
        return outputs
    transform = outputs.dataparser_transform.double()
    left = offset if applied is None or moved is None else np.linalg.solve(applied, offset - moved)
    transform[:, 3] -= transform[:, :3] @ torch.from_numpy(left)
    x, y, z = map(float, offset)
    return ShiftedOutputs(**{**vars(outputs), "dataparser_transform": transform, "offset": (x, y, z)})


@contextmanager
def replaced(module: ModuleType, name: str, value: Any) -> Iterator[None]:
    """Replace a function of a module within a with block."""
    before = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, before)


def save_transform(outputs: DataparserOutputs, folder: Path) -> Offset:
    """Write `TRANSFORMS` to a run's folder, as nerfstudio does and with the offset. Return the offset."""
    offset = getattr(outputs, "offset", NO_OFFSET)
    values = {
        "transform": outputs.dataparser_transform.tolist(), "scale": float(outputs.dataparser_scale), "offset": offset
    }  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    (folder / TRANSFORMS).write_text(json.dumps(values, indent=4), "utf8")
    return offset


def offset_line(offset: Offset) -> str:
    """Return the line about an offset that a run prints at its start."""
    numbers = " ".join(f"{value + 0.0:.12g}" for value in offset)  # no -0
    return (
        f"Offset {numbers} subtracted from the capture's coordinates: its cameras are far from the origin, where "
        "float32 is coarse. Exports with --save-world-frame are in the capture's coordinates."
    )


def saved_offset(run: Path) -> Offset | None:
    """Return the offset in the folder of a run; None without `TRANSFORMS`.

    Runs of nerfstudio and of versions without the option had none: zero.
    """
    file = run / TRANSFORMS
    if not file.is_file():
        return None
    x, y, z = json.loads(file.read_text("utf8")).get("offset", NO_OFFSET)
    return x, y, z
