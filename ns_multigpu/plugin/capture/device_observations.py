"""Observations of training views on a rank's device, for autograd steps and for captured graphs."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

import torch

from ns_multigpu.core.observations import Observations
from ns_multigpu.core.types import View
from ns_multigpu.plugin.capture.tracks import Tracks


class DeviceObservations:
    """Observations of the training views.

    Each rank holds all of them: 4 bytes per observation, 12 per point and 12 per normal.

    Args:
        name: of the attribute of `View` that they are given in.
        tracks: of the training views.
        batch: number of views in a step.
        device: device that holds them.

    Attributes:
        name: see the arguments.
        batch: observations of a fused step's views, at a fixed address, with the capacity of the largest view. See
            `fill`.
    """

    def __init__(self, name: str, tracks: Tracks, batch: int, device: torch.device) -> None:
        self.name = name
        points, self._ids = tracks.points.to(device), tracks.ids.to(device)
        self._ends = [0, *accumulate(tracks.counts)]
        observed = torch.full((batch, max(tracks.counts)), -1, dtype=torch.int32, device=device)
        normals = None if tracks.normals is None else tracks.normals.to(device)
        self.batch = Observations(points, observed, tracks.scale, normals)

    def fill(self, indices: Sequence[int]) -> None:
        """Copy the observations of these views, by capture index, into `batch`, without synchronization."""
        for row, index in zip(self.batch.ids, indices, strict=True):
            some = self._of(index)
            row[: len(some)].copy_(some)
            row[len(some) :].fill_(-1)

    def given(self, views: Sequence[View]) -> list[View]:
        """Return the views of a batch with their observations."""
        given = ({self.name: replace(self.batch, ids=self._of(view.index))} for view in views)
        return [replace(view, **some) for view, some in zip(views, given, strict=True)]

    def _of(self, index: int) -> torch.Tensor:
        return self._ids[self._ends[index] : self._ends[index + 1]]
