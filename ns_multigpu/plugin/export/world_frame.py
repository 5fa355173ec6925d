"""World frame of exports: the capture's own coordinates, from which a model's differ by a similarity.

nerfstudio's dataparsers turn, move and scale a capture for training, and write how to `dataparser_transforms.json`.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ns_multigpu.plugin.capture.coordinate_offset import TRANSFORMS
from ns_multigpu.plugin.faults.errors import InputError
from ns_multigpu.primitives.gaussians.frame import moved

_RIGID = 1e-3
"""Largest difference from a rotation, per entry."""
_FAR = 100.0
"""Distance of the model from the world's origin, in its units, beyond which positions are float64."""

_Floats = NDArray[np.float64]


@dataclass(frozen=True)
class WorldFrame:
    """Similarity from the model's frame to the world: x_world = factor * rotation @ x_model + origin.

    Attributes:
        rotation: [3, 3] orthogonal.
        factor: world units per unit of the model.
        origin: [3] world position of the model's origin.
    """

    rotation: _Floats
    factor: float
    origin: _Floats

    @classmethod
    def of_run(cls, config: Path) -> "WorldFrame":
        """Return the frame of the run with this config.yml.

        Raises:
            InputError: the run's folder has no readable transform, or it is no similarity.
        """
        file = config.parent / TRANSFORMS
        try:
            content = json.loads(file.read_text("utf8"))
            matrix, scale = np.array(content["transform"], np.float64), float(content["scale"])
            back = np.linalg.inv(matrix[:, :3])
        except (OSError, ValueError, KeyError, np.linalg.LinAlgError) as error:
            raise InputError(
                f"--save-world-frame: {file} cannot be read ({error}). Training writes it: copy a run with its whole "
                "folder."
            ) from error
        size = abs(float(np.linalg.det(back))) ** (1 / 3)
        rotation = back / size
        if np.abs(rotation @ rotation.T - np.eye(3)).max() > _RIGID:
            raise InputError(f"--save-world-frame: the transform in {file} is no rotation, so Gaussians cannot follow.")
        return cls(rotation, size / scale, -back @ matrix[:, 3])

    @property
    def is_far(self) -> bool:
        """True if float32 cannot hold positions in the world."""
        return bool(np.abs(self.origin).max() > _FAR * self.factor)

    @property
    def is_mirrored(self) -> bool:
        """True if the world has the other handedness."""
        return bool(np.linalg.det(self.rotation) < 0)

    def positions(self, means: Any) -> _Floats:
        """Return positions [n, 3] of the model in the world."""
        return np.asarray(means, np.float64) @ (self.factor * self.rotation).T + self.origin

    def points(self, params: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return Gaussians in the world; `means` is float64.

        Args:
            params: `means` [n, 3], `scales` [n, 2 or 3] (log), `quats` [n, 4] (w, x, y, z), `features_rest` [n, R, 3]
                and others, which are the same in all frames.
        """
        transform = torch.from_numpy(np.column_stack([self.rotation, self.origin / self.factor]))
        return moved({**params, "means": params["means"].double()}, transform, self.factor)
