"""A uniform grid over the ground that lists, for each cell, the solids above it."""

from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ns_multigpu.city.solids import Shape, Solids

CELL = 5.0
"""Side of a cell, metres."""
FAR = 1e9
"""A distance beyond everything."""


@dataclass(frozen=True)
class Frame:
    """Square of n x n cells of side CELL centred on the origin; its outermost ring is empty."""

    n: int

    @staticmethod
    def around(half: float) -> "Frame":
        """Return the smallest frame that holds [-half, half] squared inside its empty ring."""
        return Frame(2 * int(np.ceil(half / CELL)) + 2)

    @property
    def low(self) -> float:
        """Coordinate of the lower edge, along x and along y, metres."""
        return -0.5 * self.n * CELL


@dataclass(frozen=True)
class Layer:
    """The solids of one shape, listed by cell.

    Attributes:
        shape: their shape.
        first: global number of the first of these solids.
        geometry: [fields, n], in the order of the solids.
        slots: [fields, m] the geometry once more, in the order of the cells' lists.
        numbers: [m] int64 global number of the solid of each slot.
        start, count: [cells] int64, the list of each cell.
        top: [cells] greatest height of a solid of the cell, -1 where there is none.
    """

    shape: Shape
    first: int
    geometry: Tensor
    slots: Tensor
    numbers: Tensor
    start: Tensor
    count: Tensor
    top: Tensor

    def to(self, device: torch.device) -> "Layer":
        """Return the same layer on another device."""
        moved = {k: v.to(device) for k, v in vars(self).items() if isinstance(v, Tensor)}
        return replace(self, **moved)


def _expand(counts: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return, for counts c, the entry of each of sum(c) items, and its rank within the entry."""
    owner = np.repeat(np.arange(len(counts)), counts)
    return owner, np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)


def make_layer(solids: Solids, first: int, frame: Frame) -> Layer:
    """List solids by the cells that their bounding boxes touch.

    Args:
        solids: to list; they must lie inside the frame's ring.
        first: global number of the first.
        frame: the grid.

    Returns:
        The layer, on the CPU.

    Raises:
        ValueError: a solid extends beyond the frame.
    """
    low, high = solids.bounds()
    cells_low = np.floor((low[:, :2].astype(np.float64) - frame.low) / CELL).astype(np.int64)
    cells_high = np.floor((high[:, :2].astype(np.float64) - frame.low) / CELL).astype(np.int64)
    if len(solids) and (cells_low.min() < 1 or cells_high.max() > frame.n - 2):
        raise ValueError(f"a {solids.shape.name.lower()} extends beyond the grid of {frame.n} cells")
    spans = cells_high - cells_low + 1
    owner, rank = _expand(spans[:, 0] * spans[:, 1])
    x = cells_low[owner, 0] + rank % spans[owner, 0]
    y = cells_low[owner, 1] + rank // spans[owner, 0]
    cell = y * frame.n + x
    order = np.argsort(cell, kind="stable")
    owner, cell = owner[order], cell[order]
    count = np.bincount(cell, minlength=frame.n**2)
    top = np.full(frame.n**2, -1.0, np.float32)
    np.maximum.at(top, cell, high[owner, 2])
    geometry = torch.from_numpy(np.ascontiguousarray(solids.geometry.T))
    index = torch.from_numpy(owner)
    return Layer(
        shape=solids.shape,
        first=first,
        geometry=geometry,
        slots=geometry[:, index].contiguous(),
        numbers=index + first,
        start=torch.from_numpy(np.cumsum(count) - count),
        count=torch.from_numpy(count),
        top=torch.from_numpy(top),
    )


def clear_height(
    top: NDArray[np.float32], frame: Frame, sun: NDArray[np.float64], moving: float
) -> NDArray[np.float32]:
    """Return, for each cell, the height above which no static solid can occlude the sun.

    A ray towards the sun that leaves a cell at height z meets, k cells further on, only what is taller than z plus the
    height won on the way. Marching along the sun's direction and taking the greatest need of all cells touched gives a
    bound that is never too low.

    Args:
        top: [n * n] height of the tallest solid of each cell.
        frame: the grid.
        sun: [3] unit vector towards the sun.
        moving: height of the tallest thing that moves, metres.

    Returns:
        [n * n] heights, metres.
    """
    tall = np.maximum(top, moving).reshape(frame.n, frame.n)
    flat = np.hypot(sun[0], sun[1])
    climb = sun[2] / max(flat, 1e-6)
    result = tall.copy()
    for step in range(int(np.ceil(tall.max() / (climb * CELL))) + 2):
        # A point anywhere in the cell, moved by a whole number of sides, lies within one cell of the rounded shift.
        shift = [round(step * float(s) / flat) if flat > 1e-6 else 0 for s in sun[:2]]
        won = max(step - 0.5, 0.0) * CELL * climb
        moved = np.full_like(tall, moving)
        for dy in (-1, 0, 1):
            for dx in (-1, 0, 1):
                ax, ay = shift[0] + dx, shift[1] + dy
                if max(abs(ax), abs(ay)) >= frame.n:
                    continue
                src = tall[max(ay, 0) : frame.n + min(ay, 0), max(ax, 0) : frame.n + min(ax, 0)]
                dst = moved[max(-ay, 0) : frame.n + min(-ay, 0), max(-ax, 0) : frame.n + min(-ax, 0)]
                np.maximum(dst, src, out=dst)
        np.maximum(result, moved - won, out=result)
    return result.reshape(-1)
