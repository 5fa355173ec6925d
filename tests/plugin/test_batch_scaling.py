"""Grendel's rule: valid for every batch, and schedules that follow images."""

import math

import pytest
import torch
from nerfstudio.engine.optimizers import AdamOptimizerConfig
from nerfstudio.engine.schedulers import (
    CosineDecaySchedulerConfig,
    ExponentialDecaySchedulerConfig,
    MultiStepSchedulerConfig,
)

from ns_multigpu.plugin.batch_scaling import scale_optimizer, scale_scheduler
from ns_multigpu.plugin.errors import InputError


def _optimizer(lr: float = 0.01) -> torch.optim.Optimizer:
    return AdamOptimizerConfig(lr=lr, eps=1e-15).setup(params=[torch.nn.Parameter(torch.ones(3))])


@pytest.mark.parametrize("batch", [1, 2, 7, 64])
def test_adam(batch: int) -> None:
    optimizer = _optimizer()
    scale_optimizer(optimizer, "sqrt", batch)
    group = optimizer.param_groups[0]
    assert group["lr"] == pytest.approx(0.01 * math.sqrt(batch))
    assert group["betas"] == pytest.approx((0.9**batch, 0.999**batch))
    assert group["eps"] == pytest.approx(1e-15 / math.sqrt(batch))
    assert all(0 <= beta < 1 for beta in group["betas"])
    optimizer.param_groups[0]["params"][0].grad = torch.ones(3)
    optimizer.step()


def test_other_rules() -> None:
    linear, none = _optimizer(), _optimizer()
    scale_optimizer(linear, "linear", 4)
    scale_optimizer(none, "none", 4)
    assert linear.param_groups[0]["lr"] == pytest.approx(0.04)
    assert none.param_groups[0]["lr"] == 0.01 and none.param_groups[0]["betas"] == (0.9, 0.999)


@pytest.mark.parametrize(
    "config",
    [
        ExponentialDecaySchedulerConfig(lr_final=1e-4, max_steps=100),
        ExponentialDecaySchedulerConfig(lr_final=1e-4, max_steps=100, warmup_steps=20, lr_pre_warmup=0),
        CosineDecaySchedulerConfig(max_steps=100, warm_up_end=8),
        MultiStepSchedulerConfig(max_steps=100, milestones=(20, 40, 80)),
    ],
)
def test_schedules_follow_images(config) -> None:
    def course(batch: int) -> list[float]:
        optimizer = _optimizer()
        scheduler = config.setup().get_scheduler(optimizer=optimizer, lr_init=0.01)
        scale_optimizer(optimizer, "sqrt", batch)
        scale_scheduler(scheduler, "sqrt", batch)
        rates = []
        for _ in range(100 // batch):
            rates.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            scheduler.step()
        torch.save(scheduler.state_dict(), "/dev/null")  # a schedule that cannot be saved would lose a checkpoint
        return rates

    one, four = course(1), course(4)
    # The first step after a change may come from before or after it; compare where the schedule is settled.
    assert four[1:] == pytest.approx([2 * rate for rate in one[::4]][1:], rel=1e-6)


def test_unknown_scheduler() -> None:
    optimizer = _optimizer()
    with pytest.raises(InputError, match="CyclicLR"):
        scale_scheduler(torch.optim.lr_scheduler.CyclicLR(optimizer, 0.1, 0.2, cycle_momentum=False), "sqrt", 2)
