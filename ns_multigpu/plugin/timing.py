"""Where a step's time goes, without making the device wait for the answer."""

import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


class StepTimer:
    """Adds up the time of named parts of steps.

    On CUDA it records events and reads them only when asked for totals: it makes no step wait. Elsewhere it reads the
    clock.

    Attributes:
        listener: called with the name of each part that begins.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._seconds: dict[str, float] = defaultdict(float)
        self._events: list[tuple[str, Any, Any]] = []
        self.listener: Callable[[str], None] | None = None
        self.part = ""

    @contextmanager
    def measure(self, part: str) -> Iterator[None]:
        """Counts the enclosed work to `part`."""
        self.part = part
        if self.listener is not None:
            self.listener(part)
        if not self._cuda:
            start = time.perf_counter()
            try:
                yield
            finally:
                self._seconds[part] += time.perf_counter() - start
            return
        first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        first.record()
        try:
            yield
        finally:
            last.record()
            self._events.append((part, first, last))

    def take(self) -> dict[str, float]:
        """Seconds of each part since the last call. On CUDA it waits for the device: call it when logging."""
        if self._events:
            torch.cuda.synchronize()
            for part, first, last in self._events:
                self._seconds[part] += first.elapsed_time(last) / 1e3
            self._events = []
        result = dict(self._seconds)
        self._seconds.clear()
        return result


class Pace:
    """Seconds a step over the last blocks that have `steps` of them together, refinements included."""

    def __init__(self, steps: int = 300) -> None:
        self._steps = steps
        self._recent: deque[tuple[int, float]] = deque()

    def after(self, steps: int, seconds: float) -> float:
        """With a block of so many steps, which took so long."""
        self._recent.append((steps, seconds))
        while sum(count for count, _ in self._recent) - self._recent[0][0] >= self._steps:
            self._recent.popleft()
        return sum(took for _, took in self._recent) / sum(count for count, _ in self._recent)
