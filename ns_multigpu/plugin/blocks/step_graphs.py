"""CUDA graphs of a fused step: captured after it has run once, replayed from then on."""

from collections.abc import Callable
from typing import Any

import torch

from ns_multigpu.core.world import World
from ns_multigpu.plugin.blocks.timing import StepTimer
from ns_multigpu.plugin.faults.memory import hoards, make_room
from ns_multigpu.primitives.fused_step import FusedStep


class GraphPool:
    """Captures graphs that are replayed one at a time and share their memory.

    The memory of a pool goes with the last graph that was captured in it: hold one until the next is there.

    Args:
        device: a GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: Any = None

    @classmethod
    def afresh(cls, device: torch.device) -> "GraphPool":
        """A pool in the place of one whose graphs are all gone: what that one held goes back to the device."""
        torch.cuda.empty_cache()
        return cls(device)

    def capture(self, *parts: Callable[[], Any]) -> list[Any]:
        """A graph of each part, none of which is run. As torch.cuda.graph makes it, without its pause to collect
        garbage."""
        make_room(self._device)
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graphs: list[Any] = []
        for part in parts:
            graph = torch.cuda.CUDAGraph()
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                # Other threads, such as the viewer's, may go on using the GPU meanwhile.
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    part()
                finally:
                    graph.capture_end()
            torch.cuda.current_stream().wait_stream(stream)
            graphs.append(graph)
        return graphs


class StepGraphs:
    """Takes steps of one `FusedStep` after another.

    The first step of each runs as it is: it warms up what a capture must not do (loading kernels, asking for
    attributes), and a step that is soon replaced is not worth a graph. On a CPU all do.

    Args:
        world: with one rank a step is one graph, with several two.
        computed: called between the two.
    """

    def __init__(self, world: World, computed: Callable[[], None]) -> None:
        self._world, self._computed = world, computed
        self._cuda = world.device.type == "cuda"
        self._graphs: list[Any] = []
        self._retired: list[Any] = []  # see `GraphPool`
        self._pool = GraphPool(world.device)
        self._warm = False

    def forget(self) -> None:
        """The step has changed. Its graphs go when the next ones, which take over their memory, are there."""
        self._retired, self._graphs, self._warm = self._graphs or self._retired, [], False

    def take(self, step: FusedStep, timer: StepTimer) -> None:
        """Takes one step, whose inputs are in place."""
        alone = self._world.group is None
        parts = [lambda: (step.render(), step.update())] if alone else [step.render, step.update]
        if self._warm and self._cuda and not self._graphs:
            if self._retired and hoards(self._world.device):
                self._retired = []
                self._pool = GraphPool.afresh(self._world.device)
            self._graphs = self._pool.capture(*parts)
            self._retired = []
        runs: list[Callable[[], Any]] = [graph.replay for graph in self._graphs] if self._graphs else list(parts)
        with timer.measure("compute"):
            runs[0]()
        if not alone:
            self._computed()
            with timer.measure("exchange"):
                step.exchange()
            with timer.measure("compute"):
                runs[1]()
        self._warm = True
