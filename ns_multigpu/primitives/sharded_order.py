"""Order (`morton`) of a sharded model, and the exchange of points with their owners.

Each rank sorts its own points by key. The placement determines each point's owner. Points are sent to their owners with
their moments, and sorted again there. The global order is a stable sort of all points by key, with ties by global index
of the point or its parent.

If owners hold ranges of the order, equal keys are on one rank, ordered by source rank and row. The concatenated ranks
then hold the model in order. With any other placement, global indices are computed (`core.assign.global_order`) and
sent with the points.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ns_multigpu.core.assign.global_order import GlobalOrder
from ns_multigpu.core.assign.placement import NewPoints, Placement, Sharded
from ns_multigpu.core.assign.splitters import imbalance
from ns_multigpu.core.dist.collectives import exchange_rows, gather_on_device, sum_ints_on_device
from ns_multigpu.core.dist.world import World
from ns_multigpu.primitives.morton import MortonGrid, census, interleaved_codes

_BYTE = 256
"""Ranks whose numbers are bytes."""


@dataclass(frozen=True)
class Reordering:
    """Result and cost of a reordering; the same on every rank except `seconds`.

    Attributes:
        seconds: of this rank, including waits for others.
        moved: points that changed ranks. bytes_sent: for that, by all ranks together, without the global-index queries
            of placements without ranges.
        counts_before, counts_after: points by rank, with new ones at their parents' ranks and at their own.
        imbalance_before, imbalance_after: the most work of a rank / the mean; 1 is balanced.
        rebalanced: True if points were redistributed to balance work.
    """

    seconds: float
    moved: int
    bytes_sent: int
    counts_before: tuple[int, ...]
    counts_after: tuple[int, ...]
    imbalance_before: float
    imbalance_after: float
    rebalanced: bool

    def __str__(self) -> str:
        owners = "redistributed" if self.rebalanced else "distributed as before"
        return (
            f"{sum(self.counts_after):,} points in order in {self.seconds:.3f} s: {self.moved:,} changed GPUs "
            f"({self.bytes_sent / 1e6:,.1f} MB), work of the busiest {self.imbalance_before:.3f} -> "
            f"{self.imbalance_after:.3f} of the mean, {owners}"
        )


@dataclass(frozen=True)
class PointMove:
    """Exchange plan of this rank's points, sorted by key.

    Attributes:
        send_order: [sum(send)] int64, the points in sending order, those for rank 0 first; None if that is key order.
        send, receive: points to and from each rank.
        order: [sum(receive)] int64, received points by final row.
        places: [sum(receive)] int64, global indices of those rows; None if owners hold ranges.
        counts_before, counts_after, moved, imbalance_before, imbalance_after, rebalanced: see `Reordering`.
    """

    send_order: Tensor | None
    send: list[int]
    receive: list[int]
    order: Tensor
    places: Tensor | None
    counts_before: tuple[int, ...]
    counts_after: tuple[int, ...]
    moved: int
    imbalance_before: float
    imbalance_after: float
    rebalanced: bool

    def in_sending_order(self, order: Tensor) -> Tensor:
        """Return the points, sorted by key with `order` [N] int64, in sending order."""
        return order if self.send_order is None else order[self.send_order]

    def record(self, started: float, row_bytes: int) -> Reordering:
        """Return a record of the reordering, with its duration and the bytes it moved. Waits for the device.

        Args:
            started: `clock` when it began. row_bytes: bytes of a point.
        """
        return Reordering(
            clock(self.order.device) - started, self.moved, self.moved * row_bytes, self.counts_before,
            self.counts_after, self.imbalance_before, self.imbalance_after, self.rebalanced,
        )  # fmt: skip


def clock(device: torch.device) -> float:
    """Wait for the device's queued work and return a clock's time in seconds."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
    return time.perf_counter()


@dataclass(frozen=True)
class Survey:
    """Facts that ranks exchange before their points are sorted.

    Attributes:
        grid: the cells for all ranks' points together.
        works: the work of all points of each rank.
        tags: of each rank.
    """

    grid: MortonGrid
    works: tuple[int, ...]
    tags: tuple[int, ...]

    @staticmethod
    def of(means: Tensor, work: Tensor, tag: int, world: World) -> "Survey":
        """Gather from all ranks with one collective and one wait of the host.

        Args:
            means: [N, 3] this rank's positions. work: [] int64, total of its points. tag: any 64 bits, signed.
        """
        where = census(means)
        others = where.new_zeros(2, world.size)
        others[0, world.rank] = work
        others[1, world.rank] = tag
        gathered = sum_ints_on_device(torch.cat([where, others.flatten()]), world)
        by_rank = [tuple(gathered[k : k + world.size]) for k in range(len(where), len(gathered), world.size)]
        return Survey(MortonGrid.of(gathered[: len(where)]), *by_rank)


