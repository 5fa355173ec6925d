"""CUDA graphs of a tile step: one for each plan that comes again.

What is launched for a step depends on who draws which band. Plans are few (`TileRanges.assign_alike`), so each is
captured when it comes for the second time, and replayed from then on: launching a step's hundred kernels one by one
takes the host longer than they take on a capture of a million Gaussians. Graphs have memory of their own: where there
is little to spare, steps are launched as they come. GPUs that a model fills do not wait for the host.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch

from ns_multigpu.core.assignment import MOST_KEPT
from ns_multigpu.plugin.blocks.step_graphs import GraphPool
from ns_multigpu.plugin.faults.memory import has_spare_room, hoards


@dataclass(frozen=True)
class _Captured:
    graph: Any
    result: Any


class PlanGraphs:
    """Takes steps of one `TileStep` after another.

    Args:
        device: a GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._pool = device, GraphPool(device)
        self._captured: dict[Hashable, _Captured] = {}
        self._seen: set[Hashable] = set()
        self._retired: list[Any] = []  # see `GraphPool`

    def forget(self) -> None:
        """The step has changed. Its graphs go when the next one, which takes over their memory, is there."""
        self._retired = [one.graph for one in self._captured.values()] or self._retired
        self._captured, self._seen = {}, set()

    def take(self, key: Hashable, step: Callable[[], Any]) -> Any:
        """Takes one step, whose inputs are in place.

        Args:
            key: all that what the step launches depends on, but for the step itself.
            step: the step, in operators that do not wait for the device.

        Returns:
            what `step` has returned for this key: the tensors that a replay writes to again.
        """
        if key not in self._seen:
            self._seen.add(key)
            return step()
        spare = key in self._captured or has_spare_room(self._device)
        if key not in self._captured and self._retired and (not spare or hoards(self._device)):
            self._retired = []  # nor is there room for what they hold
            self._pool = GraphPool.afresh(self._device)
        if not spare:
            return step()
        if key not in self._captured:
            results: list[Any] = []
            (graph,) = self._pool.capture(lambda: results.append(step()))
            self._captured[key] = _Captured(graph, results[0])
            self._retired = []
            if len(self._captured) > MOST_KEPT:  # the one that was used longest ago: its plan is not made any more
                del self._captured[next(iter(self._captured))]
        one = self._captured[key] = self._captured.pop(key)
        one.graph.replay()
        return one.result
