"""Courses of fused steps on a CPU as a GPU takes them: from graphs, which are recorded, and with hardly any room."""

from typing import Any

import pytest

from ns_multigpu.plugin.blocks import initial_capacity, step_capacities, training
from ns_multigpu.plugin.blocks.initial_capacity import InitialCapacity
from ns_multigpu.plugin.blocks.step_buffers import StepBuffers
from ns_multigpu.plugin.capture.device_images import DeviceImages
from tests.lib.recorded import RecordedPool

SMALL_CAPACITY = (24, 12, 96)
"""Rows, a segment and intersections that the first step has room for: too few."""


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
    """From now on first steps have `SMALL_CAPACITY`, and later ones what was needed, without more beside it."""
    patch.setattr(InitialCapacity, "_guess", lambda self, pixels: SMALL_CAPACITY)
    for module in (step_capacities, initial_capacity):
        patch.setattr(module, "padded", lambda count: max(count, 16))
