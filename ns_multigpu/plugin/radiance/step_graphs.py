"""CUDA graphs of training steps that launch the same each time: captured once of each kind, and replayed from then on.

A capture launches nothing. What it must not do (loading kernels, choosing algorithms, connecting ranks) is done by the
steps before, which are taken as they come, on the stream that is captured later.
"""

import gc
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import torch

from ns_multigpu.core.collectives import max_int
from ns_multigpu.core.world import World
from ns_multigpu.plugin.blocks.graphs import GraphPool

T = TypeVar("T")

_FIRST = 3
"""Steps of a kind that are taken as they come before it is captured."""


class GraphsByKind:
    """Takes steps of one rank, in step with the others.

    Args:
        world: the ranks, on GPUs, with collectives that a graph can hold.
        say: tells the user why steps are not captured, if they cannot be.
    """

    def __init__(self, world: World, say: Callable[[str], None]) -> None:
        self._world, self._say = world, say
        self._stream = torch.cuda.Stream(world.device)
        self._pool = GraphPool(world.device)
        self._seen: dict[Hashable, int] = {}
        self._captured: dict[Hashable, tuple[Any, Any]] = {}
        self._no_room = False

    def take(self, kind: Hashable, compute: Callable[[], T]) -> T:
        """Takes a step whose inputs are in place. Every rank calls it, with the same kind.

        Args:
            kind: all that what the step launches depends on.
            compute: the step. It waits for nothing, makes nothing from host memory, and keeps no tensor but by what it
                returns.

        Returns:
            what `compute` has returned for this kind: tensors that the next step of the kind writes again.
        """
        seen = self._seen[kind] = self._seen.get(kind, 0) + 1
        if seen <= _FIRST:
            return self._aside(compute)
        if kind not in self._captured:
            self._no_room = self._no_room or not self._has_room()
            if self._no_room:
                return self._aside(compute)
            self._captured[kind] = self._capture(compute)
        graph, result = self._captured[kind]
        graph.replay()
        return result

    def _has_room(self) -> bool:
        """Whether each rank's GPU has room for a graph."""
        short = max_int(int(not self._pool.has_spare_room()), self._world) > 0
        if short:
            self._say("Steps are not captured: a GPU has no memory to spare for a graph.")
        return not short

    def _aside(self, compute: Callable[[], T]) -> T:
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            result = compute()
        current.wait_stream(self._stream)
        return result

    def _capture(self, compute: Callable[[], T]) -> tuple[Any, T]:
        self._pool.prepare()
        gc.collect()
        torch.cuda.synchronize(self._world.device)
        collects, results = gc.isenabled(), list[T]()
        gc.disable()  # what it might let go of may not be let go of in a capture
        try:
            graph = self._pool.capture(lambda: results.append(compute()), self._stream)
        finally:
            if collects:
                gc.enable()
        return graph, results[0]
