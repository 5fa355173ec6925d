"""Detection of NaN and infinity, with the affected views and parameters, without synchronizing steps with the device.

Every step leaves two small tensors on the device. One holds the loss of each view that this rank rendered. The other
holds a number per parameter that is finite if its gradient is (one read-only pass). They are read periodically, all at
once, and gathered over ranks. Parameters are checked then too: the operators skip a Gaussian with a NaN, so nothing
else would show it.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ns_multigpu.core.dist.collectives import all_gather_objects, max_in_place, sum_in_place
from ns_multigpu.core.dist.world import World
from ns_multigpu.plugin.faults.errors import InputError
from ns_multigpu.plugin.faults.signals import NonFiniteError

OnNonFinite = Literal["stop", "skip"]


@dataclass
class _Noted:
    """Unread records of steps on the device: numbers [steps, C] that are finite if all is well.

    Attributes:
        steps: their numbers.
        views: of each step, the views whose losses are the first columns.
        names: names of the parameters whose gradients the last columns describe.
    """

    steps: Sequence[int]
    views: Sequence[Sequence[int]]
    names: Sequence[str]
    numbers: Tensor


@dataclass(frozen=True)
class Finding:
    """Non-finite step, as one rank saw it.

    Attributes:
        rank, step: its rank and number.
        views: numbers of the views whose loss was not finite.
        others: the views this rank rendered in that step.
        gradients: names of the parameters whose gradient was not finite.
    """

    rank: int
    step: int
    views: tuple[int, ...]
    others: tuple[int, ...]
    gradients: tuple[str, ...]


class NumericGuard:
    """Monitor of losses, gradients and parameters of one rank, in step with the others.

    Args:
        world: the ranks.
        every: steps between two checks; 0 for none.
        on_nonfinite: "stop" raises. "skip" leaves parameters and optimizers unchanged in a step with such gradients,
            and raises only if every step since the last check was one.
        replicated: whether gradients are the same on every rank once exchanged.
        view_name: returns the name of a view.
        say: shows a warning.
    """

    def __init__(
        self,
        world: World,
        every: int,
        on_nonfinite: OnNonFinite = "stop",
        *,
        replicated: bool = True,
        view_name: Callable[[int], str] = "view {}".format,
        say: Callable[[str], None] = print,
    ) -> None:
        self._world, self._every, self._skip = world, every, on_nonfinite == "skip"
        self.replicated, self._view_name, self._say = replicated, view_name, say
        self._noted: list[_Noted] = []
        self.unsure = False
        """True if parameters may hold values of unrecorded steps: check them as soon as these are recorded."""

    @property
    def active(self) -> bool:
        """True if checks are enabled."""
        return self._every > 0

    @property
    def skips(self) -> bool:
        """True if steps with such gradients are skipped."""
        return self._skip and self.active

    def prepare(self, optimizers: Mapping[str, torch.optim.Optimizer]) -> None:
        """Prepare optimizers to skip a step by a flag on the device, before the first step that calls `watch`.

        On a GPU that requires Adam's fused kernel, which reads the flag in device memory.

        Raises:
            InputError: skipping was requested, and an optimizer on a GPU does not support it.
        """
        if not self.skips or self._world.device.type == "cpu":
            return
        for name, optimizer in optimizers.items():
            if not isinstance(optimizer, (torch.optim.Adam, torch.optim.AdamW)):
                raise InputError(
                    f"--on-nonfinite skip needs Adam or AdamW, and {name} has {type(optimizer).__name__}. "
                    "Use --on-nonfinite stop."
                )
            for group in optimizer.param_groups:
                group["foreach"], group["fused"] = False, True
                for param in group["params"]:
                    state = optimizer.state.get(param, {})
                    if "step" in state:
                        state["step"] = state["step"].to(param.device, torch.float32)

    @torch.no_grad()
    def watch(
        self,
        step: int,
        view_losses: Mapping[int, Tensor],
        params: Mapping[str, Tensor],
        optimizers: Mapping[str, torch.optim.Optimizer],
        probe: Tensor | None = None,
    ) -> bool:
        """Record, without synchronizing, whether a step's losses and gradients are finite.

        Called on every rank, after the exchange of gradients and before the optimizers.

        Args:
            step: the step.
            view_losses: view number -> its loss [], of the views that this rank rendered.
            params: the parameters by name, the same names on every rank.
            optimizers: set to skip the step if a gradient is not finite and `on_nonfinite` is "skip".
            probe: a tensor whose gradient densification reads too; its non-finite values become 0.

        Returns:
            whether to call the optimizers. (On a GPU always: they read the flag on the device.)
        """
        if not self.active:
            return True
        graded = {name: p.grad for name, p in params.items() if p.grad is not None and p.grad.numel()}
        numbers = self._together(finite_flags(list(graded.values())))
        views = list(view_losses)
        losses = self._together([view_losses[view].detach() for view in views])
        self._noted.append(_Noted([step], [views], list(graded), torch.cat([losses, numbers])[None]))
        if not self._skip or not graded:
            return True
        bad = (~numbers.isfinite().all()).to(torch.float32)
        if not self.replicated:
            max_in_place(bad, self._world)
        if probe is not None and probe.grad is not None:
            probe.grad.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
        if self._world.device.type == "cpu":
            return not bool(bad)
        for optimizer in optimizers.values():
            optimizer.grad_scale, optimizer.found_inf = None, bad  # type: ignore[attr-defined]
        return True

    def note(self, steps: Sequence[int], views: Sequence[Sequence[int]], names: Sequence[str], numbers: Tensor) -> None:
        """Record numbers as `watch` does, for steps whose updates the device has already applied.

        Args:
            steps: their numbers.
            views: of each step, those that this rank rendered.
            names: names that the last numbers describe.
            numbers: [steps, C] of each step, first the losses of its views and last one for each name, finite if its
                gradients are; numbers between are ignored.
        """
        if self.active:
            self._noted.append(_Noted(steps, views, names, numbers))

    def due(self, step: int, *, now: bool = False) -> bool:
        """Return whether `look` would read anything after `step`."""
        return self.active and bool(self._noted) and (now or self.unsure or step % self._every == 0)

    @torch.no_grad()
    def look(self, step: int, params: Mapping[str, Tensor], *, now: bool = False, pending: bool = False) -> None:
        """Read what `watch` and `note` have recorded, periodically or, with `now`, at once.

        Called on every rank at the same steps.

        Args:
            pending: whether later steps have been launched. They may have caused what only parameters show: then set
                `unsure` and keep the records.

        Raises:
            NonFiniteError: on every rank, the same, if the run cannot continue.
        """
        if not self.due(step, now=now):
            return
        noted, self._noted, self.unsure = self._noted, [], False
        held = {name: p.detach() for name, p in params.items() if p.dim() and p.numel() and p.is_floating_point()}
        numbers = self._together([*(one.numbers for one in noted), *finite_flags(list(held.values()))])
        # Where all is well this is 0, on all ranks, and all that is waited for; NaN and infinity make it NaN.
        sign = (0 * numbers).sum(dtype=torch.float32)
        sum_in_place(sign, self._world)
        if sign.item() == 0:
            return
        fine = iter(numbers.isfinite().tolist())
        findings = self._findings(noted, fine)
        points = {name: _bad_rows(p) for (name, p), well in zip(held.items(), fine, strict=True) if not well}
        every: list[Finding] = sorted(
            (f for part in all_gather_objects(findings, self._world) for f in part), key=lambda f: (f.step, f.rank)
        )
        bad: dict[str, int] = {}
        for part in all_gather_objects(points, self._world):
            bad.update(part)
        if not every and not bad:
            return  # only ignored numbers are not finite
        if pending and not every:
            self._noted, self.unsure = noted, True
            return
        first, last, count = noted[0].steps[0], noted[-1].steps[-1], sum(len(one.steps) for one in noted)
        lines = self._account(every, bad)
        account = f"Steps {first} to {last} were looked at:\n  " + "\n  ".join(lines)
        skipped = sorted({f.step for f in every if f.gradients})
        if self._skip and not bad and (len(skipped) < count or count < 3):
            self._say(f"NaN or infinity, {len(skipped)} step(s) left out. {account}")
            return
        raise NonFiniteError(
            f"NaN or infinity in training. {account}\n"
            "No checkpoint holds these numbers: continue from the last one. Look at the named views (image, mask, "
            "pose); lower the learning rates of the named parameters; or leave such steps out with --on-nonfinite skip."
        )

    def _findings(self, noted: Sequence[_Noted], fine: Iterator[bool]) -> list[Finding]:
        """Return the non-finite steps; `fine` iterates over the finiteness of all their numbers."""
        findings: list[Finding] = []
        for one in noted:
            for step, views in zip(one.steps, one.views, strict=True):
                row = list(itertools.islice(fine, one.numbers.shape[1]))
                bad = tuple(view for view, well in zip(views, row, strict=False) if not well)
                last = row[len(row) - len(one.names) :]
                gradients = tuple(name for name, well in zip(one.names, last, strict=True) if not well)
                if gradients or bad:
                    findings.append(Finding(self._world.rank, step, bad, tuple(views), gradients))
        return findings

    def _together(self, numbers: Sequence[Tensor]) -> Tensor:
        """Return all numbers of the tensors, concatenated: [C]."""
        joined = [number.reshape(-1) for number in numbers]
        return torch.cat(joined) if joined else torch.zeros(0, device=self._world.device)

    def _account(self, findings: Sequence[Finding], held: Mapping[str, int]) -> list[str]:
        lines: list[str] = []
        for step in sorted({f.step for f in findings})[:5]:
            here = [f for f in findings if f.step == step]
            views = sorted({v for f in here for v in f.views})
            parts = [f"loss of {', '.join(self._view_name(v) for v in views)}"] if views else []
            gradients = sorted({name for f in here for name in f.gradients})
            if gradients:
                parts.append(f"gradient of {', '.join(gradients)}")
            line = f"step {step}: {'; '.join(parts)}"
            if not views:
                others = sorted({v for f in here for v in f.others})
                line += f" (views of the step: {', '.join(self._view_name(v) for v in others)})"
            lines.append(line)
        more = len({f.step for f in findings}) - 5
        if more > 0:
            lines.append(f"and {more} more step(s)")
        lines += [f"parameter {name}: {count} row(s) hold NaN or infinity" for name, count in sorted(held.items())]
        return lines


def _bad_rows(x: Tensor) -> int:
    """Return the number of rows that hold NaN or infinity."""
    return int((~x.isfinite()).reshape(len(x), -1).any(-1).sum())


def finite_flags(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return one number [] for each non-empty tensor that is finite if and only if all of its elements are.

    On a GPU it is the largest magnitude, of all tensors in one pass. On a CPU, where torch adds tens of times faster
    than it compares, it is the sum. A sum that is not finite may have overflowed: then it is the largest magnitude.
    """
    if not tensors:
        return []
    if tensors[0].device.type != "cpu":
        return list(torch._foreach_norm(list(tensors), float("inf")))  # pyright: ignore
    sums = [x.sum() for x in tensors]
    return [
        s if bool(s.isfinite()) else torch.linalg.vector_norm(x, float("inf"))
        for s, x in zip(sums, tensors, strict=True)
    ]
