"""Putting off Adam's steps, in torch's operators, on any device: see `cuda_ext.ops.optim.lazy_adam`.

The formulas, and why they are dense Adam's, are in cuda_ext/csrc/common/lazy_adam.h.
"""

import torch
from torch import Tensor

from cuda_ext.reference.compact import as_floats, flush_salts

PARAMETERS = ("means", "quats", "log_scales", "logits", "sh_dc", "sh_rest")
"""The order of parameters, moments and scalars."""

MOST_STEPS = 64
"""Steps between two flushes, at most."""

_SHIFT, _EPS, _DECAY1, _DECAY2, _BOUND, _WEIGHTED = range(6)


def new_table(dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """Return [MOST_STEPS + 1, 6, 8], nothing missed."""
    line = torch.tensor([0, 1, 1, 1, 0, 0, 0, 0], dtype=dtype, device=device)
    return line.repeat(MOST_STEPS + 1, len(PARAMETERS), 1)


def stands_still(scalars: Tensor) -> bool:
    """Return whether a step with these scalars [6, 8] moves nothing: a rate of zero, and betas of one."""
    return not scalars[:, [0, 6, 7]].any()


def extend(table: Tensor, steps: Tensor, scalars: Tensor) -> None:
    """Add a step to the table, and count it."""
    rate, beta1, beta2, eps, correction1, correction2, rest1, rest2 = scalars.unbind(-1)
    lines = table[: int(steps) + 1]
    lines[..., _DECAY1] *= beta1
    lines[..., _DECAY2] *= beta2
    root = lines[..., _DECAY2].sqrt()
    weight = rate * correction1 / correction2 * lines[..., _DECAY1] / root
    lines[..., _SHIFT] += weight
    lines[..., _WEIGHTED] += weight * eps / (correction2 * root)
    shift = lines[..., _SHIFT]
    lines[..., _EPS] = torch.where(shift > 0, lines[..., _WEIGHTED] / shift, 1.0)
    ratio = beta1 * beta1 / beta2
    most = torch.where(ratio < 1, 1.001 * rest1 / (rest2 * (1 - ratio)).sqrt(), 1e30)
    lines[..., _BOUND] = shift * most
    steps += 1


def caught_up(
    params: list[Tensor], exp_avgs: list[Tensor], exp_avg_sqs: list[Tensor], last: Tensor, table: Tensor
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Return points [N] and their moments after the steps missed since `last`. Compact moments get the points' type."""
    lists: tuple[list[Tensor], list[Tensor], list[Tensor]] = ([], [], [])
    for i, (p, m, v) in enumerate(zip(params, exp_avgs, exp_avg_sqs, strict=True)):
        lines = table[last.long(), i].view(-1, *[1] * (p.dim() - 1), 8)
        m, v = m.to(p.dtype), v.to(p.dtype)
        moved = lines[..., _SHIFT] * m / (v.sqrt() + lines[..., _EPS])
        lists[0].append(torch.where(m == 0, p, p - moved))
        lists[1].append(m * lines[..., _DECAY1])
        lists[2].append(v * lines[..., _DECAY2])
    return lists


@torch.no_grad()
def splat_flush_composed(
    params: list[Tensor], exp_avgs: list[Tensor], exp_avg_sqs: list[Tensor], last: Tensor, table: Tensor, steps: Tensor
) -> None:
    """See `cuda_ext.ops.optim.lazy_adam.splat_flush`."""
    behind = (last < steps).nonzero().squeeze(-1)
    with as_floats(exp_avgs, exp_avg_sqs, lambda: flush_salts(table)) as (firsts, seconds):
        write_caught_up(params, firsts, seconds, behind, last, table)
    last.zero_()
    table.copy_(new_table(table.dtype, table.device))
    steps.zero_()


def write_caught_up(
    params: list[Tensor], exp_avgs: list[Tensor], exp_avg_sqs: list[Tensor], points: Tensor, last: Tensor,
    table: Tensor,
) -> None:  # fmt: skip
    """Take the steps that `points` (their numbers) have missed, in place; `last` stays."""
    lists = (params, exp_avgs, exp_avg_sqs)
    some = caught_up(*([t[points] for t in tensors] for tensors in lists), last[points], table)  # pyright: ignore
    for tensors, now in zip(lists, some, strict=True):
        for tensor, values in zip(tensors, now, strict=True):
            tensor[points] = values
