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
"""Begins a rank's parts, perhaps as CUDA graphs: given the rank and what begins them as they are."""


class MemberSteps:
    """Steps of all ranks of one process, with the inputs and results of one `Step`.

    Args:
        steps: of each rank of `members`, for its shard of the points, with equal settings.
        members: the ranks. Their transport is `PeerRows`, or `OwnRows` for one.

    Attributes:
        inputs, viewmats, Ks, backgrounds, times, scalars: of the first rank; `take` copies them to the others.
        measured_work: see `Step`; the same on all ranks.
    """

    def __init__(self, steps: Sequence[Step], members: Members) -> None:
        self.steps, self._members, first = tuple(steps), members, steps[0]
        self.inputs, self.viewmats, self.Ks = first.inputs, first.viewmats, first.Ks
        self.backgrounds, self.times, self.scalars = first.backgrounds, first.times, first.scalars
        self.measured_work = first.measured_work

    @property
    def rgb(self) -> list[list[Tensor]]:
        """Each rank's renderings of the last step."""
        return [step.rgb for step in self.steps]

    @property
    def report(self) -> Tensor:
        """The sum of the ranks' reports [B + 1] on the first rank's device: losses of the views, and the finite flag,
        NaN or infinity if any rank's is."""
        reports = [step.report.to(self.inputs.device, non_blocking=True) for step in self.steps]
        return torch.stack(reports).sum(0)

    def take(
        self, plan: Plan, targets: Sequence[Sequence[Tensor]], sizes: Sizes | None = None,
        launch: Launch = lambda _, begin: begin(),
    ) -> None:  # fmt: skip
        """Take a step.

        Args:
            plan, sizes: see `Step.parts`. targets: by rank, as there.
            launch: runs the parts of a rank.
        """
        begun = []
        for rank, (step, own) in enumerate(zip(self.steps, targets, strict=True)):
            if rank:
                step.inputs.copy_(self.inputs, non_blocking=True)
            with self._members.on(rank):
                begun.append(launch(rank, partial(step.parts, plan, own, sizes)))
        for step, rgb in zip(self.steps, launched_together(begun, self._members), strict=True):
            step.rgb = rgb

    def refresh(self) -> None:
        """See `Step.refresh`."""
        for rank, step in enumerate(self.steps):
            with self._members.on(rank):
                step.refresh()

    def flush(self) -> None:
        """See `Step.flush`. The first rank's stream then waits for the others."""
        for rank, step in enumerate(self.steps):
            with self._members.on(rank):
                step.flush()
        self._members.meet()

    def status(self) -> Status:
        """See `Step.status`: the most of any rank, and the sum of the rows sent."""
        found = [step.status() for step in self.steps]
        assert len({(one.done, one.full) for one in found}) == 1, "ranks decide alike"
        segments = [max(to_one) for to_one in zip(*(one.segments for one in found), strict=True)]
        return replace(
            found[0], rows=max(one.rows for one in found), segments=tuple(segments),
            intersections=max(one.intersections for one in found), sent=sum(one.sent for one in found),
        )  # fmt: skip
