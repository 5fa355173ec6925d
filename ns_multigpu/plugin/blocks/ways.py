"""Which way fused steps are taken, where a strategy leaves a choice: times them, and has what belongs to each way."""

import time
from collections.abc import Callable
from typing import Any

import torch
from nerfstudio.utils.rich_utils import CONSOLE

from ns_multigpu.core.collectives import all_gather_floats, barrier, max_int
from ns_multigpu.core.strategy import Strategy
from ns_multigpu.core.trials import Block
from ns_multigpu.core.world import World
from ns_multigpu.plugin.blocks.first_room import FirstRoom
from ns_multigpu.plugin.blocks.step_buffers import StepBuffers
from ns_multigpu.plugin.blocks.step_capacities import LEAST_INTERSECTIONS, LEAST_ROWS, StepCapacities
from ns_multigpu.plugin.faults.memory import has_spare_room


class Ways:
    """The ways of one rank's steps.

    Args:
        pipeline: a `DistributedPipeline`, ready to train. Its strategy is that of the present way.
        world: the ranks.

    Attributes:
        buffers, room, first: of the present way. What rows travel through goes when another is taken.
    """

    def __init__(self, pipeline: Any, world: World) -> None:
        self._pipeline, self._world = pipeline, world
        self._strategy: Strategy = pipeline.strategy
        self._made: dict[int, tuple[StepBuffers, StepCapacities, FirstRoom]] = {}  # by a strategy's id
        self._clock: Callable[[], float] = time.perf_counter
        self._began = 0.0
        self.buffers, self.room, self.first = self._of(self._strategy)

    @property
    def most(self) -> int | None:
        """Steps of the next block at most; None where trials do not care."""
        choice = self._strategy.choice
        return None if choice is None else choice.trials.most

    def begin(self, let_go: Callable[[], None]) -> None:
        """Called before each block: from now on steps are taken the way that is to be.

        Args:
            let_go: called where that is with another strategy, before buffers go that steps may hold on to.
        """
        choice = self._strategy.choice
        if choice is None:
            return
        wanted = choice.others.get(choice.trials.way, self._strategy)
        if wanted is not self._pipeline.strategy:
            let_go()
            self.buffers.drop()
            self._pipeline.strategy = wanted
            self.buffers, self.room, self.first = self._of(wanted)
        if choice.trials.trying:
            # Else it would count for how long others did something else, or what a refinement has left to be done.
            if self._world.device.type == "cuda":
                torch.cuda.synchronize(self._world.device)
            barrier(self._world)
            self._began = self._clock()

    def end(self, steps: range, *, again: bool, ready: bool) -> None:
        """Called after each block, when the device is done with it.

        Args:
            again: whether steps were taken twice. ready: whether images are of their full size.
        """
        choice = self._strategy.choice
        if choice is None:
            return
        seconds = 0.0
        if choice.trials.trying:
            took = self._clock() - self._began
            seconds = max(row[0] for row in all_gather_floats([took], self._world))
        points, placings = self._pipeline.model.total_points, self._strategy.placement.placings
        block = Block(len(steps), steps.stop, seconds, points, placings, again, ready)
        told = choice.trials.after(block, self._has_room)
        if choice.trials.settles:
            self.room.settle()
        if told is not None and self._world.is_main:
            CONSOLE.print(f"--pipeline.exchange auto: {told}", soft_wrap=True)

    def _has_room(self) -> bool:
        """Whether all ranks have memory for buffers of another kind."""
        device = self._world.device
        return max_int(int(device.type == "cuda" and not has_spare_room(device)), self._world) == 0

    def _of(self, strategy: Strategy) -> tuple[StepBuffers, StepCapacities, FirstRoom]:
        found = self._made.get(id(strategy))
        if found is None:
            pipeline = self._pipeline
            buffers = StepBuffers(pipeline, self._world)
            # On a CPU, and where rows travel with their room, sorting or sending it takes as long as it is.
            spares = self._world.device.type == "cuda" and buffers.spared()["rows"]
            least = (LEAST_ROWS, LEAST_INTERSECTIONS) if spares else (0, 0)
            views = len(pipeline.datamanager.train_share.shapes)
            room = StepCapacities(views, one_for_all=buffers.one_for_all, least=least)
            found = self._made[id(strategy)] = buffers, room, FirstRoom(pipeline, self._world, buffers)
        return found
