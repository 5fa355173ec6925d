"""Runs of fused steps on a CPU as on a GPU: from recorded graphs, and with small capacities."""

from typing import Any

import pytest

from ns_multigpu.plugin.blocks import initial_capacity, step_capacities, training
from ns_multigpu.plugin.blocks.initial_capacity import InitialCapacity
from ns_multigpu.plugin.blocks.step_buffers import StepBuffers
from ns_multigpu.plugin.capture.device_images import DeviceImages
from tests.lib.recorded import RecordedPool

SMALL_CAPACITY = (24, 12, 96)
"""Capacities of the first step (rows, segment, intersections), which it exceeds."""


def take_from_graphs(patch: pytest.MonkeyPatch, captured: bool = True) -> None:
    """From now on steps come from what was recorded of them, and choose their images, which stay, by themselves; or,
    not `captured`, are launched as they come."""
    made, images = StepBuffers.__init__, DeviceImages.__init__

    def captures(self: StepBuffers, *args: Any) -> None:
        made(self, *args)
        self.captures = captured

    def kept(self: DeviceImages, *args: Any) -> None:
        images(self, *args)
        self._fits = captured

    patch.setattr(StepBuffers, "__init__", captures)
    patch.setattr(DeviceImages, "__init__", kept)
    patch.setattr(training, "GraphPool", lambda _: RecordedPool())


def start_with_small_capacity(patch: pytest.MonkeyPatch) -> None:
    """Start first steps with `SMALL_CAPACITY`, and give later ones the measured demand without spare."""
    patch.setattr(InitialCapacity, "_guess", lambda self, pixels: SMALL_CAPACITY)
    for module in (step_capacities, initial_capacity):
        patch.setattr(module, "padded", lambda count: max(count, 16))
