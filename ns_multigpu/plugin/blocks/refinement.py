"""Densification after a block of fused steps, followed by the noise of the last step.

If it needs no host decision, it is launched before the block's steps are known to be complete, and has no effect if
they are not. Otherwise the device would idle while the host launches some hundred operators one by one.
"""

from typing import TYPE_CHECKING, Any

from ns_multigpu.plugin.blocks.fused_noise import StepNoise
from ns_multigpu.plugin.model.optimizers import BatchOptimizers

if TYPE_CHECKING:
    from ns_multigpu.plugin.splats.pipeline import DistributedPipeline


class Refining:
    """Densification of one rank's points between blocks.

    Args:
        pipeline: a `DistributedPipeline`, ready to train. optimizers: its `BatchOptimizers`. noise: noise of its steps.
    """

    def __init__(self, pipeline: "DistributedPipeline", optimizers: BatchOptimizers, noise: StepNoise) -> None:
        self._pipeline, self._optimizers, self._noise, self._model = pipeline, optimizers, noise, pipeline.model
        self._done: int | None = None  # the step after which `ahead` last launched a refinement

    def due(self, last: int) -> bool:
        """Return whether densification after step `last` is due and not yet done. Every rank calls it alike."""
        return self._done != last and self._model.densifier.due_after(*self._images(last))

    def replaces(self, last: int) -> bool:
        """Return whether the refinement may replace the points' tensors."""
        return bool(self._model.densifier.replaces(self._model.gauss_params, *self._images(last)))

    def ahead(self, last: int, taken: Any) -> None:
        """Launch the refinement before step `last` is known to be complete, if the densifier supports that.

        Args:
            taken: [] bool on the device, True if the step completed.
        """
        model, self._done = self._model, None
        given = (model.gauss_params, self._optimizers.optimizers, model.densifier_state, *self._images(last))
        if model.densifier.refine_ahead(*given, taken):
            self._noise.after_refinement(last, taken)
            self._done = last

    def forget(self) -> None:
        """Record that what `ahead` launched had no effect, and is not launched again."""
        self._done = None

    def take(self, last: int) -> None:
        """Run the refinement after step `last`, which completed."""
        model = self._model
        model.densifier.refine_when_due(
            model.gauss_params, self._optimizers.optimizers, model.densifier_state, *self._images(last)
        )
        self._noise.after_refinement(last)
        if model.sharded:
            model.count_shards()

    def _images(self, step: int) -> tuple[int, int]:
        """Return the number of images seen before a step, and in it."""
        batch = self._pipeline.batch_size
        return step * batch, batch
