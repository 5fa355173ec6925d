"""CUDA graphs of a step: one chain of graphs for each recurring plan, captured once and then replayed.

The launches of a step depend on its plan. Plans are few (`Assignment.assign_alike`), so each is captured at its second
occurrence. Launching a step's hundred kernels one by one takes the host longer than they take on a capture of a million
Gaussians. The first occurrence loads kernels and queries attributes, which a capture must not do. A step that is soon
replaced is not worth a graph.

A step is one graph, or several with collectives between them that must be launched separately
(`transports.Collective`). Graphs need memory of their own: if little is free, steps are launched without graphs. A GPU
that a model fills does not wait for the host.

A step that reads its inputs on the device may occur several times in one graph. One launch by the host then runs
several steps without a gap between graphs.
"""

from collections.abc import Callable, Generator, Hashable
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch

from cuda_ext import add_clock
from ns_multigpu.core.assign.assignment import MOST_KEPT
from ns_multigpu.core.exchange.transport import Collective, Parts, launched
from ns_multigpu.plugin.blocks.timing import StepTimer
from ns_multigpu.plugin.faults.memory import has_spare_capacity, hoards, release_idle_blocks

T = TypeVar("T")

WORTH_SEVERAL = 256
"""Replays of a step before several copies of it are captured in one graph; a step that is soon rebuilt does not repay
the capture."""


class GraphPool:
    """Memory pool and capture of graphs that are replayed one at a time.

    The memory of a pool is freed with the last graph captured in it: keep one graph until the next is captured.

    Args:
        device: a GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: Any = None

    def afresh(self) -> "GraphPool":
        """Return a pool that replaces this one, all of whose graphs are deleted; return its memory to the device."""
        torch.cuda.empty_cache()
        return type(self)(self._device)

    def has_spare_capacity(self) -> bool:
        """Return whether the device has memory for another step's graphs."""
        return has_spare_capacity(self._device)

    def hoards(self) -> bool:
        """Return whether the device's memory is mostly cached but unused."""
        return hoards(self._device)

    def prepare(self) -> None:
        """Prepare memory before the first graph of a step is captured."""
        release_idle_blocks(self._device)
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()

    def capture(self, part: Callable[[], None], stream: torch.cuda.Stream | None = None) -> Any:
        """Return a graph of `part`, with a method `replay`, without running `part`.

        It works like torch.cuda.graph without the garbage collection. It captures on a new stream, or on `stream`,
        where autograd's graph was first traversed.
        """
        graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.Stream() if stream is None else stream
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            # Other threads, such as the viewer's, may use the GPU during the capture.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                part()
            finally:
                graph.capture_end()
        torch.cuda.current_stream().wait_stream(stream)
        return graph

    def clock(self) -> torch.Tensor:
        """Return a counter for `add_clock`, [1] int64."""
        return torch.zeros(1, dtype=torch.int64, device=self._device)


def capture_parts(pool: GraphPool, step: Parts[T], stream: torch.cuda.Stream | None = None) -> tuple[list[Any], T]:
    """Return the graphs of a step's parts with the collectives between them, in order, and the step's result.

    Nothing is launched, no collective either, so ranks need not capture at the same time.

    Args:
        pool: prepared. stream: see `GraphPool.capture`.
    """
    chain: list[Any] = []
    result: list[T] = []
    cut: list[Collective] = []

    def go_on() -> None:
        try:
            cut.append(next(step))
        except StopIteration as end:
            result.append(end.value)

    while not result:
        chain.append(pool.capture(go_on, stream))
        chain += cut
        cut.clear()
    return chain, result[0]


@dataclass
class _Captured:
    """Captured step: its graphs and the collectives between them, its result (tensors that a replay overwrites), and
    its number of replays."""

    chain: list[Any]
    result: Any
    replays: int = 0


def _one_after_the_other(parts: Callable[[], Parts[T]], steps: int) -> Parts[T]:
    """Run the step `steps` times as one; return the result of the last."""
    for _ in range(steps - 1):
        yield from parts()
    return (yield from parts())


