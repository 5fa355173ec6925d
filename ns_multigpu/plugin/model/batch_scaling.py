"""Optimizers and schedules for a batch of B views that reproduce the trajectory of single views, and their rates'
decay.

Grendel (Zhao et al. 2024, section 4.2) treats the gradients of views as nearly independent. Then B steps of Adam equal
one step on their mean with learning rate * sqrt(B) and momenta beta^B; eps shrinks by sqrt(B) with the mean's root mean
square. Schedules count images instead of steps.

Near convergence, steps are small compared with the noise of views, and the mean of B views is less noisy. Rates that
decay from Grendel's to one view's over the run keep that gain ("sqrt-to-none"). A run too short to converge needs its
rates to the end.
"""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.optim.lr_scheduler import LambdaLR, MultiStepLR

from ns_multigpu.plugin.faults.errors import InputError

ScalingRule = Literal["sqrt-to-none", "sqrt", "linear", "none"]
ScalingChoice = Literal["auto", "sqrt-to-none", "sqrt", "linear", "none"]

BY_ROOT: tuple[ScalingRule, ...] = ("sqrt-to-none", "sqrt")
"""The rules that take the gradients of views as independent."""

OFTEN = 100
"""Number of times that a run must see each view for rates to decay by default. Measured with four views a step: at 19
times decay costs 1.3 dB, at 50 0.3, at 100 nothing; on a larger city at 107 it gains 0.5, on the fox at 349 it changes
nothing (benchmarks/results/city-h200.md)."""


def scaling_rule(choice: ScalingChoice, images: int, views: int) -> ScalingRule:
    """Return the rule for a run of `images` images of a capture of `views` training views."""
    if choice != "auto":
        return choice
    return "sqrt-to-none" if images >= OFTEN * views else "sqrt"


@dataclass(frozen=True)
class RateSchedule:
    """Factor on learning rates, besides their own schedules, over a run.

    Attributes:
        rule: dependence on the batch size.
        batch: views per step.
        images: images that the whole run will see.
        at_end: the factor at the end of a run of one view per step, which begins with 1.
        fall_from: fraction of the run, 0 <= fall_from < 1, after which the factor decays to `at_end`; a decay of `rule`
            begins at the start.
    """

    rule: ScalingRule
    batch: int
    images: int
    at_end: float = 1.0
    fall_from: float = 0.5

    @property
    def start(self) -> float:
        """Factor of the first step."""
        powers = {"sqrt-to-none": 0.5, "sqrt": 0.5, "linear": 1.0, "none": 0.0}
        return float(self.batch ** powers[self.rule])

    @property
    def varies(self) -> bool:
        """True if the factor changes during the run."""
        return self.at_end != 1.0 or (self.rule == "sqrt-to-none" and self.batch > 1)

    def described(self, views: int | None = None) -> str:
        """Return the rates' dependence on the batch and their decay in words, for the user.

        Args:
            views: training views of the capture, if the rule was chosen by them; else None.
        """
        images = "1 image" if self.batch == 1 else f"{self.batch} images"
        text = f"Learning rates: x{self.start:.3g} for {images} per step"
        if self.batch > 1:
            text += ", decaying to x1 by the end" if self.rule == "sqrt-to-none" else ""
            chosen = ""
            if views is not None:
                times = self.images / views
                chosen = f", chosen: each image is seen {times:{',.0f' if times >= 10 else '.2g'}} times"
            text += f" (--batch-scaling {self.rule}{chosen})"
        if self.at_end != 1:
            text += f"; all decay to x{self.at_end:g} over the last {100 * (1 - self.fall_from):.0f} % (--rates-at-end)"
        return f"{text}."

    def at(self, step: int) -> float:
        """Return the factor after so many steps, relative to the first; a decay is exponential in images seen."""
        if self.at_end == 1.0:
            return self._of_rule(step)
        fallen = max(self._seen(step) - self.fall_from, 0.0) / (1.0 - self.fall_from)
        return self._of_rule(step) * self.at_end**fallen

    def of_batch(self, step: int) -> float:
        """Return the part of the factor after so many steps that is due to the batch size."""
        return self.start * self._of_rule(step)

    def _of_rule(self, step: int) -> float:
        return self.batch ** (-0.5 * self._seen(step)) if self.rule == "sqrt-to-none" else 1.0

    def _seen(self, step: int) -> float:
        return min(step * self.batch / self.images, 1.0)


