"""`assign_patches` by scipy's linear sum assignment and a plain search. See `cuda_ext.ops.exchange.assign_patches`.

Every swap is chosen among all pairs of patches: what the native operator looks for, without what it remembers.
"""

import time

import torch
from torch import Tensor


def least_transport(counts: Tensor) -> list[int]:
    """Return the ranks [P] of the greatest sum of counts [P, R] where ranks differ by one patch at most."""
    import numpy as np
    from scipy.optimize import linear_sum_assignment

    patches, ranks = counts.shape
    least, spare = divmod(patches, ranks)
    # A rank comes as so many columns as it may have patches; those that it must have are worth more than any sum.
    must = float(counts.sum()) + 1.0
    worth = counts.numpy()
    columns = [worth + must] * least + ([worth] if spare else [])
    if not columns:
        return []
    rows, chosen = linear_sum_assignment(np.concatenate(columns, axis=1), maximize=True)
    found = [0] * patches
    for row, column in zip(rows.tolist(), chosen.tolist(), strict=True):
        found[row] = column % ranks
    return found


def objective(
    counts: Tensor, totals: Tensor, sent: Tensor, ranks: Tensor, weights: tuple[float, ...], power: int
) -> float:
    """Return the objective of an assignment [P] of patches to ranks, in points."""
    alpha, beta, gamma, delta = weights
    here = torch.zeros_like(counts).scatter_(1, ranks[:, None], 1.0)
    send = sent + ((1 - here) * counts).sum(0)
    receive = (here * (totals[:, None] - counts)).sum(0)
    draw = (here * totals[:, None]).sum(0)
    norms = [float((load**power).sum() ** (1 / power)) for load in (send, receive, draw)]
    return beta * norms[0] + gamma * norms[1] + delta * norms[2] - alpha * float((here * counts).sum())


def assign_patches(
    counts: Tensor, totals: Tensor, sent: Tensor, alpha: float, beta: float, gamma: float, delta: float, power: int,
    most_swaps: int, seconds: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """See `cuda_ext.ops.exchange.assign_patches.assign_patches`."""
    began, weights = time.monotonic(), (alpha, beta, gamma, delta)
    ranks = torch.tensor(least_transport(counts), dtype=torch.int64)

    def value(chosen: Tensor) -> float:
        return objective(counts, totals, sent, chosen, weights, power)

    now = before = value(ranks)
    swaps, converged = 0, False
    while not converged:
        margin = 1e-9 * abs(now)
        least, best = now, None
        for tried in _neighbours(ranks, counts.shape[1]):
            then = value(tried)
            if then < least - margin:
                least, best = then, tried
        converged = best is None
        if best is None or swaps == most_swaps or (seconds > 0 and time.monotonic() - began > seconds):
            break
        ranks, now, swaps = best, least, swaps + 1
    summary = torch.tensor([before, now, float(swaps), float(converged)], dtype=torch.float64)
    return ranks, summary


def _neighbours(ranks: Tensor, count: int) -> list[Tensor]:
    """Return all assignments that a swap leads to, or a move from a rank to one with a patch fewer than the most."""
    found = []
    held = torch.bincount(ranks, minlength=count)
    for i in range(len(ranks)):
        for j in range(i + 1, len(ranks)):
            if ranks[i] != ranks[j]:
                swapped = ranks.clone()
                swapped[i], swapped[j] = ranks[j], ranks[i]
                found.append(swapped)
        for rank in range(count):
            if held[rank] + 1 == held.max() and held[ranks[i]] == held.max():
                moved = ranks.clone()
                moved[i] = rank
                found.append(moved)
    return found
