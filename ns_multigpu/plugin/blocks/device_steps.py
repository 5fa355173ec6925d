"""Fused steps of a model on `multigpu`, the device of all GPUs: one process trains by the strategy `tile`.

To the training loop it is a step of `single` on the first GPU: whole views and photographs, one report. The views'
bands are planned and distributed here, by the work measured in earlier steps.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from ns_multigpu.core.assign.plan import Plan
from ns_multigpu.core.dist.members import Members
from ns_multigpu.core.dist.world import World
from ns_multigpu.core.exchange.transport import Parts
from ns_multigpu.core.kernels import Kernels
from ns_multigpu.core.step.delayed_readback import DelayedReadback
from ns_multigpu.core.step.member_steps import MemberSteps
from ns_multigpu.core.step.step_settings import Status, StepSettings, with_halos
from ns_multigpu.core.types import Sizes, View
from ns_multigpu.plugin.blocks.graphs import GraphPool, StepGraphs
from ns_multigpu.plugin.blocks.timing import StepTimer
from ns_multigpu.plugin.model.view_parameters import OfViews
from strategies.tile import tile


class DeviceSteps:
    """Resources of the steps of all GPUs that outlive a rebuilt step: ranks, plans and graphs.

    Args:
        device: `multigpu`.

    Attributes:
        world: the world of one rank on the first GPU, for what the training loop does itself.
    """

    def __init__(self, device: torch.device) -> None:
        from ns_multigpu import aggregate  # registers the device: only in processes that use it

        self.aggregate, self.device, devices = aggregate, device, aggregate.devices()
        self.members, self.world = Members(devices), World.single(devices[0])
        self.strategies = [tile(world) for world in self.members.worlds]
        self.counts = DelayedReadback(self.strategies[0].assignment.learn)
        timer = StepTimer(torch.device("cpu"))  # one process measures all GPUs at once: nothing is timed within steps
        pools = [GraphPool(device) if device.type == "cuda" else None for device in devices]
        self.graphs = [StepGraphs(timer, lambda: None, pool) for pool in pools]

    @staticmethod
    def of(device: torch.device) -> "DeviceSteps | None":
        """Return those of `multigpu`; None for another device."""
        return DeviceSteps(device) if device.type == "multigpu" else None


class DeviceStep:
    """Step of all GPUs that is called as a `Step` of `single`. The one before it must be released.

    Args:
        made: resources.
        kernels, params, moments, statistics, settings: see `Step`; tensors on `multigpu`.
        kind: type of the photographs.
        of_views: returns a rank's parameters of views, each placed by the given function.

    Attributes:
        batch: the next step's views, set before it. Other attributes: see `Step`.
    """

    def __init__(
        self, made: DeviceSteps, kernels: Kernels, params: Mapping[str, Tensor],
        moments: Mapping[str, tuple[Tensor, Tensor]], statistics: Mapping[str, Tensor], settings: StepSettings,
        kind: torch.dtype, of_views: Callable[[World, Callable[[Tensor], Tensor]], OfViews],
    ) -> None:  # fmt: skip
        self._made, self._settings, ranks = made, settings, made.members.worlds
        for graphs in made.graphs:
            graphs.forget()
        # Each GPU has all parameters of views, and takes the same steps of them: rank, the model's, the GPU's own.
        self._replicas: list[tuple[int, Tensor, Tensor]] = []
        options = [of_views(world, partial(self._replicated, world.rank)) for world in ranks]
        settings = replace(settings, segment=settings.rows)  # enough for all rows to go one way
        self._steps: MemberSteps = made.aggregate.fused_steps(
            made.members, made.strategies, kernels, params, moments, statistics, settings, options
        )
        self.inputs, self.report = self._steps.inputs, self._steps.report
        self.measured_work = self._steps.measured_work
        self.batch: Sequence[View] = ()
        self.rgb: list[Tensor] = []
        size = settings.views * settings.height * settings.width * settings.channels
        self._photographs = [torch.empty(size, dtype=kind, device=world.device) for world in ranks]
        self._last: tuple[Plan, list[list[Tensor]]] = (Plan((), ()), [])
        self.taken = torch.ones((), dtype=torch.bool, device=made.device)
        self._taken = made.aggregate.member_views(self.taken)[0]

    def parts(self, plan: Plan, targets: Sequence[Tensor], sizes: Sizes) -> Parts[list[Tensor]]:
        """Take a step: see `Step.parts`. Nothing is left to launch between its parts."""
        yield from ()
        made = self._made
        made.counts.learn()
        whole = {patch.view: target for patch, target in zip(plan.owned[0], targets, strict=True)}
        bands = with_halos(made.strategies[0].plan_alike(self.batch), self.batch)
        self._last = bands, [self._distributed(rank, bands, whole) for rank in range(len(self._photographs))]
        self._steps.take(*self._last, sizes, lambda rank, parts: made.graphs[rank].parts(bands, parts))
        with made.members.on(0):
            made.counts.send(self.batch, self._steps.measured_work, self._steps.taken)
            self._taken.copy_(self._steps.taken)
        return []  # each GPU has bands of the renderings

    def mse(self, plan: Plan, targets: Sequence[Tensor], sizes: Sizes) -> Tensor:
        """Return the last step's mean squared error []."""
        del plan, targets  # those of the bands are known
        return self._steps.mse(*self._last, sizes)

    def refresh(self) -> None:
        """See `Step.refresh`; of the parameters of views, too."""
        self._steps.refresh()
        for rank, values, own in self._replicas:
            with self._made.members.on(rank):
                own.copy_(values)

    def flush(self) -> None:
        """Wait for the measured work of all steps, so that plans do not depend on blocks."""
        self._made.counts.learn(pending=0)

    def status(self) -> Status:
        """See `Step.status`. The model then has the parameters of views."""
        found = self._steps.status()
        for rank, values, own in self._replicas:
            if rank == 0:
                values.copy_(own)
        return replace(found, segments=(0,))

    def _replicated(self, rank: int, values: Tensor) -> Tensor:
        """Return a rank's own copy of a parameter or moment of the model."""
        seen = self._made.aggregate.member_views(values)[rank]
        with self._made.members.on(rank):
            self._replicas.append((rank, seen, torch.empty_like(seen)))
        return self._replicas[-1][2]

    def _distributed(self, rank: int, bands: Plan, whole: Mapping[int, Tensor]) -> list[Tensor]:
        """Copy a rank's parts of the photographs to places that graphs know, one for each view."""
        there: list[Tensor] = []
        for patch in bands.owned[rank]:
            x0, y0, x1, y1 = patch.rendered(self.batch[patch.view])
            part = whole[patch.view][y0:y1, x0:x1]
            start = patch.view * len(self._photographs[rank]) // self._settings.views
            there.append(self._photographs[rank][start : start + part.numel()].view(part.shape).copy_(part))
        return there
