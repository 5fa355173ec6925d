"""CUDA graphs of a step: a chain for each plan that comes again, replayed from then on.

What is launched for a step depends on who draws what. Plans are few (`Assignment.assign_alike`), so each is captured
when it comes for the second time: launching a step's hundred kernels one by one takes the host longer than they take on
a capture of a million Gaussians. The first time warms up what a capture must not do (loading kernels, asking for
attributes), and a step that is soon replaced is not worth a graph.

A step is one graph, or several with what must be launched by itself in between (see `transports.Collective`). Graphs
have memory of their own: where there is little to spare, steps are launched as they come. GPUs that a model fills do
not wait for the host.

A step that takes its numbers by itself may be in a graph several times, one behind the other: the host launches once,
and the device goes from one step to the next without a new graph.
"""

from collections.abc import Callable, Generator, Hashable
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch

from cuda_ext import add_clock
from ns_multigpu.core.assign.assignment import MOST_KEPT
from ns_multigpu.core.exchange.transports import Collective, Parts
from ns_multigpu.plugin.blocks.timing import StepTimer
from ns_multigpu.plugin.faults.memory import has_spare_capacity, hoards, release_idle_blocks

T = TypeVar("T")

WORTH_SEVERAL = 256
"""So often a step has been replayed before it is captured several times in a graph: one that is soon made anew is not
worth as much capturing."""


class GraphPool:
    """Captures graphs that are replayed one at a time and share their memory.

    The memory of a pool goes with the last graph that was captured in it: hold one until the next is there.

    Args:
        device: a GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: Any = None

    def afresh(self) -> "GraphPool":
        """A pool in the place of this one, whose graphs are all gone: what it held goes back to the device."""
        torch.cuda.empty_cache()
        return type(self)(self._device)

    def has_spare_capacity(self) -> bool:
        """Whether the device has room for another step's graphs."""
        return has_spare_capacity(self._device)

    def hoards(self) -> bool:
        """Whether the device's memory is full of what nobody uses."""
        return hoards(self._device)

    def prepare(self) -> None:
        """Called before the first graph of a step."""
        release_idle_blocks(self._device)
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()

    def capture(self, part: Callable[[], None], stream: torch.cuda.Stream | None = None) -> Any:
        """A graph of `part`, which is not run: something with a method `replay`. As torch.cuda.graph makes it, without
        its pause to collect garbage; on a stream of its own, or on that where autograd's graph was first walked."""
        graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.Stream() if stream is None else stream
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            # Other threads, such as the viewer's, may go on using the GPU meanwhile.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                part()
            finally:
                graph.capture_end()
        torch.cuda.current_stream().wait_stream(stream)
        return graph

    def clock(self) -> torch.Tensor:
        """[1] int64, for `add_clock`."""
        return torch.zeros(1, dtype=torch.int64, device=self._device)


