"""Blocks of fused steps as the training loop sees them: timed, looked at for NaN, and measured at their ends."""

from typing import Any

import torch
from nerfstudio.utils import writer
from nerfstudio.utils.rich_utils import CONSOLE
from nerfstudio.utils.writer import EventName, TimeWriter
from torch import Tensor

from ns_multigpu.core.world import World
from ns_multigpu.plugin.fused_options import check_wishes, fuses
from ns_multigpu.plugin.fused_training import FusedTraining
from ns_multigpu.plugin.guards import Guards
from ns_multigpu.plugin.tile_training import TileTraining
from ns_multigpu.plugin.timing import Pace
from ns_multigpu.primitives.mcmc import McmcDensifier


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
        kind = TileTraining if pipeline.model.sharded else FusedTraining
        self.training = kind(pipeline, optimizers, world, guards.computed)
        self._pace = Pace()

    @classmethod
    def if_asked_for(
        cls, config: Any, pipeline: Any, optimizers: Any, world: World, guards: Guards
    ) -> "FusedBlocks | None":
        """What takes this run's steps where they are fused, else None; says which on the terminal.

        Raises:
            InputError: they must be fused and cannot, or something is asked for that is for fused steps only.
        """
        yes, text = fuses(config, pipeline, optimizers, world)
        if text:
            CONSOLE.print(text)
        check_wishes(pipeline, fused=yes)
        return cls(pipeline, optimizers, world, guards) if yes else None

    def take(self, steps: range) -> tuple[float, tuple[Tensor, dict[str, Any], dict[str, Any]]]:
        """Takes the steps of a block and what densification they are followed by. Every rank calls it with the same.

        Returns:
            seconds a step, of late; and of the last step this rank's share of the loss, of its terms, and of the
            metrics.
        """
        pipeline, last = self._pipeline, steps[-1]
        with TimeWriter(writer, EventName.ITER_TRAIN_TIME, step=last, write=False) as train_time:
            pipeline.train()
            pipeline.model.step = steps[0] * pipeline.batch_size
            result = self.training.run(steps)
            pipeline.model.step = last * pipeline.batch_size
            self.training.refine(steps)
        seconds = self._pace.after(len(steps), train_time.duration)
        # Nerfstudio's own average would count a block of one step, with a refinement behind it, like one of fifty.
        writer.GLOBAL_BUFFER["events"].pop(EventName.ITER_TRAIN_TIME.value, None)
        writer.put_time(EventName.ITER_TRAIN_TIME, seconds, last, avg_over_steps=True, update_eta=True)
        self._guards.numbers.note(steps, result.views, ("the rows",), result.reports)
        terms = {"main_loss": result.reports[-1, :-1].sum() / pipeline.batch_size}
        if isinstance(pipeline.model.strategy, McmcDensifier):
            share = pipeline.model.share_of_points(self._world)
            with torch.no_grad():  # of the model as the block has left it
                more = pipeline.model.regularisation(pipeline.batch_size)
            terms |= {name: share * value for name, value in more.items()}
        loss = torch.stack(list(terms.values())).sum()
        return seconds, (loss, terms, {"mse": result.mse})
