"""CUDA graphs of training steps with an autograd backward, of few types and sizes.

A capture must not load kernels, select algorithms or connect ranks, so the steps before it do that. They run on the
stream that is captured later: autograd runs a node's backward on the stream of its forward.
"""

import gc
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import torch

from ns_multigpu.core.exchange.transport import Parts
from ns_multigpu.plugin.blocks.graphs import GraphPool, StepGraphs
from ns_multigpu.plugin.blocks.timing import StepTimer

T = TypeVar("T")

_FIRST = 3
"""Steps of a type that run eagerly before one is captured."""


class GraphsByKind(StepGraphs):
    """Graph cache for steps of one rank, synchronised with the others.

    Args:
        device: a GPU. timer, computed: see `StepGraphs`.
        say: prints to the user the reason why steps are not captured.
        pool: captures graphs; tests pass one for CPUs.
    """

    most_kept = 1000
    """Effectively no limit: sizes are few (`rooms`) and repeat."""

    def __init__(
        self,
        device: torch.device,
        timer: StepTimer,
        computed: Callable[[], None],
        say: Callable[[str], None],
        pool: GraphPool | None = None,
    ) -> None:
        super().__init__(timer, computed, GraphPool(device) if pool is None else pool)
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._device, self._say = device, say
        self._of_kind: dict[Hashable, int] = {}
        self._is_full = False

    def take_kind(self, kind: Hashable, sizes: Hashable, parts: Callable[[], Parts[T]]) -> T:
        """Run a step, or a part of one, whose inputs are in place; see `StepGraphs.take`.

        Args:
            kind, sizes: determine all launches; steps of one kind but other sizes are nearly the same.
        """
        plan = kind, sizes
        self._of_kind[kind] = self._of_kind.get(kind, 0) + 1
        if self._of_kind[kind] <= _FIRST:
            self.note(plan)
            return self.launch(self._as_it_comes(parts))
        if self.is_new(plan):
            assert self._pool is not None
            if not self._is_full and not self._pool.has_spare_capacity():
                self._is_full = True
                self._say("Steps are not captured: the GPU has no memory to spare for a graph.")
            if self._is_full:
                return self.launch(self._as_it_comes(parts))
        return self.take(plan, parts)

    def _as_it_comes(self, parts: Callable[[], Parts[Any]]) -> Parts[Any]:
        if self.stream is None:
            return (yield from super()._as_it_comes(parts))
        current = torch.cuda.current_stream()
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream):
            result = yield from super()._as_it_comes(parts)
        current.wait_stream(self.stream)
        return result

    def _capture(self, pool: GraphPool, step: Parts[Any]) -> Any:
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        collects = gc.isenabled()
        gc.disable()  # memory that it releases must not be released in a capture
        try:
            return super()._capture(pool, step)
        finally:
            if collects:
                gc.enable()
