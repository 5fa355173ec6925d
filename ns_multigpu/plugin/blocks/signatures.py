"""Scheduled properties of a fused step: those that change with the number of images seen."""

from typing import TYPE_CHECKING, TypeAlias

from ns_multigpu.plugin.model import surfaces

if TYPE_CHECKING:
    from ns_multigpu.plugin.splats.pipeline import DistributedPipeline

Signature: TypeAlias = tuple[int | None, int, bool, tuple[tuple[str, float], ...]]
"""(`SplatModel.degree`, downscale factor of images, whether statistics are counted, weights of further losses)."""


class Signatures:
    """Cached signatures of a run's steps.

    Args:
        pipeline: a `DistributedPipeline`, ready to train.
    """

    def __init__(self, pipeline: "DistributedPipeline") -> None:
        self._pipeline, self._model = pipeline, pipeline.model
        self._found: dict[int, Signature] = {}

    def __call__(self, step: int) -> Signature:
        """Return the signature of a step."""
        if step in self._found:
            return self._found[step]
        config, images = self._model.config, step * self._pipeline.batch_size
        factor = 2 ** max(config.num_downscales - images // config.resolution_schedule, 0)
        losses = tuple(surfaces.weights(config, images).items())
        found = self._model.degree(images), factor, self._model.counts(images), losses
        self._found[step] = found
        return found

    def forget(self) -> None:
        """Clear the cache when a block begins."""
        self._found.clear()

    def same(self, steps: range) -> None:
        """Store the first step's signature for all `steps`: no property changes back, so equal ends suffice."""
        self._found.update(dict.fromkeys(steps, self(steps[0])))

    def enlarges(self, step: int) -> bool:
        """Return whether images are larger in this step than in the one before."""
        return step > 0 and self(step)[1] < self(step - 1)[1]