def capture_parts(pool: GraphPool, step: Parts[T], stream: torch.cuda.Stream | None = None) -> tuple[list[Any], T]:
    """Graphs of the parts of a step and the collectives between them, in order; and what the step returned. Nothing is
    launched, no collective either: ranks need not capture at the same time.

    Args:
        pool: prepared. stream: as of `GraphPool.capture`.
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
    """A step: graphs, and collectives between them; what its parts returned, tensors that a replay writes again; and
    how often it was replayed."""

    chain: list[Any]
    result: Any
    replays: int = 0


def _one_after_the_other(parts: Callable[[], Parts[T]], steps: int) -> Parts[T]:
    """So many steps as one; what the last of them returns."""
    for _ in range(steps - 1):
        yield from parts()
    return (yield from parts())


class StepGraphs:
    """Takes steps of one `Step` after another.

    Args:
        timer: what lies between collectives counts to `compute`, these to `exchange`.
        computed: called when this rank has given its device all of a step that waits for no other.
        pool: captures; None to launch all steps as they come, as on a CPU.

    Attributes:
        stream: that graphs are captured on; None for one of their own.
        most_kept: plans whose graphs are kept, at most.
    """

    stream: torch.cuda.Stream | None = None
    most_kept: int = MOST_KEPT

    def __init__(self, timer: StepTimer, computed: Callable[[], None], pool: GraphPool | None) -> None:
        self._timer, self._computed, self._pool = timer, computed, pool
        self._captured: dict[Hashable, _Captured] = {}
        self._seen: set[Hashable] = set()
        self._retired: list[Any] = []  # see `GraphPool`
        self._captures = False  # now
        # How long graphs have exchanged, in nanoseconds: on the device, None before there are any; as it has told the
        # host last; and what of that has been counted.
        self._clock: torch.Tensor | None = None
        self._told = torch.zeros(1, dtype=torch.int64)
        self._counted = 0
        self._exchanges = False  # any of them

    def note(self, plan: Hashable) -> None:
        """A step with this plan has been launched as it came: the next is captured."""
        self._seen.add((plan, 1))

    def is_new(self, plan: Hashable) -> bool:
        """Whether the next step with this plan would be captured."""
        return (plan, 1) in self._seen and (plan, 1) not in self._captured

    def forget(self) -> None:
        """The step has changed. Its graphs go when the next ones, which take over their memory, are there."""
        # Graphs alone: collectives hold on to the step's buffers.
        chains = [one.chain for one in self._captured.values()]
        graphs = [part for chain in chains for part in chain if not isinstance(part, Collective)]
        self._retired = graphs or self._retired
        self._captured, self._seen = {}, set()

    def at_once(self, plan: Hashable, steps: int) -> int:
        """How many steps the next call of `take` had better take, of `steps` that come one after the other with this
        plan: all of them, or one."""
        one = self._captured.get((plan, 1))
        worth = one is not None and len(one.chain) == 1 and one.replays >= WORTH_SEVERAL
        return steps if worth else 1

    def take(self, plan: Hashable, parts: Callable[[], Parts[Any]], steps: int = 1) -> Any:
        """Takes a step whose inputs are in place, or several that find theirs by themselves.

        Args:
            plan: all that what the step launches depends on, but for the step itself.
            parts: begins a step; in operators that do not wait for the device, if there is a pool.
            steps: to take one after the other; see `at_once`.

        Returns:
            what the parts of the last step have returned for this plan.
        """
        key = plan, steps
        if steps > 1:
            self._seen.add(key)  # their one step has been launched as it came
            parts = partial(_one_after_the_other, parts, steps)
        if self._pool is None:
            return self._as_it_comes(parts)
        if key not in self._seen:
            self._seen.add(key)
            return self._as_it_comes(parts)
        spare = key in self._captured or self._pool.has_spare_capacity()
        if key not in self._captured and self._retired and (not spare or self._pool.hoards()):
            self._retired = []  # nor is there room for what they hold
            self._pool = self._pool.afresh()
        if not spare:
            return self._as_it_comes(parts)
        if key not in self._captured:
            self._captured[key] = self._capture(self._pool, parts())
            self._retired = []
            if len(self._captured) > self.most_kept:  # the one that was used longest ago: its plan is not made any more
                del self._captured[next(iter(self._captured))]
        one = self._captured[key] = self._captured.pop(key)
        self._replay(one.chain)
        one.replays += 1
        return one.result

    def measure(self, part: str) -> AbstractContextManager[None]:
        """Counts the enclosed work of a step to `part`: by the timer, or by the clock in the graph that captures it."""
        if not self._captures:
            return self._timer.measure(part)
        return self._clocked() if part == "exchange" else nullcontext()

    def count_exchanges(self) -> None:
        """Counts to `exchange` what was exchanged within graphs up to the last call, and so was counted to `compute`.
        What has been since then comes with the next: nobody waits for the device, which must be done with all of it."""
        if self._clock is None or not self._exchanges:
            return
        told = int(self._told)
        self._timer.move("compute", "exchange", (told - self._counted) / 1e9)
        self._counted = told
        self._told.copy_(self._clock, non_blocking=True)

    @contextmanager
    def _clocked(self) -> Generator[None]:
        assert self._clock is not None, "made before a capture"
        self._exchanges = True
        add_clock(self._clock, -1)
        yield
        add_clock(self._clock, 1)

    def _as_it_comes(self, parts: Callable[[], Parts[Any]]) -> Any:
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
            with self._timer.measure("exchange"):
                collective.launch()

    def _capture(self, pool: GraphPool, step: Parts[Any]) -> _Captured:
        pool.prepare()
        if self._clock is None:
            self._clock = pool.clock()
            self._told = torch.zeros(1, dtype=torch.int64, pin_memory=self._clock.is_cuda)
        self._captures = True
        try:
            return _Captured(*capture_parts(pool, step, self.stream))
        finally:
            self._captures = False

    def _replay(self, chain: list[Any]) -> None:
        waits = False
        for one in chain:
            if isinstance(one, Collective):
                if not waits:
                    self._computed()
                waits = True
                with self._timer.measure("exchange"):
                    one.launch()
            else:
                with self._timer.measure("compute"):
                    one.replay()
        if not waits:
            self._computed()