def scale_optimizer(optimizer: torch.optim.Optimizer, rate_schedule: RateSchedule) -> None:
    """Scale an Adam in place so that one step on a batch's mean gradient equals `batch` steps.

    Raises:
        InputError: it is not of Adam's kind: the rule is about a step that does not grow with the gradient.
    """
    rule, batch = rate_schedule.rule, rate_schedule.batch
    if batch == 1 or rule == "none":
        return
    if any("betas" not in group or "eps" not in group for group in optimizer.param_groups):
        raise InputError(
            f"the optimizer {type(optimizer).__name__} cannot follow a batch of {batch} views by the rule {rule!r}; "
            "use Adam or RAdam, or --batch-scaling none"
        )
    for group in optimizer.param_groups:
        group["lr"] *= rate_schedule.start
        if "initial_lr" in group:
            group["initial_lr"] *= rate_schedule.start
        group["betas"] = tuple(beta**batch for beta in group["betas"])
        group["eps"] /= batch**0.5


def scaled_scheduler(
    optimizer: torch.optim.Optimizer, scheduler: Any | None, rate_schedule: RateSchedule
) -> Any | None:
    """Return the scheduler of an already scaled optimizer, stepped once a batch: it follows the images seen.

    Args:
        optimizer: the optimizer whose rates it sets.
        scheduler: the optimizer's own, made for one view per step, which is changed; None if it has none.
        rate_schedule: the run's rate schedule.

    Returns:
        `scheduler` or its replacement; None if rates are constant.

    Raises:
        InputError: a class of scheduler that nerfstudio's configs do not make.
    """
    if scheduler is None:
        return LambdaLR(optimizer, _followed(lambda _: 1.0, rate_schedule)) if rate_schedule.varies else None
    if rate_schedule.batch == 1 and not rate_schedule.varies:
        return scheduler
    scheduler.base_lrs = [rate * rate_schedule.start for rate in scheduler.base_lrs]
    if isinstance(scheduler, LambdaLR):
        scheduler.lr_lambdas = [_followed(f, rate_schedule) for f in scheduler.lr_lambdas]
    elif isinstance(scheduler, MultiStepLR):
        milestones = sorted(-(-image // rate_schedule.batch) for image in scheduler.milestones.elements())
        if rate_schedule.varies:  # MultiStepLR multiplies the rate that it finds, and must find its own
            return LambdaLR(optimizer, _stairs(milestones, scheduler.gamma, rate_schedule))
        scheduler.milestones = type(scheduler.milestones)(milestones)
    else:
        raise InputError(
            f"the scheduler {type(scheduler).__name__} cannot count images; "
            "use nerfstudio's exponential, cosine or multi-step schedulers, or one view a step and no --rates-at-end"
        )
    return scheduler


def next_rates(scheduler: Any) -> None:
    """Step a scheduler as `scheduler.step()` does, but faster: torch's is the slowest host work of a small step with
    six."""
    if type(scheduler) is not LambdaLR or scheduler._step_count < 2:  # torch's first steps make checks
        scheduler.step()
        return
    scheduler._step_count += 1
    scheduler.last_epoch += 1
    step, groups = scheduler.last_epoch, scheduler.optimizer.param_groups
    rates = [base * at(step) for base, at in zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)]
    for group, rate in zip(groups, rates, strict=True):
        group["lr"] = rate
    scheduler._last_lr = rates


# Plain functions: LambdaLR would save any other callable's fields.


def _followed(schedule: Callable[[int], float], rate_schedule: RateSchedule) -> Callable[[int], float]:
    """Return a function of steps from a schedule over images."""

    def at(step: int) -> float:
        return schedule(step * rate_schedule.batch) * rate_schedule.at(step)

    return at


def _stairs(milestones: Sequence[int], gamma: float, rate_schedule: RateSchedule) -> Callable[[int], float]:
    """Return a schedule that multiplies by gamma at each of these steps."""

    def at(step: int) -> float:
        return gamma ** bisect_right(milestones, step) * rate_schedule.at(step)

    return at
