"""Order of points: along a Morton curve within small cells, with the cells distributed over 64 hands.

Ranks own ranges of this order. Ranges of a plain Morton curve are regions of space, and one view sees much of one
region and nothing of another. Over a city, the busiest of 2 ranks had 1.5 times the mean of the points in a view, of 4
ranks 2.3 times (benchmarks/results/tile-h200.md). Space is therefore split into cells. Each cell belongs to one of 64
*hands* such that neighbours are in different hands, and points are ordered by hand first. Every long range of the order
has a fair sample of every region, for any number of ranks. Within a cell, usually with hundreds of points, neighbours
in the order are neighbours in space.

The cells follow from the points' census alone, which ranks sum: the points' positions matter, not their ranks.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ns_multigpu.core.assign.curve import interleaved

MORTON_BITS = 18
"""Bits an axis."""
HAND_BITS = 6
"""Bits of a code beyond its axes' 54: an int64 has two more bits for ties."""

_PIECE = 1 << 24
"""Points at once: what a piece takes on the way is much more than its codes."""
_SMALLEST = -128
_BINS = 256
_CORE = 0.9
"""The part of all points that cells are made for."""
_PER_CELL = 128
"""Points of a cell, were they spread evenly over the floor of the cube around most of them."""
_LATTICE = (1, 27, 11)
"""A step along an axis goes on by so many hands: odd, so that ranges of half, a quarter, ... of all hands are
chequered, and with no short combination that comes back to the same hand."""


@dataclass(frozen=True)
class MortonGrid:
    """Cells of space.

    Attributes:
        half: the cube of the curve spans -2^half to 2^half along each axis.
        cell: cells measure 2^cell; at least 2^-17 of the cube's half side.
    """

    half: int
    cell: int

    @staticmethod
    def of(counts: Sequence[int]) -> "MortonGrid":
        """Return the grid for points of this census, summed over all ranks."""
        total, below = sum(counts), 0
        furthest = max((k for k, count in enumerate(counts) if count), default=0)
        core = furthest
        for k, count in enumerate(counts):
            below += count
            if below >= _CORE * total:
                core = min(k, furthest)
                break
        across = (total // _PER_CELL).bit_length() // 2  # binary logarithm of the square root, rounded
        half = furthest + _SMALLEST
        finest = half + 1 - MORTON_BITS
        return MortonGrid(half, max(finest, core + _SMALLEST + 1 - across))


def census(means: Tensor) -> Tensor:
    """Count positions [N, 3] by magnitude: [256] int64, bin e (from -128 up) for a largest coordinate in [2^(e - 1),
    2^e). Non-finite values count as 0."""
    counts = torch.zeros(_BINS, dtype=torch.int64, device=means.device)
    for piece in means.detach().split(_PIECE):
        exponents = _positions(piece).abs().amax(dim=-1).clamp_min(2.0 ** (_SMALLEST - 1)).frexp().exponent
        counts += torch.bincount((exponents.long() - _SMALLEST).clamp_(0, _BINS - 1), minlength=_BINS)
    return counts


def interleaved_codes(means: Tensor, grid: MortonGrid) -> Tensor:
    """Return order codes of positions [N, 3], [N] int64: 6 bits of the cell's hand, then 18 interleaved bits an axis.

    Args:
        means: the positions; non-finite values count as 0.
        grid: of all points.
    """
    return torch.cat([_codes(piece, grid) for piece in means.detach().split(_PIECE)])


def _codes(means: Tensor, grid: MortonGrid) -> Tensor:
    half = 1 << (MORTON_BITS - 1)
    places = (_positions(means) * 2.0 ** (MORTON_BITS - 1 - grid.half)).floor().long() + half
    places.clamp_(0, (1 << MORTON_BITS) - 1)
    # Counted from the origin: where the cube has to grow, cells keep their hands.
    cells = (places - half) >> (grid.cell - (grid.half + 1 - MORTON_BITS))
    lattice, hands = _tables(means.device)
    code = hands[(cells * lattice).sum(dim=-1) & ((1 << HAND_BITS) - 1)]
    return code << 3 * MORTON_BITS | interleaved(places)


@functools.cache
def _tables(device: torch.device) -> tuple[Tensor, Tensor]:
    """Return `_LATTICE` [3] int64, and [64] int64, the numbers 0 to 63 with their bits reversed.

    With the lowest bit first, every other hand is one half of all hands.
    """
    hands = [int(f"{hand:0{HAND_BITS}b}"[::-1], 2) for hand in range(1 << HAND_BITS)]
    return torch.tensor(_LATTICE, device=device), torch.tensor(hands, device=device)


def interleaved_order(means: Tensor) -> Tensor:
    """Return the permutation [N] int64 that sorts positions [N, 3] by code, stably."""
    return torch.sort(interleaved_codes(means, MortonGrid.of(census(means).tolist())), stable=True).indices


def _positions(means: Tensor) -> Tensor:
    return means.double().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
