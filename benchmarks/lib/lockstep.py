"""Shared parts of multi-rank benchmarks: device times, figures of all ranks, memory."""

import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from cuda_ext.ops.optim.adam import ScalarRing
from ns_multigpu.core.dist.collectives import all_gather_floats
from ns_multigpu.core.dist.world import World


class Clock:
    """Marks moments of the device's work, or of the host's where there is no CUDA."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._marks: list[Any] = []

    def mark(self) -> None:
        if self._device.type != "cuda":
            self._marks.append(time.perf_counter() * 1e3)
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._marks.append(event)

    def intervals(self) -> list[float]:
        """Return the milliseconds from each mark to the next. Waits for the device."""
        if self._device.type != "cuda":
            return [b - a for a, b in pairwise(self._marks)]
        torch.cuda.synchronize(self._device)
        return [a.elapsed_time(b) for a, b in pairwise(self._marks)]


def over_ranks(numbers: Sequence[float], world: World) -> list[list[float]]:
    """All-gather every rank's numbers."""
    return all_gather_floats(list(numbers), world)


def memory(world: World) -> list[dict[str, float]]:
    """Return each rank's memory in GiB; empty without CUDA. Collective.

    `allocated` and `reserved` are torch's peaks. `in_use` is the device's present use, with peer memory and CUDA
    itself.
    """
    if world.device.type != "cuda":
        return []
    free, total = torch.cuda.mem_get_info(world.device)
    peaks = (torch.cuda.max_memory_allocated(world.device), torch.cuda.max_memory_reserved(world.device))
    table = over_ranks([*(n / 2**30 for n in peaks), (total - free) / 2**30], world)
    return [dict(zip(("allocated", "reserved", "in_use"), (round(n, 2) for n in row), strict=True)) for row in table]


class Inputs:
    """Copy a step's numbers into its inputs, without waiting.

    Args:
        into: the step's `inputs`.
    """

    def __init__(self, into: Tensor) -> None:
        self._into, self._ring = into, ScalarRing(into.device, into.numel(), slots=16)

    def upload(self, numbers: Tensor) -> None:
        self._ring.upload(numbers[None], torch.float32, into=self._into[None])
