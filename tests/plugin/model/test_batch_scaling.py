"""Grendel's rule: valid for every batch, and schedules that follow images and fall towards the end of a run."""

import math
from typing import Any

import pytest
import torch
from nerfstudio.engine.optimizers import AdamOptimizerConfig
from nerfstudio.engine.schedulers import (
    CosineDecaySchedulerConfig,
    ExponentialDecaySchedulerConfig,
    MultiStepSchedulerConfig,
)

from ns_multigpu.plugin.faults.errors import InputError
from ns_multigpu.plugin.model.batch_scaling import (
    RateSchedule,
    ScalingRule,
    next_rates,
    scale_optimizer,
    scaled_scheduler,
    scaling_rule,
)


def _optimizer(lr: float = 0.01) -> torch.optim.Optimizer:
    return AdamOptimizerConfig(lr=lr, eps=1e-15).setup(params=[torch.nn.Parameter(torch.ones(3))])


@pytest.mark.parametrize("batch", [1, 2, 7, 64])
def test_adam(batch: int) -> None:
    optimizer = _optimizer()
    scale_optimizer(optimizer, RateSchedule("sqrt", batch, 1000))
    group = optimizer.param_groups[0]
    assert group["lr"] == pytest.approx(0.01 * math.sqrt(batch))
    assert group["betas"] == pytest.approx((0.9**batch, 0.999**batch))
    assert group["eps"] == pytest.approx(1e-15 / math.sqrt(batch))
    assert all(0 <= beta < 1 for beta in group["betas"])
    optimizer.param_groups[0]["params"][0].grad = torch.ones(3)
    optimizer.step()


def test_other_rules() -> None:
    linear, none = _optimizer(), _optimizer()
    scale_optimizer(linear, RateSchedule("linear", 4, 1000))
    scale_optimizer(none, RateSchedule("none", 4, 1000))
    assert linear.param_groups[0]["lr"] == pytest.approx(0.04)
    assert none.param_groups[0]["lr"] == 0.01 and none.param_groups[0]["betas"] == (0.9, 0.999)


SCHEDULES = [
    None,
    ExponentialDecaySchedulerConfig(lr_final=1e-4, max_steps=100),
    ExponentialDecaySchedulerConfig(lr_final=1e-4, max_steps=100, warmup_steps=20, lr_pre_warmup=0),
    CosineDecaySchedulerConfig(max_steps=100, warm_up_end=8),
    MultiStepSchedulerConfig(max_steps=100, milestones=(20, 40, 80)),
    MultiStepSchedulerConfig(max_steps=100, milestones=(21, 42, 83)),  # within a batch of four: behind it
]


