"""Times and peak memory of work on a device, and CUDA graphs of it."""

import gc
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

Work = Callable[[], Any]

_WARM_SECONDS = 0.05
_REPEATS = 4  # of a piece of work in a graph, so that the start of the graph does not count


class Stopwatch:
    """Times work: the median of `iterations`, after some that do not count.

    On CUDA between two events on the current stream. The host runs ahead where it can, as in training; where it cannot,
    the time is the host's.
    """

    def __init__(self, device: torch.device, iterations: int) -> None:
        self._device, self._iterations = device, iterations
        self._cuda = device.type == "cuda"

    def median(self, work: Work) -> float:
        """Return the median time in milliseconds."""
        self._warm_up(work)
        return self._measure(work)

    def kernels(self, work: Work) -> float:
        """Return the milliseconds of the kernels of `work`, replayed from a CUDA graph. On a CPU return `median`.

        Args:
            work: can be captured and repeated.
        """
        if not self._cuda:
            return self.median(work)

        def several() -> None:
            for _ in range(_REPEATS):
                work()

        return self.median(captured(several, self._device)) / _REPEATS

    def _warm_up(self, work: Work) -> None:
        began = time.perf_counter()
        runs = 0
        while runs < 3 or (self._cuda and time.perf_counter() - began < _WARM_SECONDS):
            work()
            runs += 1
            self._wait()

    def _measure(self, work: Work) -> float:
        if not self._cuda:
            times = []
            for _ in range(self._iterations):
                began = time.perf_counter()
                work()
                times.append((time.perf_counter() - began) * 1e3)
            return statistics.median(times)
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(self._iterations)]
        for first, last in events:
            first.record()
            work()
            last.record()
        self._wait()
        return statistics.median(first.elapsed_time(last) for first, last in events)

    def _wait(self) -> None:
        if self._cuda:
            torch.cuda.synchronize(self._device)


def captured(work: Work, device: torch.device) -> Work:
    """Return `work` as a CUDA graph that keeps its tensors alive; without CUDA `work` itself. Calls it once before."""
    if device.type != "cuda":
        return work
    work()
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        results = work()

    def replay(_alive: Any = (work, results)) -> None:
        graph.replay()

    return replay


def peak_bytes(device: torch.device, work: Work) -> int | None:
    """Return the peak bytes of tensors during `work`, beyond those held before it; None if they cannot be counted."""
    if device.type != "cuda":
        return None
    free(device)
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    result = work()
    torch.cuda.synchronize(device)
    del result
    return torch.cuda.max_memory_allocated(device) - before


def free(device: torch.device) -> None:
    """Free memory that no tensor uses."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
