"""Models with compact moments, and what a rounding may and may not do, for the tests on either device."""

import torch
from torch import Tensor

from cuda_ext.ops.optim.lazy_adam import LazyAdam
from cuda_ext.reference import lazy_adam as reference
from tests.cuda_ext.fused_steps import Model
from tests.cuda_ext.lazy_steps import step_scalars

BF16 = torch.bfloat16


def compact(model: Model, device: str = "cpu") -> Model:
    """Return a copy in float32 with moments that bfloat16 holds, and as it."""
    copy = model.to(device)
    copy.exp_avgs, copy.exp_avg_sqs = ([t.to(BF16) for t in ts] for ts in (copy.exp_avgs, copy.exp_avg_sqs))
    return copy


def spacing(values: Tensor) -> Tensor:
    """Return the distance between the two bfloat16 neighbours of each value."""
    _, exponents = torch.frexp(values.abs().double())
    return torch.ldexp(torch.ones_like(values, dtype=torch.float64), (exponents - 8).clamp(min=-133))


def errors(found: Tensor, exact: Tensor) -> Tensor:
    """By how much moments have been rounded, in spacings of bfloat16."""
    assert found.dtype == BF16
    exact = exact.double().cpu()
    return (found.double().cpu() - exact) / spacing(exact)


def a_block(points: int, steps: int, device: str = "cpu") -> LazyAdam:
    """Points whose steps have been deferred for various numbers of steps of a block."""
    lazy = LazyAdam.make(points, "cpu")
    for step in range(steps):
        reference.extend(lazy.table, lazy.steps, step_scalars(step + 40, torch.float32))
    g = torch.Generator().manual_seed(8)
    lazy.last.copy_(torch.randint(0, steps + 1, (points,), generator=g))
    return LazyAdam(*(t.to(device, copy=True) for t in (lazy.last, lazy.table, lazy.steps)))


def still_gradients_scalars(step: int) -> Tensor:
    """Scalars with which a step without a gradient rounds alike on every processor: 1 - beta1 is a half."""
    scalars = step_scalars(step, torch.float32)
    scalars[:, 1] = scalars[:, 6] = 0.5
    return scalars
