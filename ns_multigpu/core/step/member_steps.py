"""Fused steps of one process on several GPUs: a `Step` of each, run in lockstep by one host thread."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ns_multigpu.core.assign.plan import Plan
from ns_multigpu.core.dist.members import Members
from ns_multigpu.core.exchange.transport import Parts, launched_together
from ns_multigpu.core.step.step import Step
from ns_multigpu.core.step.step_settings import Status
from ns_multigpu.core.types import Sizes

Launch = Callable[[int, Callable[[], Parts[Any]]], Parts[Any]]
"""Function of a rank and of what begins its parts; returns the parts to run, such as replays of CUDA graphs."""


class MemberSteps:
    """Steps of all ranks of one process, with the inputs and results of one `Step`.

    Args:
        steps: of each rank of `members`, for its shard of the points, with equal settings.
        members: the ranks. Their transport is `PeerRows`, or `OwnRows` for one.

    Attributes:
        inputs, viewmats, Ks, backgrounds, times, scalars: of the first rank; `take` copies them to the others.
        report: the sum of the ranks' reports [B + 1], on the first rank's device.
        measured_work: see `Step`; the same on all ranks.
    """

    def __init__(self, steps: Sequence[Step], members: Members) -> None:
        self.steps, self._members, first = tuple(steps), members, steps[0]
        self.inputs, self.viewmats, self.Ks = first.inputs, first.viewmats, first.Ks
        self.backgrounds, self.times, self.scalars = first.backgrounds, first.times, first.scalars
        self.measured_work, self.report = first.measured_work, torch.zeros_like(first.report)

    @property
    def rgb(self) -> list[list[Tensor]]:
        """Each rank's renderings of the last step."""
        return [step.rgb for step in self.steps]

    def take(
        self, plan: Plan, targets: Sequence[Sequence[Tensor]], sizes: Sizes | None = None,
        launch: Launch = lambda _, begin: begin(),
    ) -> None:  # fmt: skip
        """Run a step.

        Args:
            plan, sizes: see `Step.parts`. targets: by rank, as there.
            launch: see `Launch`; without it the parts run as they are.
        """
        begun = []
        for rank, (step, own) in enumerate(zip(self.steps, targets, strict=True)):
            if rank:
                step.inputs.copy_(self.inputs, non_blocking=True)
            with self._members.on(rank):
                begun.append(launch(rank, partial(step.parts, plan, own, sizes)))
        for step, rgb in zip(self.steps, launched_together(begun, self._members), strict=True):
            step.rgb = rgb
        self.report.copy_(self._sum([step.report for step in self.steps]))

    def mse(self, plan: Plan, targets: Sequence[Sequence[Tensor]], sizes: Sizes | None = None) -> Tensor:
        """Return the last step's mean squared error [], on the first rank's device. Arguments as `take`'s."""
        found: list[Tensor] = []
        for rank, (step, own) in enumerate(zip(self.steps, targets, strict=True)):
            with self._members.on(rank):
                found.append(step.mse(plan, own, sizes))
        return self._sum(found)

    def refresh(self) -> None:
        """See `Step.refresh`."""
        self._on_each(Step.refresh)

    def flush(self) -> None:
        """See `Step.flush`."""
        self._on_each(Step.flush)

    @property
    def taken(self) -> Tensor:
        """[] bool on the first rank's device: whether the last step was taken."""
        return self.steps[0].taken

    def status(self) -> Status:
        """See `Step.status`; the most rows that any rank had for each, and the sum of those sent."""
        found = [step.status() for step in self.steps]
        assert len({(one.done, one.rows, one.intersections, one.full) for one in found}) == 1, "ranks decide alike"
        segments = [max(to_one) for to_one in zip(*(one.segments for one in found), strict=True)]
        return replace(found[0], segments=tuple(segments), sent=sum(one.sent for one in found))

    def _on_each(self, work: Callable[[Step], None]) -> None:
        """Call `work` with each rank's step, on that rank's device. Synchronizes with the first rank before and
        after."""
        self._members.meet()
        for rank, step in enumerate(self.steps):
            with self._members.on(rank):
                work(step)
        self._members.meet()

    def _sum(self, of_ranks: Sequence[Tensor]) -> Tensor:
        return torch.stack([one.to(self.inputs.device, non_blocking=True) for one in of_ranks]).sum(0)
