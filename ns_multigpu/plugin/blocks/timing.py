"""Timing of a step's parts, without synchronizing the device during steps."""

import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

ONE_OF = 7
"""Period of measured steps. Blocks often have 25 or 50 steps with a slower first one; 7 divides neither, so it samples
all positions alike."""
_NOTHING = nullcontext()


class StepTimer:
    """Accumulator of the time of named parts of steps.

    On CUDA it records events and reads them only when totals are requested, so no step waits. Both cost the host some
    microseconds, so of the steps enclosed in `step` it measures a few, which represent all. Work outside of `step` is
    measured each time. On a CPU it always reads the clock.

    A part may be nested in another, whose time then excludes it.

    Attributes:
        listener: called with the name of each part that begins, measured or not.
        part: the part that began last.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._seconds: dict[str, float] = defaultdict(float)
        # Of each part: its name, the enclosing part, whether it is in a step, its first and last event.
        self._events: list[tuple[str, str, bool, Any, Any]] = []
        self._around = ""  # the current part, which would enclose a new one
        self._spare: list[Any] = []  # events to reuse: making one takes longer than recording it
        self._count = 0  # of all steps
        self._steps = self._measured = 0  # since the last call of `take`
        self._in_step, self._measures = False, True
        self._usual: dict[str, float] = {}  # seconds of each part of a step, as measured last
        self.listener: Callable[[str], None] | None = None
        self.part = ""

    @contextmanager
    def step(self, steps: int = 1) -> Iterator[None]:
        """Enclose a step, or several run at once. The choice of measured steps is the same on all ranks."""
        self._in_step, self._measures = True, not self._cuda or -self._count % ONE_OF < steps
        self._count, self._steps = self._count + steps, self._steps + steps
        self._measured += steps * self._measures
        try:
            yield
        finally:
            self._in_step, self._measures = False, True

    def measure(self, part: str) -> AbstractContextManager[None]:
        """Count the enclosed work to `part`."""
        self.part = part
        if self.listener is not None:
            self.listener(part)
        if not self._measures:
            return _NOTHING
        return self._on_device(part) if self._cuda else self._on_host(part)

    def within(self, around: str, part: str) -> AbstractContextManager[None]:
        """Count the enclosed work to `part` if nested in `around`; otherwise do not count it."""
        return self.measure(part) if self._around == around else _NOTHING

    def move(self, part: str, to: str, seconds: float) -> None:
        """Move `seconds` from one part's total to another's."""
        self._seconds[part] -= seconds
        self._seconds[to] += seconds

    def take(self) -> dict[str, float]:
        """Return the seconds of each part since the last call. On CUDA, wait for the measured work."""
        return self.cut()()

    def cut(self) -> Callable[[], dict[str, float]]:
        """Reset the totals and return a function that later computes what `take` would return now."""
        events, seconds, steps, measured = self._events, self._seconds, self._steps, self._measured
        self._events, self._seconds, self._steps, self._measured = [], defaultdict(float), 0, 0

        def read() -> dict[str, float]:
            sampled: dict[str, float] = defaultdict(float)
            if events:
                events[-1][-1].synchronize()  # earlier events are complete then
            for part, around, in_step, first, last in events:
                self._add(sampled if in_step else seconds, part, around, first.elapsed_time(last) / 1e3)
                self._spare += (first, last)
            if measured:
                self._usual = {part: took / measured for part, took in sampled.items()}
            if self._cuda and steps:  # if too few steps ran to measure one, use the previous values
                for part, took in self._usual.items():
                    seconds[part] += took * steps
            return dict(seconds)

        return read

    @contextmanager
    def _on_host(self, part: str) -> Iterator[None]:
        with self._within(part) as around:
            start = time.perf_counter()
            try:
                yield
            finally:
                self._add(self._seconds, part, around, time.perf_counter() - start)

    @contextmanager
    def _on_device(self, part: str) -> Iterator[None]:
        with self._within(part) as around:
            in_step, first, last = self._in_step, self._event(), self._event()
            first.record()
            try:
                yield
            finally:
                last.record()
                self._events.append((part, around, in_step, first, last))

    @contextmanager
    def _within(self, part: str) -> Iterator[str]:
        """Enclose a part; yield the name of its enclosing part, "" without one."""
        around, self._around = self._around, part
        try:
            yield around
            self.part = around or part
        finally:
            self._around = around

    @staticmethod
    def _add(seconds: dict[str, float], part: str, around: str, took: float) -> None:
        seconds[part] += took
        if around:
            seconds[around] -= took

    def _event(self) -> Any:
        return self._spare.pop() if self._spare else torch.cuda.Event(enable_timing=True)


class Pace:
    """Mean seconds per step over recent blocks of at least `steps` steps together, refinements included."""

    def __init__(self, steps: int = 300) -> None:
        self._steps = steps
        self._recent: deque[tuple[int, float]] = deque()
        self._held = 0  # steps of the recent blocks

    def after(self, steps: int, seconds: float) -> float:
        """Add a block of `steps` steps that took `seconds`; return the updated mean."""
        self._recent.append((steps, seconds))
        self._held += steps
        while self._held - self._recent[0][0] >= self._steps:
            self._held -= self._recent.popleft()[0]
        return sum(took for _, took in self._recent) / self._held
