"""What MCMC adds to fused steps: its terms in the loss, which `splat_update` knows, and noise on every mean.

Noise follows a step by launches of its own. A step that the device does not take, because a capacity was exceeded, is
taken again, so its noise is multiplied by whether it was taken. Where a refinement follows a step, noise follows that,
as in ordinary training.
"""

from typing import Any

from ns_multigpu.core.schema import POSITION


class StepNoise:
    """MCMC's part in fused steps; does nothing where the densifier is another.

    Args:
        pipeline: a `DistributedPipeline`. optimizers: its `BatchOptimizers`.

    Attributes:
        active: whether the densifier is MCMC.
    """

    def __init__(self, pipeline: Any, optimizers: Any) -> None:
        self._pipeline, self._optimizers, self._model = pipeline, optimizers, pipeline.model
        self.active = self._model.densifier.noisy
        self._rate = 0.0

    def rate(self) -> float:
        """The means' learning rate that a step of one image would have now; 0 where nobody asks for noise."""
        if not self.active:
            return 0.0
        return self._optimizers.rate_of_one_view(POSITION)

    def after(self, step: Any, number: int, rate: float) -> None:
        """The noise of a step that was launched, unless a refinement comes first.

        It needs memory. Where there is none for it the run ends as after that step, this one noise missing.

        Args:
            step: a `Step`. number: the step's. rate: see `rate`, of the step.
        """
        self._rate = rate
        first, batch = number * self._pipeline.batch_size, self._pipeline.batch_size
        if self.active and not self._model.densifier.due_after(first, batch):
            self._model.densifier.move(self._model.gauss_params, first, batch, rate, step.taken)

    def after_refinement(self, number: int, taken: Any = None) -> None:
        """The noise of the step before it, the last that `after` was told of; none where `taken` [] is False."""
        if self.active:
            batch = self._pipeline.batch_size
            self._model.densifier.move(self._model.gauss_params, number * batch, batch, self._rate, taken)

    def weights(self) -> dict[str, float]:
        """`opacity_weight` and `scale_weight` of a step: the terms are means, and those are of sums."""
        if not self.active:
            return {}
        options, points = self._model.config, max(self._model.total_points, 1)
        return {
            "opacity_weight": options.mcmc_opacity_reg / points,
            "scale_weight": options.mcmc_scale_reg / (3 * points),
        }
