"""What a block's steps are served: numbers and images, where the device finds them by itself.

Small models are as fast as the host is. So the host writes a step's numbers into a table in page-locked memory, and a
step begins by taking the line that is next: one CUDA graph serves step after step, and costs the host one launch.
Images that are kept on the GPU are chosen by the same line. What a step reports goes to a line of another table.
"""

import functools
from collections.abc import Generator
from typing import Any

import torch
from torch import Tensor

from cuda_ext import keep_line, show_patches, take_lines
from ns_multigpu.core.assign.plan import Plan
from ns_multigpu.core.dist.world import World
from ns_multigpu.core.exchange.transports import Collective
from ns_multigpu.core.step.step import Step
from ns_multigpu.plugin.blocks.step_buffers import StepBuffers
from ns_multigpu.plugin.blocks.step_inputs import Feed
from ns_multigpu.plugin.capture.device_images import DeviceImages


class InputQueue:
    """Serves the steps of one rank, block by block.

    Args:
        pipeline: a `DistributedPipeline`, ready to train. world: the ranks.
        places: steps of a block at most.

    Attributes:
        targets: what the last step compared its renderings with, a tensor for each of this rank's patches.
        plan: of the last step, with halos.
    """

    def __init__(self, pipeline: Any, world: World, places: int) -> None:
        self._pipeline, self._model, self._world, self._places = pipeline, pipeline.model, world, places
        self._images = DeviceImages(pipeline.datamanager, world)
        self._at = torch.zeros(1, dtype=torch.int64, device=world.device)
        self._numbers, self._reports = torch.zeros(places, 0), torch.zeros(places, 0)
        self._indices = torch.zeros(places, 0, dtype=torch.int32)
        self._lines, self._shown = self._numbers.numpy(), self._indices.numpy()
        self._chosen = torch.zeros(0, dtype=torch.int32)
        self.targets: list[Tensor] = []
        self.plan = Plan((), ())

    def bring(self, step: int, factor: int) -> None:
        """Has the images that steps from this one on need, at 1 / `factor` of their size, where they are kept on the
        GPU. Every rank calls it."""
        self._images.bring(factor, functools.partial(self._small, step))

    def begin(self, step: Step, place: int) -> None:
        """The next step that is taken is the block's step number `place`, and those behind it follow.

        Args:
            step: takes them. One with other numbers than the one before is no longer in any graph.
        """
        numbers, views = len(step.inputs), len(step.report) - 1
        if (numbers, views) != (self._numbers.shape[1], self._indices.shape[1]):
            pinned, device = self._world.device.type == "cuda", self._world.device
            self._numbers = torch.zeros(self._places, numbers, pin_memory=pinned)
            self._indices = torch.zeros(self._places, views, dtype=torch.int32, pin_memory=pinned)
            self._lines, self._shown = self._numbers.numpy(), self._indices.numpy()  # the same memory
            self._chosen = torch.zeros(views, dtype=torch.int32, device=device)
            self._reports = torch.zeros(self._places, views + 1, device=device)
        self._at.fill_(place)

    def put(self, place: int, feed: Feed) -> None:
        """Says what the block's step number `place` is fed. Its line stays until the block is over."""
        # Through numpy: torch's assignments take ten times as long.
        self._lines[place] = feed.inputs.numpy()
        self._shown[place] = feed.indices

    def ready(self, buffers: StepBuffers, feed: Feed, plan: Plan, factor: int) -> None:
        """Has the images of a step where it looks for them, unless it takes them by itself. Every rank calls it alike.

        Args:
            buffers: of the step. plan: its, with halos. factor: see `bring`.
        """
        mine, self.plan = plan.owned[self._world.rank], plan
        if self.shows(buffers):
            self.targets = buffers.places(mine, feed.views)
            return
        shrink = functools.partial(self._small, feed.step)
        parts = self._images.get_smaller(feed.indices, plan, feed.views, factor, shrink)
        self.targets = buffers.targets(parts, mine, feed.views)

    def parts(self, buffers: StepBuffers, step: Step, feed: Feed) -> Generator[Collective, None, list[Tensor]]:
        """The step that is next, from the line that it takes to the one that it leaves: what a graph may hold."""
        take_lines([self._numbers, self._indices], self._at, [step.inputs, self._chosen])
        if self.shows(buffers) and self.targets:
            mine = self.plan.owned[self._world.rank]
            numbers = [n for p in mine for n in (p.view, *p.rendered(feed.views[p.view]))]
            assert self._images.kept is not None
            show_patches(self._images.kept, self._chosen, numbers, buffers.pictures)
        rgb = yield from step.parts(self.plan, self.targets)
        keep_line(step.report, self._reports, self._at)
        return rgb

    def reports(self, steps: int) -> Tensor:
        """[steps, B + 1] what the block's first steps have reported, see `Step.report`."""
        return self._reports[:steps].clone()

    def shows(self, buffers: StepBuffers) -> bool:
        """Whether a step's images are chosen on the device: they are kept there, and lie where graphs find them."""
        return buffers.captures and self._images.kept is not None

    def _small(self, step: int, image: Tensor) -> Tensor:
        """The image at the step's resolution, as floats."""
        self._model.step = step * self._pipeline.batch_size
        return self._model.get_gt_img(image)
