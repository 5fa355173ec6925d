"""CUDA graphs of training steps that launch the same each time: captured once of each kind, and replayed from then on.

A capture launches nothing. What it must not do (loading kernels, choosing algorithms, connecting ranks) is done by the
steps before, which are taken as they come, on the stream that is captured later. A step is one graph, or several with
collectives in between: ranks need not capture in the same step, and nothing of NCCL is in a graph.
"""

import gc
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import torch

from ns_multigpu.core.transport import Collective, Parts, launched
from ns_multigpu.plugin.blocks.graphs import GraphPool, capture_parts

T = TypeVar("T")

_FIRST, _FIRST_OF_SIZE = 3, 1
"""Steps of a kind, and of one size of it, that are taken as they come before one is captured."""


class GraphsByKind:
    """Takes steps of one rank, in step with the others.

    Args:
        device: a GPU.
        say: tells the user why steps are not captured, if they cannot be.
        pool: captures; tests have one for CPUs.
    """

    def __init__(self, device: torch.device, say: Callable[[str], None], pool: GraphPool | None = None) -> None:
        self._device, self._say = device, say
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._pool = GraphPool(device) if pool is None else pool
        self._seen: dict[Hashable, int] = {}
        self._captured: dict[tuple[Hashable, Hashable], tuple[list[Any], Any]] = {}
        self._no_room = False

    def take(self, kind: Hashable, sizes: Hashable, parts: Callable[[], Parts[T]]) -> T:
        """Takes a step, or a part of one, whose inputs are in place.

        Args:
            kind, sizes: all that what it launches depends on; of other sizes it is much the same.
            parts: begins it. It waits for nothing, makes nothing from host memory, and keeps no tensor but by what it
                returns.

        Returns:
            what the parts have returned for these: tensors that the next step of the same kind and sizes writes again.
        """
        key = (kind, sizes)
        for seen in (kind, key):
            self._seen[seen] = self._seen.get(seen, 0) + 1
        if self._seen[kind] <= _FIRST or self._seen[key] <= _FIRST_OF_SIZE:
            return self._aside(parts)
        if key not in self._captured:
            self._no_room = self._no_room or not self._has_room()
            if self._no_room:
                return self._aside(parts)
            self._captured[key] = self._capture(parts)
        chain, result = self._captured[key]
        for part in chain:
            if isinstance(part, Collective):
                part.launch()
            else:
                part.replay()
        return result

    def _has_room(self) -> bool:
        """Whether the GPU has room for a graph."""
        if not (room := self._pool.has_spare_room()):
            self._say("Steps are not captured: the GPU has no memory to spare for a graph.")
        return room

    def _aside(self, parts: Callable[[], Parts[T]]) -> T:
        if self._stream is None:
            return launched(parts())
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            result = launched(parts())
        current.wait_stream(self._stream)
        return result

    def _capture(self, parts: Callable[[], Parts[T]]) -> tuple[list[Any], T]:
        self._pool.prepare()
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        collects = gc.isenabled()
        gc.disable()  # what it might let go of may not be let go of in a capture
        try:
            return capture_parts(self._pool, parts(), self._stream)
        finally:
            if collects:
                gc.enable()