def common_grid(means: Tensor, world: World) -> MortonGrid:
    """Return the grid for all ranks' points together. It is the same on every rank.

    Args:
        means: [N, 3] this rank's positions.
    """
    return MortonGrid.of(sum_ints_on_device(census(means), world))


def order_keys(means: Tensor, categories: Tensor, grid: MortonGrid) -> Tensor:
    """Return 62-bit keys that sort by `interleaved_codes` in the grid for all ranks' points, then by category.

    Args:
        means: [N, 3] positions.
        categories: [N] int64 in [0, 4).

    Returns:
        [N] int64.
    """
    return interleaved_codes(means, grid) * 4 + categories


def plan_move(
    keys: Tensor,
    weights: Tensor,
    works: Sequence[int],
    world: World,
    threshold: float,
    placement: Placement | None = None,
    positions: Callable[[], Tensor] | None = None,
    parents: Callable[[], Tensor] | None = None,
) -> PointMove:
    """Determine the owners, and send the keys or the global indices to them.

    Args:
        keys: [N] int64 in [0, 2^62), ascending.
        weights: [N] int64, work by point; at least 0.
        works: their sum, by rank: see `Survey`.
        threshold: see `NewPoints`.
        placement: determines owners; `Sharded` by default.
        positions: returns the points' positions [N, 3], by key.
        parents: returns the old global indices [N] int64 of the points or their parents. Every rank calls it, if
            owners do not hold ranges of the order.

    Raises:
        ValueError: the threshold is less than 1; the placement names an owner that is no rank, on any rank.
    """
    if threshold < 1.0:
        raise ValueError(f"a threshold of imbalance is at least 1, not {threshold}: 1 is even")
    placement = placement or Sharded()
    new = NewPoints(keys, positions or (lambda: keys.new_zeros(len(keys), 3)), weights, works, threshold)
    placement_result = placement.place(new, world)
    send_order, table = _send_table(placement_result.owners, weights, placement, world)
    send = table[world.rank][: world.size]
    receive = [row[world.rank] for row in table]
    by = keys
    if not placement.in_ranges:
        assert parents is not None
        by = GlobalOrder.of(keys, world, parents(), ascending=True).places
    totals = [sum(column) for column in zip(*table, strict=True)]
    counts = tuple(sum(row[: world.size]) for row in table)
    moved = sum(counts) - sum(row[rank] for rank, row in enumerate(table))
    if moved:
        placed, order = torch.sort(
            exchange_rows(by if send_order is None else by[send_order], send, receive, world), stable=True
        )
    else:
        placed, order = by, torch.arange(len(by), device=by.device)
    return PointMove(
        send_order=send_order,
        send=send,
        receive=receive,
        order=order,
        places=None if placement.in_ranges else placed,
        counts_before=counts,
        counts_after=tuple(totals[: world.size]),
        moved=moved,
        imbalance_before=imbalance(works),
        imbalance_after=imbalance(totals[world.size :]),
        rebalanced=placement_result.redistributed,
    )


def _send_table(
    owners: Tensor, weights: Tensor, placement: Placement, world: World
) -> tuple[Tensor | None, list[list[int]]]:
    """All-gather the counts that ranks send, after a check that all owners are ranks. One collective, and one wait of
    the host.

    Returns:
        the sending order by owner; None if owners ascend. By rank, the numbers of points sent to each, then their
        weights.
    """
    size = world.size
    extra = len(owners) - len(weights)
    inside = owners.clamp(0, size - 1) if extra == 0 else owners.new_zeros(len(weights))
    few = inside.to(torch.uint8) if size <= _BYTE else inside  # sorted in a sixth of the time on a CPU
    sorted_owners, send_order = torch.sort(few, stable=True)
    # Where the points of each owner begin; to count them would have all of them add to a few numbers.
    ends = torch.searchsorted(sorted_owners.long(), torch.arange(size + 1, device=owners.device))
    before = torch.nn.functional.pad(weights[send_order].cumsum(0), (1, 0))[ends]
    facts = torch.zeros(3, dtype=torch.int64, device=owners.device)
    facts[0] = extra
    facts[1] = ((owners < 0) | (owners >= size)).sum()
    facts[2] = (owners[1:] < owners[:-1]).any()
    gathered = gather_on_device(torch.cat([facts, ends.diff(), before.diff()]), world)
    for rank, (many, bad, *_) in enumerate(gathered):
        if many or bad:
            what = f"{bad} of them are not among the {size} ranks" if bad else f"that is {many:+} owners"
            raise ValueError(f"{type(placement).__name__} names owners for the points of rank {rank}: {what}")
    return send_order if gathered[world.rank][2] else None, [row[3:] for row in gathered]
