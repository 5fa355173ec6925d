"""Blocks of fused steps as the training loop sees them: timed, looked at for NaN, and measured at their ends."""

import time
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from nerfstudio.utils import writer
from nerfstudio.utils.rich_utils import CONSOLE
from nerfstudio.utils.writer import EventName
from torch import Tensor

from ns_multigpu.core.dist.world import World
from ns_multigpu.plugin.blocks.fused_options import check_wishes, fuses
from ns_multigpu.plugin.blocks.timing import Pace
from ns_multigpu.plugin.blocks.training import BlockResult, Training
from ns_multigpu.plugin.faults.guards import Guards
from ns_multigpu.plugin.launch.run_parts import run_parts

Measured: TypeAlias = tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]
"""Of one step, on one rank: its share of the loss, of the loss's terms, and of the metrics, each []."""


class FusedBlocks:
    """Takes one block of fused steps after another.

    Args:
        pipeline: a `DistributedPipeline`, ready to train.
        optimizers: a `BatchOptimizers`, its checkpoint loaded.
        world: the ranks.
        guards: told of each step.

    Attributes:
        training: what takes the steps.
    """

    def __init__(self, pipeline: Any, optimizers: Any, world: World, guards: Guards) -> None:
        self._pipeline, self._world, self._guards = pipeline, world, guards
        self.training = Training(pipeline, optimizers, world, guards.computed)
        self._pace, self._seconds, self._begun = Pace(), 0.0, False

    @classmethod
    def if_asked_for(
        cls, config: Any, pipeline: Any, optimizers: Any, world: World, guards: Guards, first: int
    ) -> "FusedBlocks | None":
        """What takes this run's steps from the `first` on where they are fused, else None; says which on the terminal.

        Raises:
            InputError: they must be fused and cannot, or something is asked for that is for fused steps only.
        """
        yes, text = fuses(config, pipeline, optimizers, world)
        if text:
            CONSOLE.print(text)
        check_wishes(pipeline, fused=yes)
        made = cls(pipeline, optimizers, world, guards) if yes else None
        if made is not None:
            made.training.bring_images(first)
        pipeline.warmed_up()
        return made

    def take(self, steps: range, *, metrics: bool, meanwhile: Callable[[], None] | None = None) -> Measured | None:
        """Takes the steps of a block and what densification they are followed by. Every rank calls it with the same.

        Args:
            steps: the steps.
            metrics: whether to say how the last of them went (the trainer asks when it logs).
            meanwhile: called once, while the device is busy with the block.
        """
        pipeline, last, began = self._pipeline, steps[-1], time.perf_counter()
        if not (pipeline.training and pipeline.model.training):  # to tell all modules takes longer than to ask two
            pipeline.train()
        pipeline.model.step = steps[0] * pipeline.batch_size
        result = self.training.run(steps, metrics=metrics, meanwhile=meanwhile)
        pipeline.model.step = last * pipeline.batch_size
        self.training.refine(steps)
        self._seconds = self._pace.after(len(steps), time.perf_counter() - began)
        if not self._begun:
            self._begun = True
            run_parts().done(f"first {len(steps)} steps")
        self._guards.numbers.note(steps, result.views, ("the rows",), result.reports)
        return self._measured(result) if metrics else None

    def show_pace(self, step: int) -> float:
        """Hands seconds a step, of late, and what they make the rest of the run take to nerfstudio's writers; returns
        the former."""
        # Nerfstudio's own averages would count a block of one step, with a refinement behind it, like one of fifty, and
        # go back as many blocks as its buffer holds, of which not all are shown.
        for name in (EventName.ITER_TRAIN_TIME, EventName.TRAIN_RAYS_PER_SEC):
            writer.GLOBAL_BUFFER["events"].pop(name.value, None)
        writer.put_time(EventName.ITER_TRAIN_TIME, self._seconds, step, avg_over_steps=True, update_eta=True)
        return self._seconds

    def _measured(self, result: BlockResult) -> Measured:
        pipeline = self._pipeline
        terms: dict[str, torch.Tensor] = {"main_loss": result.reports[-1, :-1].sum() / pipeline.batch_size}
        if pipeline.model.densifier.noisy:
            share = pipeline.model.share_of_points(self._world)
            with torch.no_grad():  # of the model as the block has left it
                more = pipeline.model.regularisation(pipeline.batch_size)
            terms |= {name: share * value for name, value in more.items()}
        loss = torch.stack(list(terms.values())).sum()
        assert result.mse is not None, "asked for with the metrics"
        return loss, terms, {"mse": result.mse}
