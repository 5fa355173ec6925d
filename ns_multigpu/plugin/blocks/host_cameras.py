"""Cameras of training views as fused steps take them, made once."""

from typing import Any

import numpy as np

from ns_multigpu.core.types import View
from ns_multigpu.plugin.model.cameras import view_from_camera

Numbers = np.ndarray[Any, np.dtype[Any]]


class HostCameras:
    """The training views of a run.

    Args:
        data: a `DistributedDataManager`.
    """

    def __init__(self, data: Any) -> None:
        self._data = data
        self._made: dict[tuple[int, int], tuple[View, Numbers]] = {}

    def __call__(self, index: int, factor: int) -> tuple[View, Numbers]:
        """A view on the host at 1 / `factor` of its size, and its 25 numbers for a step: world-to-camera matrix and
        intrinsics."""
        key = (index, factor)
        if key not in self._made:
            camera = self._data.train_camera(index)
            view = view_from_camera(camera, camera.camera_to_worlds.reshape(-1, 3, 4)[0], index, factor)
            self._made[key] = (view, np.concatenate([view.viewmat.numpy().ravel(), view.K.numpy().ravel()]))
        return self._made[key]
