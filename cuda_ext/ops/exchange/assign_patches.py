"""Assignment of patches to the ranks that render them: an exact start, then swaps of pairs (Gaian, section 4.2.2 and
appendix C.1)."""

from typing import NamedTuple

import torch
from torch import Tensor

from cuda_ext.dispatch.load import load_native
from cuda_ext.ops.common.checks import check_tensors
from cuda_ext.reference import assign_patches as reference

POWERS = (2, 4, 8, 16)
"""Of the norms: their roots are square roots of square roots."""


class AssignedPatches(NamedTuple):
    """Result of a search for an assignment.

    Attributes:
        ranks: [P] int64, which rank draws each patch.
        before, after: the objective, in points, of the start and of the end.
        swaps: how many were made.
        converged: whether no swap of two patches gains any more.
    """

    ranks: Tensor
    before: float
    after: float
    swaps: int
    converged: bool


def assign_patches(
    counts: Tensor,
    totals: Tensor | None = None,
    sent: Tensor | None = None,
    *,
    alpha: float = 1.0,
    beta: float = 1.0,
    gamma: float = 1.0,
    delta: float = 1.0,
    power: int = 4,
    most_swaps: int = 1000,
    seconds: float = 0.0,
) -> AssignedPatches:
    """Assign patches to ranks: equal numbers, most points local, balanced loads.

    Looks for the least of -alpha sum_j counts[j, W_j] + beta |send|_p + gamma |receive|_p + delta |draw|_p (equation 1
    with appendix C.1's norms), where rank k sends sent[k] + sum of counts[j, k] of patches that others draw, receives
    sum of totals[j] - counts[j, k] of those drawn here, and draws their sum of totals[j].

    The start is the exact linear sum assignment of the first term, in which ranks differ by one patch at most. Then, of
    the best pairs of patches of each two ranks, the best is swapped until none gains. The number of patches of a rank
    changes only where another has one fewer: a patch moves there.

    With `seconds` 0 the result is the same on every run and for any number of threads. With a budget it is too, if the
    search ends by itself within it (`converged`).

    Args:
        counts: [P, R] float64 on the CPU, points that patch j needs from rank k, not negative.
        totals: [P] float64, all points that a patch needs; counts' sums unless given. Among the ranks of one machine
            they include what comes from other machines.
        sent: [R] float64, points that a rank sends whatever is decided here; none unless given.
        alpha, beta, gamma, delta: weights, not negative.
        power: p of the norms, one of `POWERS`: the greater, the more the busiest rank counts.
        most_swaps: after which the search ends.
        seconds: after which it ends too; 0 for no clock. What was being looked for is finished.

    Raises:
        TypeError, ValueError: a type, shape, number or device is wrong.
        NativeBuildError: the operators cannot be compiled.
    """
    if counts.dim() != 2 or counts.shape[1] == 0:
        raise ValueError(f"counts must be [patches, ranks] with at least one rank, not {list(counts.shape)}.")
    patches, ranks = counts.shape
    totals = counts.sum(1) if totals is None else totals
    sent = counts.new_zeros(ranks) if sent is None else sent
    cpu = torch.device("cpu")
    check_tensors(torch.float64, cpu, counts=(counts, (-1, -1)), totals=(totals, (patches,)), sent=(sent, (ranks,)))
    for name, tensor in (("counts", counts), ("totals", totals), ("sent", sent)):
        if not bool(((tensor >= 0) & tensor.isfinite()).all()):
            raise ValueError(f"{name} must be numbers of points: finite and not negative.")
    weights = {"alpha": alpha, "beta": beta, "gamma": gamma, "delta": delta, "seconds": seconds}
    for name, value in weights.items():
        if not 0 <= value < float("inf"):
            raise ValueError(f"{name} must not be negative, got {value}.")
    if power not in POWERS:
        raise ValueError(f"power must be one of {', '.join(map(str, POWERS))}, not {power}.")
    if most_swaps < 0:
        raise ValueError(f"most_swaps must not be negative, got {most_swaps}.")
    op = torch.ops.ns_multigpu.assign_patches if load_native() else reference.assign_patches
    chosen, summary = op(counts, totals, sent, alpha, beta, gamma, delta, power, most_swaps, seconds)
    before, after, swaps, converged = summary.tolist()
    return AssignedPatches(chosen, before, after, int(swaps), bool(converged))