class StepGraphs:
    """Launcher of steps of one `Step` after another, replaying graphs if it has a pool.

    Args:
        timer: counts the work between collectives as `compute` and collectives as `exchange`.
        computed: called once this rank has launched the part of a step that waits for no other rank.
        pool: captures graphs; None to launch all steps directly, as on a CPU.

    Attributes:
        stream: stream on which graphs are captured; None for a new one.
        most_kept: maximum number of plans whose graphs are kept.
    """

    stream: torch.cuda.Stream | None = None
    most_kept: int = MOST_KEPT

    def __init__(self, timer: StepTimer, computed: Callable[[], None], pool: GraphPool | None) -> None:
        self._timer, self._computed, self._pool = timer, computed, pool
        self._captured: dict[Hashable, _Captured] = {}
        self._seen: set[Hashable] = set()
        self._retired: list[Any] = []  # see `GraphPool`
        self._captures = False  # True during a capture
        # Nanoseconds of exchange within graphs: on the device (None before the first graph), as last copied to the
        # host, and as already counted.
        self._clock: torch.Tensor | None = None
        self._clock_read = torch.zeros(1, dtype=torch.int64)
        self._counted = 0
        self._exchanges = False  # of any graph

    def note(self, plan: Hashable) -> None:
        """Record that a step with this plan was launched directly: the next one is captured."""
        self._seen.add((plan, 1))

    def is_new(self, plan: Hashable) -> bool:
        """Return whether the next step with this plan would be captured."""
        return (plan, 1) in self._seen and (plan, 1) not in self._captured

    def forget(self) -> None:
        """Discard the graphs of a step that has changed. They are freed once the next graphs have taken over their
        memory."""
        # Keep only graphs: collectives hold references to the step's buffers.
        chains = [one.chain for one in self._captured.values()]
        graphs = [part for chain in chains for part in chain if not isinstance(part, Collective)]
        self._retired = graphs or self._retired
        self._captured, self._seen = {}, set()

    def at_once(self, plan: Hashable, steps: int) -> int:
        """Return how many of `steps` consecutive steps with this plan the next `take` should run: all, or one."""
        one = self._captured.get((plan, 1))
        worth = one is not None and len(one.chain) == 1 and one.replays >= WORTH_SEVERAL
        return steps if worth else 1

    def take(self, plan: Hashable, parts: Callable[[], Parts[Any]], steps: int = 1) -> Any:
        """Run a step whose inputs are in place, or several that read their inputs on the device.

        Args:
            plan: key of everything that the step's launches depend on, except the step itself.
            parts: begins a step; with a pool, its operators must not synchronize with the device.
            steps: number of consecutive steps; see `at_once`.

        Returns:
            the result of the last step's parts for this plan.
        """
        return self.launch(self.parts(plan, parts, steps))

    def launch(self, parts: Parts[T]) -> T:
        """Run work to its end; count its collectives as `exchange`."""
        return launched(parts, partial(self._timer.measure, "exchange"))

    def parts(self, plan: Hashable, parts: Callable[[], Parts[Any]], steps: int = 1) -> Parts[Any]:
        """Return the parts that `take` runs: replays of graphs, or the work itself.

        Arguments and result as `take`'s.
        """
        key = plan, steps
        if steps > 1:
            self._seen.add(key)  # its single step has been launched directly before
            parts = partial(_one_after_the_other, parts, steps)
        if self._pool is None:
            return self._as_it_comes(parts)
        if key not in self._seen:
            self._seen.add(key)
            return self._as_it_comes(parts)
        spare = key in self._captured or self._pool.has_spare_capacity()
        if key not in self._captured and self._retired and (not spare or self._pool.hoards()):
            self._retired = []  # no memory is left for the retired graphs
            self._pool = self._pool.afresh()
        if not spare:
            return self._as_it_comes(parts)
        if key not in self._captured:
            self._captured[key] = self._capture(self._pool, parts())
            self._retired = []
            if len(self._captured) > self.most_kept:  # delete the least recently used: its plan no longer occurs
                del self._captured[next(iter(self._captured))]
        one = self._captured[key] = self._captured.pop(key)
        return self._replayed(one)

    def measure(self, part: str) -> AbstractContextManager[None]:
        """Count the enclosed work to `part`: by the timer, or by the clock in the graph that captures it."""
        if not self._captures:
            return self._timer.measure(part)
        return self._clocked() if part == "exchange" else nullcontext()

    def count_exchanges(self) -> None:
        """Move the exchange time within graphs, up to the last call, from `compute` to `exchange`.

        Later time is moved by the next call: reading it now would wait for the device.
        """
        if self._clock is None or not self._exchanges:
            return
        now = int(self._clock_read)
        self._timer.move("compute", "exchange", (now - self._counted) / 1e9)
        self._counted = now
        self._clock_read.copy_(self._clock, non_blocking=True)

    @contextmanager
    def _clocked(self) -> Generator[None]:
        assert self._clock is not None, "made before a capture"
        self._exchanges = True
        add_clock(self._clock, -1)
        yield
        add_clock(self._clock, 1)

    def _as_it_comes(self, parts: Callable[[], Parts[Any]]) -> Parts[Any]:
        step, waits = parts(), False
        while True:
            try:
                collective = next(step)
            except StopIteration as end:
                if not waits:
                    self._computed()
                return end.value
            if not waits:
                self._computed()
            waits = True
            yield collective

    def _capture(self, pool: GraphPool, step: Parts[Any]) -> _Captured:
        pool.prepare()
        if self._clock is None:
            self._clock = pool.clock()
            self._clock_read = torch.zeros(1, dtype=torch.int64, pin_memory=self._clock.is_cuda)
        self._captures = True
        try:
            return _Captured(*capture_parts(pool, step, self.stream))
        finally:
            self._captures = False

    def _replayed(self, one: _Captured) -> Parts[Any]:
        yield from self._replay(one.chain)
        one.replays += 1
        return one.result

    def _replay(self, chain: list[Any]) -> Parts[None]:
        waits = False
        for one in chain:
            if isinstance(one, Collective):
                if not waits:
                    self._computed()
                waits = True
                yield one
            else:
                with self._timer.measure("compute"):
                    one.replay()
        if not waits:
            self._computed()
