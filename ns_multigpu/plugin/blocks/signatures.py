"""What a fused step depends on that changes on its own, by the number of images seen."""

from typing import Any, TypeAlias

from ns_multigpu.plugin.model import surfaces

Signature: TypeAlias = tuple[int, int, bool, tuple[tuple[str, float], ...]]
"""Harmonics, by what images are made smaller, whether statistics count, and weights of further losses."""


class Signatures:
    """Of the steps of a run.

    Args:
        pipeline: a `DistributedPipeline`, ready to train.
    """

    def __init__(self, pipeline: Any) -> None:
        self._pipeline, self._model = pipeline, pipeline.model
        self._found: dict[int, Signature] = {}

    def __call__(self, step: int) -> Signature:
        """That of a step."""
        if step in self._found:
            return self._found[step]
        config, images = self._model.config, step * self._pipeline.batch_size
        degree = min(images // config.sh_degree_interval, config.sh_degree)
        factor = 2 ** max(config.num_downscales - images // config.resolution_schedule, 0)
        found = degree, factor, self._model.counts(images), tuple(surfaces.weights(config, images).items())
        self._found[step] = found
        return found

    def forget(self) -> None:
        """A block begins: what was found of steps before it is of no use."""
        self._found.clear()

    def same(self, steps: range) -> None:
        """All of these have that of the first: nothing that it depends on changes back."""
        self._found.update(dict.fromkeys(steps, self(steps[0])))

    def enlarges(self, step: int) -> bool:
        """Whether images are larger in this step than in the one before."""
        return step > 0 and self(step)[1] < self(step - 1)[1]
