"""Sort over ranks in peer memory, and the tile lists made from it: `core.merge_sort` without the host.

Each rank sorts its own pairs. Then runs are merged two by two, level by level, and every rank reads only the elements
of its own part (Green, Odeh and Birk 2014; over GPUs: torch-dgx, section 4). Counts stay on the device. One device-side
barrier per level synchronizes the ranks. Without peer memory, `core.merge_sort` has the same results.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from cuda_ext.ops.sort import peer_sort as ops
from ns_multigpu.core.dist.collectives import exchange_counts, exchange_rows
from ns_multigpu.core.dist.world import World
from ns_multigpu.core.sort.merge_sort import merge_levels, merge_sort

_ALIGNMENT = 256


class SharedMemory(Protocol):
    """Required subset of `core.peer_memory.PeerBuffer`."""

    local: Tensor
    addresses: list[int]

    def barrier(self) -> None:
        """Make the current stream wait until every rank's has come here."""
        ...


class SortBuffers:
    """Double buffer of `capacity` pairs per rank, between which the levels of a sort merge.

    Args:
        memory: this rank's and the others' buffers, at least `SortBuffers.size(capacity, ranks)` bytes.
        capacity: pairs a rank, the same on every rank.

    Raises:
        ValueError: the memory is too small, or there are too many ranks for the operators.
    """

    def __init__(self, memory: SharedMemory, capacity: int) -> None:
        ranks = len(memory.addresses)
        needed = SortBuffers.size(capacity, ranks)
        if memory.local.numel() < needed:
            raise ValueError(
                f"SortBuffers: {capacity} pairs of {ranks} ranks need {needed} bytes, not {memory.local.numel()}."
            )
        if ranks > ops.MOST_RANKS:
            raise ValueError(f"SortBuffers: {ranks} ranks; the sort over peer memory takes {ops.MOST_RANKS}.")
        self.memory, self.capacity = memory, capacity
        pair = [_aligned(8 * capacity), _aligned(4 * capacity)]
        starts = [_aligned(8 * ranks), pair[0], pair[0], pair[1]]
        self._keys = [sum(starts[:1]), sum(starts[:2])]
        self._values = [sum(starts[:3]), sum(starts[:4])]
        self.counts = memory.local[: 8 * ranks].view(torch.int64)
        """Number of pairs of each rank, [ranks]: every rank writes its own on all."""

    @staticmethod
    def size(capacity: int, ranks: int) -> int:
        """Return the number of bytes that a rank needs."""
        return _aligned(8 * ranks) + 2 * (_aligned(8 * capacity) + _aligned(4 * capacity))

    def pairs(self, half: int) -> tuple[Tensor, Tensor]:
        """Return this rank's keys [capacity] int64 and values [capacity] int32 of one of the two halves."""
        keys, values = self._keys[half], self._values[half]
        local = self.memory.local
        return (
            local[keys : keys + 8 * self.capacity].view(torch.int64),
            local[values : values + 4 * self.capacity].view(torch.int32),
        )

    def addresses(self, active_buffers: Sequence[int]) -> tuple[list[int], list[int]]:
        """Return the addresses of each rank's keys and values, in the half that is given for it."""
        places = list(zip(self.memory.addresses, active_buffers, strict=True))
        return [at + self._keys[half] for at, half in places], [at + self._values[half] for at, half in places]

    def count_addresses(self, rank: int) -> list[int]:
        """Return the address on each rank of the count of `rank`."""
        return [at + 8 * rank for at in self.memory.addresses]


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


@dataclass(frozen=True)
class SortedPairs:
    """Sorted pairs that all ranks hold together, in pieces that differ by one at most where there are several ranks.

    In peer memory it holds until the next sort in the same buffers; every rank's piece is in place for all to read.

    Attributes:
        keys: [C] int64, this rank's piece; only the first `count` count.
        values: [C] int32.
        count: [1] int64.
        counts: [ranks] int64: how many pairs each rank started with; from which the operators find the pieces. None
            without peer memory.
        keys_at: where each rank's piece lies; empty without peer memory.
        values_at: likewise.
    """

    keys: Tensor
    values: Tensor
    count: Tensor
    counts: Tensor | None
    keys_at: list[int]
    values_at: list[int]


