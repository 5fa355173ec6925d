"""World frame of exports: the capture's own coordinates, from which a model's differ by a similarity.

nerfstudio's dataparsers turn, move and scale a capture for training, and write how to `dataparser_transforms.json`.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import scipy  # its parts are loaded when they are first asked for
import torch
from numpy.typing import NDArray
from torch import Tensor

from cuda_ext.reference.projection import sh_basis
from ns_multigpu.plugin.capture.coordinate_offset import TRANSFORMS
from ns_multigpu.plugin.faults.errors import InputError

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

    def points(self, params: Mapping[str, Tensor], degree: int) -> dict[str, Tensor]:
        """Return Gaussians in the world; `means` is float64.

        Args:
            params: `means` [n, 3], `scales` [n, 2 or 3] (log), `quats` [n, 4] (w, x, y, z), `features_rest` [n, R, 3]
                and others, which are the same in all frames.
            degree: of the harmonics.
        """
        proper = -self.rotation if self.is_mirrored else self.rotation  # an ellipsoid is its own mirror image
        x, y, z, w = scipy.spatial.transform.Rotation.from_matrix(proper).as_quat()
        left = torch.tensor([[w, -x, -y, -z], [x, w, -z, y], [y, z, w, -x], [z, -y, x, w]], dtype=torch.float64)
        turned = _turned_harmonics(degree, self.rotation) @ params["features_rest"].double()
        return {
            **params,
            "means": torch.from_numpy(self.positions(params["means"])),
            "scales": params["scales"] + float(np.log(self.factor)),
            "quats": (params["quats"].double() @ left.T).float(),
            "features_rest": turned.float(),
        }


def _turned_harmonics(degree: int, rotation: _Floats) -> Tensor:
    """Return the matrix [R, R] that maps harmonics' coefficients, without the constant one, to those in the world."""
    directions = np.random.default_rng(0).normal(size=(64, 3))
    directions /= np.linalg.norm(directions, axis=1, keepdims=True)
    world, model = (sh_basis(degree, torch.from_numpy(d))[:, 1:] for d in (directions, directions @ rotation))
    return torch.linalg.lstsq(world, model).solution
