"""The reference of what moves points: draws, rows copied on the spot, and parts of a point side by side."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from cuda_ext.reference.noise import table_bits
from cuda_ext.reference.quaternions import turn

MOST_COPIES = 51
"""A Gaussian that is to become more than this many is treated as if it became this many, as in gsplat."""
LARGEST = 1.0 - torch.finfo(torch.float32).eps
"""An opacity may be so large: its logit is still finite."""
_PAIR_SCALE = math.sqrt(0.75)
"""Scale of one of two parts that lie half a standard deviation from the mean: see `shares`."""
_PAIR_WEIGHT, _PAIR_OVERLAP = math.exp(-1 / 6), math.exp(-1 / 3) / math.sqrt(2)
"""Weight of one of them at the mean, and the integral of the product of both by that of one."""


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
    means: Tensor, quats: Tensor, log_scales: Tensor, logits: Tensor, copies: Tensor, sources: Tensor | None,
    numbers: Tensor | None, min_opacity: float, cleared: Sequence[Tensor],
) -> None:  # fmt: skip
    """See `cuda_ext.share_out`."""
    of, number = copies.long() + 1, torch.zeros_like(copies)
    if sources is not None and numbers is not None:
        there = torch.where(sources >= 0)[0]
        of[there], number[there] = copies[sources[there].long()].long() + 1, numbers[there]
    for tensor in cleared:
        tensor.index_fill_(0, torch.where(copies > 0)[0], 0)
    chosen = torch.where(of > 1)[0]
    if len(chosen) == 0:
        return
    of, sizes = of[chosen], log_scales[chosen]
    means[chosen] += part_offsets(quats[chosen], sizes, logits[chosen], number[chosen], of)
    opacities, factors, _ = shares(_sigmoid(logits[chosen]), of)
    opacities = opacities.clamp(min=min_opacity)
    logits[chosen] = torch.log(opacities / (1.0 - opacities))
    log_scales[chosen] = sizes.scatter_add(1, sizes.argmax(1, keepdim=True), factors.log()[:, None])


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


def numbered(rows: Tensor) -> Tensor:
    """Return which of its equals each of `rows` [M] is, from 1: [M] int32."""
    values, order = torch.sort(rows, stable=True)
    places = torch.arange(len(rows), device=rows.device)
    found = places - torch.searchsorted(values, values) + 1
    return torch.empty_like(found, dtype=torch.int32).index_copy_(0, order, found.int())


def part_offsets(quats: Tensor, log_scales: Tensor, logits: Tensor, number: Tensor, of: Tensor) -> Tensor:
    """Return how far from a Gaussian's mean part `number` of `of` lies, [M, 3]: along its longest axis. See
    `cuda_ext.share_out`.

    Args:
        quats: [M, 4]. log_scales: [M, 3]. logits: [M] of opacities. number: [M] integers from 0. of: [M] integers.
    """
    size, axis = log_scales.max(1, keepdim=True)
    place = (2 * number + 1 - of).to(size.dtype) / of * shares(_sigmoid(logits), of)[2]
    along = torch.zeros_like(log_scales).scatter_(1, axis, size.exp() * place[:, None])
    return turn(quats, along[None])[0]


def shares(opacities: Tensor, of: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the opacities of parts, the factor of their longest scale, and that of their places: [M] each, of the
    opacities' dtype.

    N parts that lie (2 i + 1 - N) / N standard deviations from a Gaussian's mean vary by (1 - 1 / N^2) / 3 variances.
    With a variance of (2 + 1 / N^2) / 3 of their own all together vary as it does. Their opacity o' covers its centre
    as it did: (1 - w o')^N = 1 - o, with the mean weight w of parts there. Where Gaussians are opaque, two of them
    then cover more along the axis than the one. So places and scales shrink by what they cover too much (exact for
    two).

    Args:
        opacities: [M] in (0, 1). of: [M] integers, N; those above MOST_COPIES count as MOST_COPIES.
    """
    of = of.clamp(1, MOST_COPIES)
    variance = (2 + of.double() ** -2) / 3
    number = torch.arange(int(of.max()) if len(of) else 0, device=of.device)
    place = (2 * number + 1 - of[:, None]) / of[:, None].double()
    weight = (-0.5 * place**2 / variance[:, None]).exp().masked_fill(number >= of[:, None], 0.0).sum(1) / of
    old = opacities.double().clamp(max=LARGEST)
    new = torch.minimum(-torch.expm1(torch.log1p(-old) / of) / weight, old)
    # Of two: the integral of both, less that of their product, by the integral of the one.
    pair = torch.minimum(-torch.expm1(torch.log1p(-old) / 2) / _PAIR_WEIGHT, old)
    covered = (2 * pair - pair**2 * _PAIR_OVERLAP) * _PAIR_SCALE / old
    shrunk = covered.reciprocal().masked_fill_(of < 2, 1.0)
    return tuple(x.to(opacities.dtype) for x in (new, variance.sqrt() * shrunk, shrunk))  # type: ignore[return-value]


def _sigmoid(x: Tensor) -> Tensor:
    """Return 1 / (1 + exp(-x)). On a CPU, torch's own rounds the last few elements of a tensor unlike the rest."""
    return (1.0 + torch.exp(-x)).reciprocal()
