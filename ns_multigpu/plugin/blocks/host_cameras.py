"""Cached host-side cameras of training views for fused steps."""

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cuda_ext.ops.optim.poses import Mode, correct_views
from ns_multigpu.core.types import View, sizes_of
from ns_multigpu.plugin.capture.datamanager import DistributedDataManager
from ns_multigpu.plugin.model.cameras import Intrinsics, intrinsics_of, view_at, world_to_camera

Numbers = np.ndarray[Any, np.dtype[Any]]


class HostCameras:
    """Cached training views of a run.

    Args:
        data: a `DistributedDataManager`.
    """

    def __init__(self, data: DistributedDataManager) -> None:
        self._data = data
        self._intrinsics: list[Intrinsics] = []
        self._viewmats: dict[int, Tensor] = {}
        self._largest: dict[int, tuple[int, int]] = {}  # by factor
        self._made: dict[tuple[int, int], tuple[View, Numbers]] = {}
        self._correction: tuple[Tensor, Mode] | None = None
        self._corrected: dict[tuple[int, int], View] = {}

    def correct(self, corrections: Tensor, mode: Mode) -> None:
        """Give views the poses that these corrections [N, 6] of all training views make, until the next call. Waits for
        the device."""
        self._correction, self._corrected = (corrections.detach().cpu(), mode), {}

    def largest(self, factor: int) -> tuple[int, int]:
        """Return the largest width and the largest height of the views at 1 / `factor` of their sizes, in pixels."""
        if factor not in self._largest:
            sizes = sizes_of([self(index, factor)[0] for index in range(len(self._data.train_dataset.cameras))])
            self._largest[factor] = max(width for width, _ in sizes), max(height for _, height in sizes)
        return self._largest[factor]

    def __call__(self, index: int, factor: int) -> tuple[View, Numbers]:
        """Return a view on the host at 1 / `factor` of its size, and its 25 numbers (world-to-camera matrix,
        intrinsics), or 37 with a lens. The numbers are without corrections, which steps apply themselves."""
        key = (index, factor)
        if key not in self._made:
            cameras = self._data.train_dataset.cameras
            self._intrinsics = self._intrinsics or intrinsics_of(cameras)
            if index not in self._viewmats:
                self._viewmats[index] = world_to_camera(cameras.camera_to_worlds[index].reshape(3, 4))
            view = view_at(self._intrinsics[index], self._viewmats[index], index, factor)
            self._made[key] = (view, np.concatenate([view.viewmat.numpy().ravel(), view.K.numpy().ravel()]))
        if self._correction is None:
            return self._made[key]
        view, numbers = self._made[key]
        if key not in self._corrected:
            matrix, (corrections, mode) = torch.empty(1, 4, 4), self._correction
            correct_views(view.viewmat[None], corrections, torch.tensor([float(index)]), mode, matrix)
            self._corrected[key] = replace(view, viewmat=matrix[0])
        return self._corrected[key], numbers
