"""What training views observe, on a rank's device: for steps through autograd, and where graphs find it."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

import torch

from ns_multigpu.core.observations import Observations
from ns_multigpu.core.types import View
from ns_multigpu.plugin.capture.tracks import Tracks


class DeviceObservations:
    """What the training views observe.

    It is held whole by each rank: 4 bytes for each time that a view observes a point, and 12 a point.

    Args:
        tracks: of the training views.
        batch: views of a step.
        device: where they are to be.

    Attributes:
        batch: what the views of a fused step observe: in the same place for all steps, with room for as much as any
            view observes. See `fill`.
    """

    def __init__(self, tracks: Tracks, batch: int, device: torch.device) -> None:
        points, self._ids = tracks.points.to(device), tracks.ids.to(device)
        self._ends = [0, *accumulate(tracks.counts)]
        room = torch.full((batch, max(tracks.counts)), -1, dtype=torch.int32, device=device)
        self.batch = Observations(points, room, tracks.scale)

    def fill(self, indices: Sequence[int]) -> None:
        """Puts into `batch` what these views observe, by their numbers in the capture. Nobody waits for the device."""
        for row, index in zip(self.batch.ids, indices, strict=True):
            some = self._of(index)
            row[: len(some)].copy_(some)
            row[len(some) :].fill_(-1)

    def given(self, views: Sequence[View]) -> list[View]:
        """The views of a batch, with what they observe."""
        return [replace(view, observations=replace(self.batch, ids=self._of(view.index))) for view in views]

    def _of(self, index: int) -> torch.Tensor:
        return self._ids[self._ends[index] : self._ends[index + 1]]
