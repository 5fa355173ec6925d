"""Runs of Adam over parameters of odd sizes, by different implementations."""

from typing import Any, Literal

import torch
from torch import Tensor

from cuda_ext.ops.optim.adam import AdamStep, FusedAdam, adam_step, fused_step

SHAPES = [(1,), (3,), (1001, 3), (257, 4), (5000,), (130, 15, 3), (4096,), (0, 3)]
"""Tails of every length; more and less than a block's stretch."""

Kind = Literal["torch", "alone", "together", "counted"]


def make_params(device: str, dtype: torch.dtype = torch.float32) -> list[torch.nn.Parameter]:
    g = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(s, generator=g, dtype=torch.float64).to(device, dtype)) for s in SHAPES]


def run_steps(kind: Kind, device: str, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Values and moments after five steps with changing rates, an optimizer for each parameter."""
    params = make_params(device, dtype)
    make: Any = torch.optim.Adam if kind == "torch" else FusedAdam
    options = [{"lr": 0.1 / (i + 1), "betas": (0.9 - 0.1 * i, 0.999 - 0.01 * i), "eps": 1e-15} for i in range(8)]
    optimizers = [make([p], **o) for p, o in zip(params, options, strict=True)]
    g = torch.Generator().manual_seed(1)
    for p in params:
        p.grad = torch.zeros_like(p)
    counted = AdamStep(optimizers) if kind == "counted" else None
    for step in range(5):
        for p in params:
            gradient = torch.randn(p.shape, generator=g, dtype=torch.float64) * 10.0 ** (step - 3)
            gradient[gradient.abs() < 0.3 * 10.0 ** (step - 3)] = 0.0
            p.grad.copy_(gradient)  # type: ignore[union-attr]
        if counted is not None:
            grads = [p.grad for p in params if p.grad is not None]
            scalars = torch.tensor(counted.count(), dtype=dtype, device=device)
            adam_step(params, grads, counted.exp_avgs, counted.exp_avg_sqs, scalars)
        elif kind == "together":
            fused_step(optimizers)
        else:
            for optimizer in optimizers:
                optimizer.step()
        for optimizer in optimizers:
            optimizer.param_groups[0]["lr"] *= 0.8
    found = [p.detach() for p in params if p.numel()]
    for key in ("exp_avg", "exp_avg_sq"):
        found += [o.state[p][key] for o, p in zip(optimizers, params, strict=True) if p.numel()]
    assert all(o.state[p]["step"] == 5 for o, p in zip(optimizers, params, strict=True) if p.numel())
    return found


def assert_same(found: list[Tensor], expected: list[Tensor], rtol: float) -> None:
    """Equal within `rtol`; the values themselves within it of what they moved by, which is about one."""
    assert len(found) == len(expected)
    for i, (a, b) in enumerate(zip(found, expected, strict=True)):
        torch.testing.assert_close(
            a.cpu(), b.cpu(), rtol=rtol, atol=rtol * float(b.abs().max()), msg=lambda m, i=i: f"{i}: {m}"
        )
