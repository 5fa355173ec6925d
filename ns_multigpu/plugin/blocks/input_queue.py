"""Device-side input queue of a block's steps: numbers and images that the device selects by itself.

Small models train as fast as the host launches. So the host writes a step's numbers into a table in page-locked memory,
and each step first reads the next line. One CUDA graph then replays for many steps at one launch each. The line also
selects images that are kept on the GPU. Each step writes its report to a line of another table.
"""

import functools
from collections.abc import Generator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from cuda_ext import keep_line, show_patches, take_lines
from ns_multigpu.core.assign.plan import Plan
from ns_multigpu.core.dist.world import World
from ns_multigpu.core.exchange.transports import Collective
from ns_multigpu.core.step.step import Step
from ns_multigpu.core.types import Sizes
from ns_multigpu.plugin.blocks.device_steps import DeviceStep
from ns_multigpu.plugin.blocks.step_buffers import StepBuffers
from ns_multigpu.plugin.blocks.step_inputs import StepInputs
from ns_multigpu.plugin.capture.device_images import DeviceImages

if TYPE_CHECKING:
    from ns_multigpu.plugin.splats.pipeline import DistributedPipeline


class InputQueue:
    """Input queue of one rank's steps, block by block.

    Args:
        pipeline: a `DistributedPipeline`, ready to train. world: the ranks.
        places: maximum number of steps of a block.

    Attributes:
        targets: photographs that the last step compared its renderings with, one tensor per patch of this rank.
        plan: plan of the last step, with halos. sizes: of its views.
        images: images of all views.
    """

    def __init__(self, pipeline: "DistributedPipeline", world: World, places: int) -> None:
        self._pipeline, self._model, self._world, self._places = pipeline, pipeline.model, world, places
        self.images = DeviceImages(pipeline.datamanager, world)
        self._at = torch.zeros(1, dtype=torch.int64, device=world.device)
        self._numbers, self._reports = torch.zeros(places, 0), torch.zeros(places, 0)
        self._indices = torch.zeros(places, 0, dtype=torch.int32)
        self._lines, self._shown = self._numbers.numpy(), self._indices.numpy()
        self._chosen = torch.zeros(0, dtype=torch.int32)
        self.targets: list[Tensor] = []
        self.plan = Plan((), ())
        self.sizes: Sizes = ()

    def load(self, step: int, factor: int) -> None:
        """Load the images of steps from this one on, at 1 / `factor` of their size, if they are kept on the GPU.

        Every rank calls it.
        """
        self.images.load(factor, functools.partial(self._small, step))

    def begin(self, step: Step | DeviceStep, place: int) -> None:
        """Set the next step to the block's step number `place`; later steps follow in order.

        Args:
            step: runs the steps. If its number of inputs differs from the previous one's, all graphs must be new.
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

    def put(self, place: int, step_inputs: StepInputs) -> None:
        """Write the inputs of the block's step number `place`. Its line is kept until the block ends."""
        # Assign through numpy: torch takes ten times as long.
        self._lines[place] = step_inputs.inputs.numpy()
        self._shown[place] = step_inputs.indices

    def ready(self, buffers: StepBuffers, step_inputs: StepInputs, plan: Plan, factor: int) -> None:
        """Place the images of a step in its buffers, unless it selects them on the device. Every rank calls it alike.

        Args:
            buffers: buffers of the step. plan: its plan, with halos. factor: see `load`.
        """
        mine, self.plan, self.sizes = plan.owned[self._world.rank], plan, step_inputs.sizes
        if self.shows(buffers):
            self.targets = buffers.places(mine, step_inputs.views)
            return
        shrink = functools.partial(self._small, step_inputs.step)
        parts = self.images.get_smaller(step_inputs.indices, plan, step_inputs.views, factor, shrink)
        self.targets = buffers.targets(parts, mine, step_inputs.views)

    def parts(
        self, buffers: StepBuffers, step: Step | DeviceStep, step_inputs: StepInputs
    ) -> Generator[Collective, None, list[Tensor]]:
        """Run the next step, from reading its line to writing its report: the part that a graph may capture."""
        take_lines([self._numbers, self._indices], self._at, [step.inputs, self._chosen])
        if self.shows(buffers) and self.targets:
            mine = self.plan.owned[self._world.rank]
            numbers = [n for p in mine for n in (p.view, *p.rendered(step_inputs.views[p.view]))]
            assert self.images.kept is not None
            show_patches(self.images.kept, self._chosen, numbers, buffers.pictures)
        rgb = yield from step.parts(self.plan, self.targets, self.sizes)
        keep_line(step.report, self._reports, self._at)
        return rgb

    def reports(self, steps: int) -> Tensor:
        """Return the reports of the block's first steps, [steps, B + 1]; see `Step.report`."""
        return self._reports[:steps].clone()

    def shows(self, buffers: StepBuffers) -> bool:
        """Return whether a step's images are selected on the device: they are kept there and steps are captured."""
        return buffers.captures and self.images.kept is not None

    def _small(self, step: int, image: Tensor) -> Tensor:
        """Return the image at the step's resolution, as floats."""
        self._model.step = step * self._pipeline.batch_size
        return self._model.get_gt_img(image)
