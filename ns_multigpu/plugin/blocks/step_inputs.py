"""Inputs of a step: views, cameras, backgrounds and Adam's numbers, drawn on the host while the device is busy.

Small models train as fast as the host launches. So all numbers of a step go into one array, one copy moves them to the
device, and values shared with earlier steps are cached.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from cuda_ext.ops.optim.adam import AdamStep
from ns_multigpu.core.assign.assignment import Feedback
from ns_multigpu.core.assign.plan import Plan
from ns_multigpu.core.random import seed_from
from ns_multigpu.core.types import Sizes, View, sizes_of
from ns_multigpu.plugin.blocks.host_cameras import HostCameras
from ns_multigpu.plugin.model import view_parameters
from ns_multigpu.plugin.model.batch_scaling import next_rates
from ns_multigpu.plugin.model.optimizers import BatchOptimizers

if TYPE_CHECKING:
    from ns_multigpu.plugin.splats.pipeline import DistributedPipeline

TOGETHER = 8
"""Maximum number of steps drawn at once, and run at once if one graph can hold them."""


@dataclass
class StepInputs:
    """Inputs of one step, kept until its block ends because a step may be retried.

    Attributes:
        step: its number. indices: its views' indices in the capture. views: these views, on the host.
        inputs: the values of `Step.inputs`, float32 on the host. Of B views: 16 B numbers of world-to-camera matrices,
            9 B of intrinsics (21 B with lenses), 3 B of backgrounds, Adam's 8 for each parameter, B times, and with
            trained parameters of views B indices.
        plan: the step's plan. rate: see `StepNoise.rate`. sizes: of the views.
    """

    step: int
    indices: list[int]
    views: list[View]
    inputs: Tensor
    plan: Plan
    rate: float

    @cached_property
    def sizes(self) -> Sizes:
        return sizes_of(self.views)


class StepInputsMaker:
    """Source of one rank's step inputs.

    Args:
        pipeline: a `DistributedPipeline`, ready to train. optimizers: a `BatchOptimizers`.
        rank: this rank. cameras: cameras of the training views.
    """

    def __init__(
        self, pipeline: "DistributedPipeline", optimizers: BatchOptimizers, rank: int, cameras: HostCameras
    ) -> None:
        self._pipeline, self._optimizers, self._rank, self._cameras = pipeline, optimizers, rank, cameras
        self._draws = torch.Generator()
        self._prefetched = 0  # end of the steps whose plans were prefetched
        self._seed, self._random = pipeline.model.seed, pipeline.model.config.background_color == "random"

    def prefetch_plans(self, steps: range, more: int, factor: Callable[[int], int]) -> None:
        """Prefetch the plans of a block's batches and of `more` steps, likely the next block's.

        Args:
            factor: downscale factor of a step, see `draw`.
        """
        data, batch = self._pipeline.datamanager, self._pipeline.batch_size
        first = max(self._prefetched, steps[0])
        coming = data.coming(range(first, steps[-1] + 1 + more), batch)
        self._prefetched = first + len(coming)
        batches = zip(range(first, self._prefetched), coming, strict=True)
        self._pipeline.strategy.assignment.prefetch_plans(
            [[self._cameras(index, factor(step))[0] for index in indices] for step, indices in batches]
        )

    def together(self, place: int) -> int:
        """Return how many steps to draw at once, from the block's step number `place` on.

        Launching a step evicts the drawing code and data from the host's caches, so eight steps drawn in a row take as
        long as two. At most as many are drawn as the block has had before, because the device waits if none is queued.
        It is one if plans depend on recent steps, or images must be decoded in time.
        """
        pipeline = self._pipeline
        if pipeline.strategy.assignment.learns is not Feedback.NOTHING or pipeline.datamanager.train_share.lookahead:
            return 1
        return min(TOGETHER, max(place, 1))

    def alike(self, feeds: Sequence[StepInputs]) -> bool:
        """Return whether this is a full group of steps drawn at once, all with the same plan."""
        return len(feeds) == TOGETHER and all(step_inputs.plan == feeds[0].plan for step_inputs in feeds)

    def draw(self, step: int, factor: int, adam: AdamStep, rate: Callable[[], float]) -> StepInputs:
        """Draw a step's views and backgrounds, and advance optimizers and schedules by one step.

        Args:
            factor: images are at 1 / `factor` of their size. adam: step of all parameters.
            rate: returns the noise's rate, called after the schedules' step.
        """
        pipeline, batch = self._pipeline, self._pipeline.batch_size
        indices = pipeline.datamanager.train_batch(step, batch)
        cameras = [self._cameras(index, factor) for index in indices]
        views = [view for view, _ in cameras]
        plan = pipeline.strategy.plan_alike(views)
        lines = adam.count()
        for scheduler in self._optimizers.schedulers.values():
            next_rates(scheduler)
        times = [view.time for view in views] + (indices if view_parameters.groups(pipeline.model) else [])
        end = len(cameras[0][1]) * batch  # of the cameras
        inputs = np.zeros(end + 3 * batch + sum(map(len, lines)) + len(times), dtype=np.float32)
        matrices, Ks = inputs[: 16 * batch].reshape(batch, 16), inputs[16 * batch : end].reshape(batch, -1)
        for place, (_, numbers) in enumerate(cameras):
            matrices[place], Ks[place] = numbers[:16], numbers[16:]
        backgrounds = inputs[end : end + 3 * batch].reshape(batch, 3)
        for view in {patch.view for patch in plan.owned[self._rank]}:  # other backgrounds are unused
            backgrounds[view] = self._background(step * batch + view)
        inputs[end + 3 * batch :] = [number for line in lines for number in line] + times
        return StepInputs(step, indices, views, torch.from_numpy(inputs), plan, rate())

    def _background(self, image: int) -> np.ndarray[Any, Any]:
        """Return the background [3] of an image, given its number in the whole run."""
        if not self._random:
            return self._pipeline.model.background_color.float().cpu().numpy()  # type: ignore[no-any-return]
        # Equals a generator seeded per key: reseeding one is faster than making one.
        self._draws.manual_seed(seed_from(self._seed, "background", image))
        return torch.rand(3, generator=self._draws).numpy()  # type: ignore[no-any-return]
