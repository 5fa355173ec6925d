"""Where a step's time goes, without making the device wait for the answer."""

import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

ONE_OF = 7
"""Of so many steps one is measured. Blocks often have 25 or 50 steps, of which the first is slower than the others: a
number that goes into neither comes to all of them alike."""
_NOTHING = nullcontext()


class StepTimer:
    """Adds up the time of named parts of steps.

    On CUDA it records events and reads them only when asked for totals: it makes no step wait. Both cost the host some
    microseconds, so that of the steps enclosed in `step` it measures a few, which stand for all of them; what lies
    outside is measured each time. Elsewhere it reads the clock, always.

    A part may stand within another, which then counts without it.

    Attributes:
        listener: called with the name of each part that begins, measured or not.
        part: the one that has begun last.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._seconds: dict[str, float] = defaultdict(float)
        # Of a part: the one that it stands in, whether it is of a step, its begin and its end.
        self._events: list[tuple[str, str, bool, Any, Any]] = []
        self._around = ""  # the part that one which begins now would stand in
        self._spare: list[Any] = []  # events that have been read: making one takes longer than recording it
        self._count = 0  # of all steps
        self._steps = self._measured = 0  # since the last call of `take`
        self._in_step, self._measures = False, True
        self._usual: dict[str, float] = {}  # seconds of each part of a step, as measured last
        self.listener: Callable[[str], None] | None = None
        self.part = ""

    @contextmanager
    def step(self, steps: int = 1) -> Iterator[None]:
        """Encloses a step, or several taken at once, whose parts are measured or not: which are is the same on all
        ranks."""
        self._in_step, self._measures = True, not self._cuda or -self._count % ONE_OF < steps
        self._count, self._steps = self._count + steps, self._steps + steps
        self._measured += steps * self._measures
        try:
            yield
        finally:
            self._in_step, self._measures = False, True

    def measure(self, part: str) -> AbstractContextManager[None]:
        """Counts the enclosed work to `part`."""
        self.part = part
        if self.listener is not None:
            self.listener(part)
        if not self._measures:
            return _NOTHING
        return self._on_device(part) if self._cuda else self._on_host(part)

    def within(self, around: str, part: str) -> AbstractContextManager[None]:
        """Counts the enclosed work to `part` if it stands in `around`; else nobody counts it."""
        return self.measure(part) if self._around == around else _NOTHING

    def move(self, part: str, to: str, seconds: float) -> None:
        """Counts so many seconds to another part than they were counted to."""
        self._seconds[part] -= seconds
        self._seconds[to] += seconds

    def take(self) -> dict[str, float]:
        """Seconds of each part since the last call. On CUDA it waits for what is measured to be done."""
        return self.cut()()

    def cut(self) -> Callable[[], dict[str, float]]:
        """Begins anew; what it returns says what `take` would have said now, and may be asked later."""
        events, seconds, steps, measured = self._events, self._seconds, self._steps, self._measured
        self._events, self._seconds, self._steps, self._measured = [], defaultdict(float), 0, 0

        def read() -> dict[str, float]:
            sampled: dict[str, float] = defaultdict(float)
            if events:
                events[-1][-1].synchronize()  # the others were over before
            for part, around, in_step, first, last in events:
                self._add(sampled if in_step else seconds, part, around, first.elapsed_time(last) / 1e3)
                self._spare += (first, last)
            if measured:
                self._usual = {part: took / measured for part, took in sampled.items()}
            if self._cuda and steps:  # if they are too few for one to be measured, they were as those before
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
        """Encloses a part; gives the one that it stands in, "" if it stands alone."""
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
    """Seconds a step over the last blocks that have `steps` of them together, refinements included."""

    def __init__(self, steps: int = 300) -> None:
        self._steps = steps
        self._recent: deque[tuple[int, float]] = deque()
        self._held = 0  # steps of the recent blocks

    def after(self, steps: int, seconds: float) -> float:
        """With a block of so many steps, which took so long."""
        self._recent.append((steps, seconds))
        self._held += steps
        while self._held - self._recent[0][0] >= self._steps:
            self._held -= self._recent.popleft()[0]
        return sum(took for _, took in self._recent) / self._held
