"""The reference of what moves points: draws, the formula of relocation, and rows copied on the spot."""

import functools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from cuda_ext.reference.noise import table_bits

MOST_COPIES = 51
"""A Gaussian that is to become more than this many is treated as if it became this many, as in gsplat."""
LARGEST = 1.0 - torch.finfo(torch.float32).eps
"""An opacity may be so large: its logit is still finite."""


def draws(count: int, total: int, start: int, device: torch.device) -> Tensor:
    """Return the first `count` numbers of an endless table of numbers below `total`, [count] int64; see
    `draw_sources`."""
    return table_bits(torch.arange(count, device=device), start).bitwise_and_((1 << 63) - 1) % total


def draw_sources(sums: Tensor, empty: Tensor, slots: Tensor, start: int, taken: Tensor | None) -> tuple[Tensor, Tensor]:
    """See `cuda_ext.draw_sources`."""
    count = len(sums)
    sources = torch.full((count,), -1, dtype=torch.int32, device=sums.device)
    copies = torch.zeros(count, dtype=torch.int32, device=sums.device)
    total = int(sums[-1]) if count else 0
    if total == 0 or (taken is not None and not bool(taken)):
        return sources, copies
    there = torch.where(empty)[0]
    drawn = draws(int(slots[-1]), total, start, sums.device)
    found = torch.searchsorted(sums, drawn[slots[there] - 1], right=True)
    sources[there] = found.to(torch.int32)
    return sources, copies.index_add_(0, found, torch.ones_like(found, dtype=torch.int32))


def share_out(
    logits: Tensor, log_scales: Tensor, copies: Tensor, coefficients: Tensor, min_opacity: float,
    cleared: Sequence[Tensor],
) -> None:  # fmt: skip
    """See `cuda_ext.share_out`."""
    chosen = torch.where(copies > 0)[0]
    if len(chosen) == 0:
        return
    opacities, factors = relocated(_sigmoid(logits[chosen]), copies[chosen].long() + 1)
    opacities = opacities.clamp(min_opacity, LARGEST)
    logits[chosen] = torch.log(opacities / (1.0 - opacities))
    log_scales[chosen] += factors.log()[:, None]
    for tensor in cleared:
        tensor.index_fill_(0, chosen, 0)


def copy_rows(tensors: Sequence[Tensor], sources: Tensor) -> None:
    """See `cuda_ext.copy_rows`."""
    there = torch.where(sources >= 0)[0]
    if len(there):
        from_where = sources[there].long()
        for tensor in tensors:
            tensor[there] = tensor[from_where]


def take_rows(tensors: Sequence[Tensor], index: Tensor) -> list[Tensor]:
    """See `cuda_ext.take_rows`."""
    return [tensor.index_select(0, index) for tensor in tensors]


def relocated(opacities: Tensor, ratios: Tensor) -> tuple[Tensor, Tensor]:
    """Return the opacities and scale factors of Gaussians for `ratio` coincident copies to look as it did alone
    (Kheradmand et al. 2024, equation 9).

    With o the opacity and N the ratio, o' = 1 - (1 - o)^(1/N), and scales are multiplied by o / f, where
    f = sum_{i=1..N} sum_{k=0..i-1} C(i-1, k) (-1)^k o'^(k+1) / sqrt(k+1). Summing over i first (hockey stick) leaves
    f = sum_{j=1..N} C(N, j) (-1)^(j-1) o'^j / sqrt(j), which Horner's rule evaluates in float64: its terms cancel.

    Args:
        opacities: [M] in (0, 1).
        ratios: [M] integers; those above MOST_COPIES count as MOST_COPIES.

    Returns:
        new opacities [M] and the scales' factors [M], of the opacities' dtype.
    """
    ratios = ratios.clamp(1, MOST_COPIES)
    old = opacities.to(torch.float64).clamp(max=LARGEST)
    new = -torch.expm1(torch.log1p(-old) / ratios)
    f = torch.zeros_like(new)
    # Higher powers than the largest ratio have only coefficients of zero.
    powers = int(ratios.max()) if len(ratios) else 0
    for of_power in reversed(coefficients(opacities.device)[:powers, ratios].unbind()):
        f = (f + of_power) * new
    return new.to(opacities.dtype), (old / f).to(opacities.dtype)


@functools.cache
def coefficients(device: torch.device) -> Tensor:
    """Return [j - 1, N] float64: C(N, j) (-1)^(j-1) / sqrt(j), see `relocated`."""
    rows = [
        [(-1.0) ** (j - 1) * math.comb(n, j) / math.sqrt(j) for n in range(MOST_COPIES + 1)]
        for j in range(1, MOST_COPIES + 1)
    ]
    return torch.tensor(rows, dtype=torch.float64, device=device)


def _sigmoid(x: Tensor) -> Tensor:
    """Return torch's own, on a CPU, rounds the last few numbers of a tensor otherwise than the rest."""
    return (1.0 + torch.exp(-x)).reciprocal()
