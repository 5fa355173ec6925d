"""What follows a block of fused steps: densification, and the noise of the last step behind it.

Where the device needs nobody for it, it is ordered before the block's steps are known to have been taken, and does
nothing where they were not. Else the device would wait while the host launches some hundred operators one by one.
"""

from typing import Any

from ns_multigpu.plugin.blocks.fused_noise import StepNoise


class Refining:
    """Densification of one rank's points between blocks.

    Args:
        pipeline: a `DistributedPipeline`, ready to train. optimizers: its `BatchOptimizers`. noise: of its steps.
    """

    def __init__(self, pipeline: Any, optimizers: Any, noise: StepNoise) -> None:
        self._pipeline, self._optimizers, self._noise, self._model = pipeline, optimizers, noise, pipeline.model
        self._done: int | None = None  # the step behind which `ahead` has been ordered last

    def due(self, last: int) -> bool:
        """Whether step `last` is followed by densification that has not been done. Every rank calls it alike."""
        return self._done != last and self._model.densifier.due_after(*self._images(last))

    def replaces(self, last: int) -> bool:
        """Whether it may put other tensors in the place of the points'."""
        return bool(self._model.densifier.replaces(self._model.gauss_params, *self._images(last)))

    def ahead(self, last: int, taken: Any) -> None:
        """Orders it before step `last` is known to have been taken, if that can be.

        Args:
            taken: [] bool on the device, whether it was.
        """
        model, self._done = self._model, None
        given = (model.gauss_params, self._optimizers.optimizers, model.densifier_state, *self._images(last))
        if model.densifier.refine_ahead(*given, taken):
            self._noise.after_refinement(last, taken)
            self._done = last

    def take(self, last: int) -> None:
        """Does it, behind step `last`, which was taken."""
        model = self._model
        model.densifier.refine_when_due(
            model.gauss_params, self._optimizers.optimizers, model.densifier_state, *self._images(last)
        )
        self._noise.after_refinement(last)
        if model.sharded:
            model.count_shards()

    def _images(self, step: int) -> tuple[int, int]:
        """Images seen before a step, and in it."""
        batch = self._pipeline.batch_size
        return step * batch, batch
