"""Blocks of fused steps for the training loop: timing, finiteness checks, and metrics at block ends."""

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

import torch
from nerfstudio.utils import writer
from nerfstudio.utils.rich_utils import CONSOLE
from nerfstudio.utils.writer import EventName
from torch import Tensor

from ns_multigpu.core.dist.world import World
from ns_multigpu.plugin.blocks.fused_options import check_requests, fuses
from ns_multigpu.plugin.blocks.timing import Pace
from ns_multigpu.plugin.blocks.training import BlockResult, Training
from ns_multigpu.plugin.faults.guards import Guards
from ns_multigpu.plugin.launch.run_parts import run_parts
from ns_multigpu.plugin.model.optimizers import BatchOptimizers

if TYPE_CHECKING:
    from ns_multigpu.plugin.splats.config import DistributedTrainerConfig
    from ns_multigpu.plugin.splats.pipeline import DistributedPipeline

Measured: TypeAlias = tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]
"""(loss, loss terms, metrics) of one step: this rank's shares, each []."""


class FusedBlocks:
    """Runner of fused steps, one block after another.

    Args:
        pipeline: a `DistributedPipeline`, ready to train.
        optimizers: a `BatchOptimizers`, its checkpoint loaded.
        world: the ranks.
        guards: receives the numbers of each step.

    Attributes:
        training: runs the steps.
    """

    def __init__(
        self, pipeline: "DistributedPipeline", optimizers: BatchOptimizers, world: World, guards: Guards
    ) -> None:
        self._pipeline, self._guards = pipeline, guards
        self.training = Training(pipeline, optimizers, world, guards.computed, skips=guards.numbers.skips)
        self._pace, self._seconds, self._begun = Pace(), 0.0, False

    @classmethod
    def if_asked_for(
        cls, config: "DistributedTrainerConfig", pipeline: "DistributedPipeline", optimizers: BatchOptimizers,
        world: World, guards: Guards, first: int,
    ) -> "FusedBlocks | None":  # fmt: skip
        """Return the runner of this run's steps from `first` on, or None if steps are not fused; print the choice.

        Raises:
            InputError: steps must be fused and cannot be, or an option requires fused steps.
        """
        yes, text = fuses(config, pipeline, optimizers, world)
        if text:
            CONSOLE.print(text)
        check_requests(pipeline, fused=yes)
        made = cls(pipeline, optimizers, world, guards) if yes else None
        if made is not None:
            made.training.load_images(first)
        pipeline.warmed_up()
        return made

    def take(self, steps: range, *, metrics: bool, while_busy: Callable[[], None] | None = None) -> Measured | None:
        """Run the steps of a block and the densification after it. Every rank calls it with the same arguments.

        Args:
            steps: the steps.
            metrics: whether to return the loss and metrics of the last step (the trainer requests them when it logs).
            while_busy: called once, while the device is busy with the block.
        """
        pipeline, last, began = self._pipeline, steps[-1], time.perf_counter()
        if not (pipeline.training and pipeline.model.training):  # testing two flags is faster than setting all modules
            pipeline.train()
        pipeline.model.step = steps[0] * pipeline.batch_size
        result = self.training.run(steps, metrics=metrics, while_busy=while_busy)
        pipeline.model.step = last * pipeline.batch_size
        self.training.refine(steps)
        self._seconds = self._pace.after(len(steps), time.perf_counter() - began)
        if not self._begun:
            self._begun = True
            run_parts().done(f"first {len(steps)} steps")
        self._guards.numbers.note(steps, result.views, ("the rows",), result.reports)
        return self._measured(result) if metrics else None

    def show_pace(self, step: int) -> float:
        """Pass recent seconds per step, and the remaining time that follows, to nerfstudio's writers; return the
        former."""
        # Nerfstudio's own averages would weigh a block of one step and its refinement like a block of fifty. They would
        # also span as many blocks as its buffer holds, some of which are not shown.
        for name in (EventName.ITER_TRAIN_TIME, EventName.TRAIN_RAYS_PER_SEC):
            writer.GLOBAL_BUFFER["events"].pop(name.value, None)
        writer.put_time(EventName.ITER_TRAIN_TIME, self._seconds, step, avg_over_steps=True, update_eta=True)
        return self._seconds

    def _measured(self, result: BlockResult) -> Measured:
        pipeline = self._pipeline
        terms: dict[str, torch.Tensor] = {"main_loss": result.reports[-1, :-1].sum() / pipeline.batch_size}
        corrections = dict[str, torch.Tensor]()
        pipeline.model.camera_optimizer.get_loss_dict(corrections)
        terms |= {name: value.detach() / pipeline.world.size for name, value in corrections.items()}
        loss = torch.stack(list(terms.values())).sum()
        assert result.mse is not None, "asked for with the metrics"
        return loss, terms, {"mse": result.mse}