def _rates(config: Any, schedule: RateSchedule) -> list[float]:
    """Of every step, and the one that would follow."""
    optimizer = _optimizer()
    scheduler = config and config.setup().get_scheduler(optimizer=optimizer, lr_init=0.01)
    scale_optimizer(optimizer, schedule)
    scheduler = scaled_scheduler(optimizer, scheduler, schedule)
    rates = [optimizer.param_groups[0]["lr"]]
    for _ in range(100 // schedule.batch):
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        rates.append(optimizer.param_groups[0]["lr"])
    if scheduler is not None:
        torch.save(scheduler.state_dict(), "/dev/null")  # a schedule that cannot be saved would lose a checkpoint
    return rates


@pytest.mark.parametrize("config", SCHEDULES)
def test_schedules_follow_images(config: Any) -> None:
    one, four = (_rates(config, RateSchedule("sqrt", batch, 100)) for batch in (1, 4))
    # The first step after a change may come from before or after it; compare where the schedule is settled.
    assert four[1:] == pytest.approx([2 * rate for rate in one[::4]][1:], rel=1e-6)


@pytest.mark.parametrize("config", SCHEDULES)
@pytest.mark.parametrize(
    ("rule", "batch", "at_end", "first", "last"),
    [("sqrt-to-none", 4, 1.0, 2.0, 1.0), ("sqrt-to-none", 4, 0.1, 2.0, 0.1), ("sqrt", 4, 0.1, 2.0, 0.2),
     ("none", 4, 0.1, 1.0, 0.1), ("sqrt-to-none", 1, 0.1, 1.0, 0.1)],
)  # fmt: skip
def test_rates_fall_over_the_run(
    config: Any, rule: ScalingRule, batch: int, at_end: float, first: float, last: float
) -> None:
    own = _rates(config, RateSchedule("sqrt", 1, 100))[::batch]
    found = _rates(config, RateSchedule(rule, batch, 100, at_end, fall_from=0.0))
    steps = len(found) - 1
    expected = [rate * first * (last / first) ** (step / steps) for step, rate in enumerate(own)]
    assert len(found) == len(own) and found[1:] == pytest.approx(expected[1:], rel=1e-6)


@pytest.mark.parametrize(("rule", "quarter", "end"), [("none", 1.0, 0.01), ("sqrt-to-none", 4**-0.125, 0.005)])
def test_rates_fall_behind_a_part_of_the_run(rule: ScalingRule, quarter: float, end: float) -> None:
    schedule = RateSchedule(rule, 4, 400, 0.01, fall_from=0.6)
    assert schedule.at(0) == 1 and schedule.at(25) == pytest.approx(quarter) and schedule.at(100) == pytest.approx(end)
    alone = schedule.at(80) / (4**-0.4 if rule == "sqrt-to-none" else 1)
    assert alone == pytest.approx(0.1), "half of the way"


def test_rates_fall_by_themselves_where_views_are_seen_often() -> None:
    assert scaling_rule("auto", 15000, 140) == "sqrt-to-none" and scaling_rule("auto", 1200, 63) == "sqrt"
    assert scaling_rule("auto", 5000, 50) == "sqrt-to-none" and scaling_rule("auto", 4999, 50) == "sqrt"
    assert scaling_rule("linear", 15000, 140) == "linear" and scaling_rule("sqrt-to-none", 8, 9) == "sqrt-to-none"


def test_learning_rates_are_reported() -> None:
    said = {rule: RateSchedule(rule, 16, 100).described() for rule in ("sqrt-to-none", "sqrt", "linear", "none")}
    begin = "Learning rates: x4 for 16 images per step"
    assert said["sqrt-to-none"] == f"{begin}, decaying to x1 by the end (--batch-scaling sqrt-to-none)."
    assert (
        said["sqrt"] == f"{begin} (--batch-scaling sqrt)." and "x16 for" in said["linear"] and "x1 for" in said["none"]
    )
    chosen = RateSchedule("sqrt", 16, 100, at_end=0.1, fall_from=0.85).described(views=40)
    assert chosen == (
        f"{begin} (--batch-scaling sqrt, chosen: each image is seen 2.5 times); all decay to x0.1 over the last 15 % "
        "(--rates-at-end)."
    )
    assert RateSchedule("sqrt", 1, 100).described(views=40) == "Learning rates: x1 for 1 image per step."


def test_one_view_a_step_is_not_scaled() -> None:
    optimizer = _optimizer()
    scheduler = SCHEDULES[1].setup().get_scheduler(optimizer=optimizer, lr_init=0.01)
    schedules = list(scheduler.lr_lambdas)
    for rule in ("sqrt-to-none", "sqrt", "linear", "none"):
        schedule = RateSchedule(rule, 1, 100)
        assert schedule.start == 1 and schedule.at(70) == 1
        assert scaled_scheduler(optimizer, scheduler, schedule) is scheduler and scheduler.lr_lambdas == schedules
        assert scaled_scheduler(optimizer, None, schedule) is None


def test_extended_run_keeps_its_last_rates() -> None:
    schedule = RateSchedule("sqrt-to-none", 4, 102)  # of 26 steps the last sees more than 102 images
    assert schedule.at(26) == schedule.at(1000) == 0.5


def test_unknown_scheduler() -> None:
    optimizer = _optimizer()
    cyclic = torch.optim.lr_scheduler.CyclicLR(optimizer, 0.1, 0.2, cycle_momentum=False)
    for schedule in (RateSchedule("sqrt", 2, 100), RateSchedule("sqrt", 1, 100, 0.5)):
        with pytest.raises(InputError, match="CyclicLR"):
            scaled_scheduler(optimizer, cyclic, schedule)


@pytest.mark.parametrize("config", SCHEDULES)
@pytest.mark.parametrize("at_end", [1.0, 0.1])
def test_rates_equal_those_of_torch(config: Any, at_end: float) -> None:
    """Bit for bit, with what a checkpoint holds of them."""
    schedulers: list[Any] = []
    for _ in range(2):
        optimizer = _optimizer()
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))], "lr": 0.7})
        scheduler = config and config.setup().get_scheduler(optimizer=optimizer, lr_init=0.01)
        schedulers.append(scaled_scheduler(optimizer, scheduler, RateSchedule("sqrt-to-none", 4, 400, at_end)))
    ours, torchs = schedulers
    for _ in range(100):
        for one, step in ((ours, next_rates), (torchs, type(torchs).step)):
            one.optimizer._opt_called = True
            step(one)
        rates = [[group["lr"] for group in one.optimizer.param_groups] for one in schedulers]
        assert rates[0] == rates[1] == ours.get_last_lr() == torchs.get_last_lr()
    known = [{k: v for k, v in one.state_dict().items() if k != "lr_lambdas"} for one in schedulers]
    assert known[0] == known[1] and known[0]["last_epoch"] == 100
