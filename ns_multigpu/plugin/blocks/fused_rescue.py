"""Recovery of a block of fused steps that runs out of memory or skips a step: its buffer demand, and return to the last
completed step.

A step's buffers are allocated before it begins, and it allocates nothing else. All ranks first check together that
memory suffices, so no rank begins a step that another cannot run. A single process may run out anywhere in a step. Its
model changes only in the launch that ends the step, which allocates nothing.
"""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from cuda_ext.ops.optim.adam import AdamStep
from cuda_ext.ops.optim.lazy_adam import splat_flush
from ns_multigpu.core.dist.world import World
from ns_multigpu.core.exchange.hierarchy import Hierarchy
from ns_multigpu.core.schema import flat
from ns_multigpu.planning.memory import step_buffers
from ns_multigpu.planning.work import Share
from ns_multigpu.plugin.blocks.point_storage import PointStorage
from ns_multigpu.plugin.blocks.step_capacities import Capacities
from ns_multigpu.plugin.faults import memory
from ns_multigpu.plugin.faults.out_of_memory import Counts, StepCancelled, StepOutOfMemory, forget_frames
from ns_multigpu.plugin.model.optimizers import BatchOptimizers
from ns_multigpu.primitives.gaussians.schema import ORDER

if TYPE_CHECKING:
    from ns_multigpu.plugin.blocks.training import Training


@dataclass
class CompletedSteps:
    """Progress of a block's steps.

    Attributes:
        before: counts at its beginning.
        done: steps that the device is known to have completed. skipped: those of them that left the model unchanged.
    """

    before: Counts
    done: int = 0
    skipped: int = 0

    def recount(self, adam: AdamStep, optimizers: BatchOptimizers) -> None:
        """Set the counters of optimizers and schedules to those after the completed steps.

        Args:
            adam: step of all parameters; skipped steps are none of its.
        """
        self.before.restore(optimizers.optimizers, optimizers.schedulers)
        for _ in range(self.done - self.skipped):
            adam.count()
        for _ in range(self.done):
            for scheduler in optimizers.schedulers.values():
                scheduler.step()


@contextlib.contextmanager
def last_whole_step(
    training: "Training", steps: range, optimizers: BatchOptimizers, world: World
) -> Iterator[CompletedSteps]:
    """Enclose the steps of a block; the enclosed code updates the number of completed steps.

    Args:
        training: a `Training`.

    Raises:
        StepCancelled: memory ran out and all ranks know it; the state is that after the last completed step.
    """
    taken = CompletedSteps(Counts.now(optimizers.optimizers, optimizers.schedulers))
    try:
        yield taken
    except Exception as error:
        agreed = isinstance(error, StepOutOfMemory)
        if not agreed and (world.group is not None or memory.where_memory_ran_out(error) is None):
            raise
        forget_frames(error)
        if not agreed:
            taken.done += training.taken_since()
        training.go_back(taken)
        raise StepCancelled(steps[0] + taken.done - 1, error if not agreed or error.here else None) from None


def go_back(
    points: PointStorage, names: Sequence[str], optimizers: BatchOptimizers, lazy: Any, taken: CompletedSteps
) -> None:
    """Apply deferred steps of points, and set the counters to those after the completed steps.

    Args:
        names: names of the parameters' optimizers.
    """
    groups = [optimizers.optimizers[name] for name in names]
    adam = AdamStep(groups)
    if lazy is not None and points.params:  # without points, no step was made that could defer any
        moments = [[points.moments[name][i] for name in ORDER] for i in (0, 1)]
        splat_flush(_flat([points.params[name] for name in ORDER]), _flat(moments[0]), _flat(moments[1]), lazy)
    taken.recount(adam, optimizers)


def bytes_of_step(
    capacities: Capacities, pixels: int, ranks: int, *, is_exchanged: bool, hierarchy: Hierarchy | None = None
) -> float:
    """Return the bytes of a step's buffers by the planning model, on the rank that receives the most rows.

    Args:
        pixels: pixels that this rank draws.
        is_exchanged: whether rows are exchanged. The transport's memory is excluded: it persists from step to step.
        hierarchy: forwards rows between machines, if any.
    """
    rows, pairs, intersections = capacities
    if not is_exchanged:
        received_rows = 0
    elif hierarchy is not None:
        received_rows = max(sum(hierarchy.received(pairs, rank)) for rank in range(ranks))
    else:
        received_rows = max(sum(from_all) for from_all in zip(*pairs, strict=True))
    one = Share(0, 1, rows, received_rows, received_rows or rows, intersections, pixels, 0.0, 0.0, 0.0)
    parts = step_buffers(one, ranks, capacity=1.0)
    return sum(size for name, size in parts.items() if name != "exchange" or not received_rows)


def _flat(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the tensors in the operators' shapes: opacities are [N]."""
    return [flat(name, tensor) for name, tensor in zip(ORDER, tensors, strict=True)]
