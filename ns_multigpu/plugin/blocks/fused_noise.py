"""MCMC in fused steps: regularization of drawn points in `splat_update`'s loss, and noise on every mean.

Noise is launched separately after each step. A step that exceeded a capacity is skipped and retried, so its noise is
multiplied by the step's `taken` flag. If a refinement follows a step, noise follows the refinement, as in ordinary
training.
"""

from typing import TYPE_CHECKING, Any

from ns_multigpu.core.schema import POSITION
from ns_multigpu.plugin.model.optimizers import BatchOptimizers

if TYPE_CHECKING:
    from ns_multigpu.plugin.splats.pipeline import DistributedPipeline


class StepNoise:
    """MCMC noise and regularization of fused steps; none with other densifiers.

    Args:
        pipeline: a `DistributedPipeline`. optimizers: its `BatchOptimizers`.

    Attributes:
        active: True if the densifier adds noise.
    """

    def __init__(self, pipeline: "DistributedPipeline", optimizers: BatchOptimizers) -> None:
        self._pipeline, self._optimizers, self._model = pipeline, optimizers, pipeline.model
        self.active = self._model.densifier.noisy
        self._rate = 0.0

    def rate(self) -> float:
        """Return the current learning rate of the means for a step of one image; 0 without noise."""
        if not self.active:
            return 0.0
        return self._optimizers.rate_of_one_view(POSITION)

    def after(self, step: Any, number: int, rate: float) -> None:
        """Launch the noise of a launched step, unless a refinement comes first.

        It allocates memory. If that fails, the run ends after that step, without this noise.

        Args:
            step: a `Step`. number: the step's number. rate: the step's `rate`.
        """
        self._rate = rate
        first, batch = number * self._pipeline.batch_size, self._pipeline.batch_size
        if self.active and not self._model.densifier.due_after(first, batch):
            self._model.densifier.move(self._model.gauss_params, first, batch, rate, step.taken)

    def after_refinement(self, number: int, taken: Any = None) -> None:
        """Launch the noise of the step that `after` last received; none if `taken` [] is False."""
        if self.active:
            batch = self._pipeline.batch_size
            self._model.densifier.move(self._model.gauss_params, number * batch, batch, self._rate, taken)

    def weights(self) -> dict[str, float]:
        """Return MCMC's options of a step's update: see `SplatModel.regularisation` and `splat_update`."""
        options = self._model.config
        if options.densifier != "mcmc":
            return {}
        rows = self._pipeline.batch_size * max(self._model.total_points, 1)
        return {
            "opacity_weight": options.mcmc_opacity_reg / rows,
            "scale_weight": options.mcmc_scale_reg / (3 * rows),
            "whole_step_scale": options.mcmc_whole_step_scale,
        }
