"""Optimizers and schedules for a batch of B views that follow one view's course.

Grendel (Zhao et al. 2024, section 4.2) takes the gradients of views as nearly independent. Then B steps of Adam are one
step on their mean with learning rate * sqrt(B) and momenta beta^B; eps shrinks by sqrt(B) with the mean's root mean
square. Schedules count images instead of steps.
"""

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch.optim.lr_scheduler import LambdaLR, MultiStepLR

from ns_multigpu.plugin.errors import InputError

ScalingRule = Literal["sqrt", "linear", "none"]


def learning_rate_factor(rule: ScalingRule, batch: int) -> float:
    """What a learning rate is multiplied by for a batch of `batch` views."""
    return {"sqrt": batch**0.5, "linear": float(batch), "none": 1.0}[rule]


def scale_optimizer(optimizer: torch.optim.Optimizer, rule: ScalingRule, batch: int) -> None:
    """Makes one step of an Adam on a batch's mean gradient go as far as `batch` steps. Changes it in place.

    Raises:
        InputError: it is not of Adam's kind: the rule is about a step that does not grow with the gradient.
    """
    if batch == 1 or rule == "none":
        return
    factor = learning_rate_factor(rule, batch)
    if any("betas" not in group or "eps" not in group for group in optimizer.param_groups):
        raise InputError(
            f"the optimizer {type(optimizer).__name__} cannot follow a batch of {batch} views by the rule {rule!r}; "
            "use Adam or RAdam, or --batch-scaling none"
        )
    for group in optimizer.param_groups:
        group["lr"] *= factor
        if "initial_lr" in group:
            group["initial_lr"] *= factor
        group["betas"] = tuple(beta**batch for beta in group["betas"])
        group["eps"] /= batch**0.5


def scale_scheduler(scheduler: Any, rule: ScalingRule, batch: int) -> None:
    """Makes a scheduler that is stepped once a batch follow the images seen. Changes it in place.

    Raises:
        InputError: a kind of scheduler that nerfstudio's configs do not make.
    """
    if batch == 1:
        return
    factor = learning_rate_factor(rule, batch)
    scheduler.base_lrs = [rate * factor for rate in scheduler.base_lrs]
    if isinstance(scheduler, LambdaLR):
        scheduler.lr_lambdas = [_stretched(f, batch) for f in scheduler.lr_lambdas]
    elif isinstance(scheduler, MultiStepLR):
        scaled: dict[int, int] = {}
        for milestone, times in scheduler.milestones.items():
            scaled[-(-milestone // batch)] = scaled.get(-(-milestone // batch), 0) + times
        scheduler.milestones = type(scheduler.milestones)(scaled)
    else:
        raise InputError(
            f"the scheduler {type(scheduler).__name__} cannot count images; "
            "use nerfstudio's exponential, cosine or multi-step schedulers, or one view a step"
        )


def _stretched(schedule: Callable[[int], float], batch: int) -> Callable[[int], float]:
    """A schedule over images, asked about steps. A plain function: LambdaLR would save any other callable's fields."""

    def at(step: int) -> float:
        return schedule(step * batch)

    return at
