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

    Each rank holds all of them: 4 bytes per observation and 12 per point.

    Args:
        tracks: of the training views.
        batch: number of views in a step.
        device: device that holds them.

    Attributes:
        batch: observations of a fused step's views, at a fixed address, with the capacity of the largest view. See
            `fill`.
    """

    def __init__(self, tracks: Tracks, batch: int, device: torch.device) -> None:
        points, self._ids = tracks.points.to(device), tracks.ids.to(device)
        self._ends = [0, *accumulate(tracks.counts)]
        observed = torch.full((batch, max(tracks.counts)), -1, dtype=torch.int32, device=device)
        self.batch = Observations(points, observed, tracks.scale)

    def fill(self, indices: Sequence[int]) -> None:
        """Copy the observations of these views, by capture index, into `batch`, without synchronization."""
        for row, index in zip(self.batch.ids, indices, strict=True):
            some = self._of(index)
            row[: len(some)].copy_(some)
            row[len(some) :].fill_(-1)

    def given(self, views: Sequence[View]) -> list[View]:
        """Return the views of a batch with their observations."""
        return [replace(view, observations=replace(self.batch, ids=self._of(view.index))) for view in views]

    def _of(self, index: int) -> torch.Tensor:
        return self._ids[self._ends[index] : self._ends[index + 1]]