def peer_merge_sort(
    keys: Tensor,
    values: Tensor,
    count: Tensor,
    buffers: SortBuffers | None,
    world: World,
    begin_bit: int = 0,
    end_bit: int = 64,
) -> SortedPairs:
    """Sort all ranks' pairs by key. Stable: equal keys stay in the order of their ranks, then of their lines.

    Every rank calls it, with buffers on all or on none. With buffers it waits for no device; all that uses them belongs
    on one stream. Without, it reads counts and keys back to the host, many times.

    Args:
        keys: [C] int64, C the buffers' capacity, the same on every rank; overwritten behind `count`.
        values: [C] int32.
        count: [1] int64 on the device: how many pairs there are. Of more than C, C are sorted.
        buffers: peer memory, or None: by collectives, where C may differ by rank.
        world: the ranks.
        begin_bit, end_bit: see `cuda_ext.sort_pairs`: where the pairs of every rank are in order by the bits below
            `begin_bit` already, or no key has bits from `end_bit` on. The result is sorted by the whole keys.

    Returns:
        this rank's part, and where the others' are.

    Raises:
        TypeError, ValueError: types or shapes are wrong, or C is not the buffers' capacity.
        NativeBuildError: the operators cannot be compiled.
    """
    if buffers is None:
        number = min(int(count), len(keys))
        sorted_keys, sorted_values = merge_sort(keys[:number], values[:number], world)
        return SortedPairs(sorted_keys, sorted_values, count.new_full((1,), len(sorted_keys)), None, [], [])
    if keys.shape != (buffers.capacity,):
        raise ValueError(f"peer_merge_sort: keys {list(keys.shape)} in buffers of [{buffers.capacity}].")
    memory = buffers.memory
    memory.barrier()  # no rank still reads an earlier sort's data
    ops.sort_pairs(keys, values, count, begin_bit, end_bit, buffers.pairs(0))
    ops.publish_count(count, buffers.count_addresses(world.rank), buffers.capacity)
    memory.barrier()
    active_buffers = [0] * world.size
    piece = count.clamp(max=buffers.capacity)
    for merges in merge_levels([0] * world.size):  # who merges with whom follows from the number of ranks alone
        keys_at, values_at = buffers.addresses(active_buffers)
        for merge in merges:
            left, right = (merge.left.first, merge.left.end), (merge.right.first, merge.right.end)
            if left[0] <= world.rank < right[1]:
                out = buffers.pairs(1 - active_buffers[world.rank])
                piece = ops.merge_level(keys_at, values_at, buffers.counts, left, right, world.rank, out)
        for merge in merges:
            for rank in range(merge.left.first, merge.right.end):
                active_buffers[rank] = 1 - active_buffers[rank]
        memory.barrier()
    return SortedPairs(
        *buffers.pairs(active_buffers[world.rank]), piece, buffers.counts, *buffers.addresses(active_buffers)
    )


def sorted_band_lists(
    pairs: SortedPairs,
    bands: Sequence[Sequence[int]],
    where: Tensor,
    segment: int,
    capacity: int,
    world: World,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return this rank's lists of rows, from the sorted pairs of all ranks' `cuda_ext.intersect_keys`.

    Every rank calls it. With peer memory each rank reads what it needs; otherwise the ranks exchange pairs.

    Args:
        pairs: as `peer_merge_sort` returned them.
        bands: of every rank, (first tile, end tile) of each of its patches among the tiles of all views.
        where, segment, capacity: see `cuda_ext.band_lists`.

    Returns:
        tile_offsets [T+1] int32, row_ids [capacity] int32 and count [1] int64: see `cuda_ext.band_lists`.

    Raises:
        TypeError, ValueError: types, shapes or bands are wrong, or there are not as many lists of bands as ranks.
        NativeBuildError: the operators cannot be compiled.
    """
    if len(bands) != world.size:
        raise ValueError(f"sorted_band_lists: the bands of {len(bands)} ranks; the world has {world.size}.")
    own = bands[world.rank]
    if pairs.counts is not None:
        return ops.band_lists(pairs.keys_at, pairs.values_at, pairs.counts, own, where, segment, capacity)
    keys, values = _fetch(pairs, bands, world)
    counts = torch.full((1,), len(keys), dtype=torch.int64, device=keys.device)
    return ops.band_lists([keys.data_ptr()], [values.data_ptr()], counts, own, where, segment, capacity)


def _fetch(pairs: SortedPairs, bands: Sequence[Sequence[int]], world: World) -> tuple[Tensor, Tensor]:
    """Return the sorted pairs of this rank's tiles. Every rank sends a pair once to each rank that needs it."""
    keys, device = pairs.keys, pairs.keys.device
    rows: list[Tensor] = []
    for of_rank in bands:
        stretches = _union(of_rank)
        ends = torch.tensor([n for stretch in stretches for n in stretch], dtype=torch.int64, device=device)
        places = torch.searchsorted(keys, ends << 32).tolist()
        parts = [torch.arange(a, b, device=device) for a, b in zip(places[::2], places[1::2], strict=True)]
        rows.append(torch.cat(parts) if parts else torch.arange(0, device=device))
    send = [len(part) for part in rows]
    index = torch.cat(rows)
    receive = exchange_counts(send, world)
    got_keys, got_values = (exchange_rows(x[index], send, receive, world) for x in (keys, pairs.values))
    # Every source's are sorted, and sources hold ascending pieces; only a source's next stretch comes too early.
    got_keys, order = torch.sort(got_keys, stable=True)
    return got_keys, got_values[order].contiguous()


def _union(bands: Sequence[int]) -> list[tuple[int, int]]:
    """Return the tiles of bands as disjoint, ascending ranges."""
    stretches: list[tuple[int, int]] = []
    for first, end in sorted(zip(bands[::2], bands[1::2], strict=True)):
        if stretches and first <= stretches[-1][1]:
            stretches[-1] = (stretches[-1][0], max(stretches[-1][1], end))
        else:
            stretches.append((first, end))
    return stretches
