"""How rows of splats get from the ranks that own their points to those that draw them, and their gradients back.

Rows travel as records of 64 bytes in segments of one capacity, one for each pair of ranks, so that nobody has to tell
anybody how many there are before they leave; the counts travel beside them and stay on the device. See
`cuda_ext.ops.row_exchange` for the records.

Two transports with the same results: writing and reading the other GPUs' memory, or collectives that send whole
segments, padding included.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from cuda_ext.ops.fused import SplatRows
from cuda_ext.ops.row_exchange import RECORD_FLOATS, ArrivedRows, collect, pack, unpack
from ns_multigpu.core.collectives import all_gather_into, all_to_all_into
from ns_multigpu.core.peer_memory import PeerBuffer
from ns_multigpu.core.world import World

_ALIGN = 256
_RECORD_BYTES = 4 * RECORD_FLOATS


@dataclass(frozen=True)
class Sinks:
    """Where gradients are added up: the last arguments of `rasterize_backward_into`.

    Attributes:
        addresses: [S] int64. owners, slots: [rows] int32, which of them, and the record there.
        system_scope: whether other GPUs add to the same records.
    """

    addresses: Tensor
    owners: Tensor
    slots: Tensor
    system_scope: bool


class RowTransport(ABC):
    """One rank's side of the exchange; every rank makes one and calls its methods in the order below, once a step; only
    `leave` once for each part of its rows.

    Args:
        world: the ranks.
        rows: lines of this rank's own rows.
        capacity: records of a segment.
        words: int64 numbers of a rank's message at the end of a step.
    """

    def __init__(self, world: World, rows: int, capacity: int, words: int) -> None:
        self.world, self.rows, self.capacity, self.words = world, rows, capacity, words
        self._segments: Tensor  # [ranks] int64, where this rank's records for each rank go

    def leave(self, rows: SplatRows, place: Tensor, first: int, end: int) -> None:
        """Sends lines first to end of the rows off to where `place` [ranks, rows] says. It may be called on a stream of
        its own, which the one that `arrive` is called on has to wait for."""
        geometry = (rows.means2d, rows.conics, rows.opacities)
        parts = (rows.view_ids, *geometry, rows.features, rows.depths, rows.radii)
        pack(*parts, place, self._segments, self.capacity, first, end)

    @abstractmethod
    def arrive(self, rows: SplatRows, counts: Tensor, views: int) -> ArrivedRows:
        """What arrived here when all have sent all of their rows.

        Args:
            rows: this rank's. counts: [ranks] int64, how many of them went to each.
            views: of the batch.
        """

    @abstractmethod
    def sinks(self, owners: Tensor, slots: Tensor) -> Sinks:
        """Where the gradients of what arrived are to be added; all zero now."""

    @abstractmethod
    def bring_back(self, place: Tensor, count: Tensor, message: Tensor) -> tuple[Tensor, Tensor]:
        """Brings gradients to the rows' owners.

        Args:
            place: as given to `leave`. count: [1] of the rows.
            message: [words] int64 for everybody.

        Returns:
            this rank's rows' gradient records [rows, 16], and everybody's messages [ranks, words].
        """


class OwnRows(RowTransport):
    """For a world of one, where rows stay where they are. `capacity` is that of the rows."""

    def __init__(self, world: World, rows: int, capacity: int, words: int) -> None:
        super().__init__(world, rows, capacity, words)
        if world.size != 1:
            raise ValueError(f"OwnRows: rows have to travel between {world.size} ranks")
        self._table = torch.zeros(rows, RECORD_FLOATS, device=world.device)
        self._at = torch.tensor([self._table.data_ptr()], dtype=torch.int64, device=world.device)
        self._lines = torch.arange(rows, dtype=torch.int32, device=world.device)
        self._here = torch.zeros(rows, dtype=torch.int32, device=world.device)

    def leave(self, rows: SplatRows, place: Tensor, first: int, end: int) -> None:
        return

    def arrive(self, rows: SplatRows, counts: Tensor, views: int) -> ArrivedRows:
        geometry = (rows.means2d, rows.conics, rows.opacities)
        return ArrivedRows(rows.view_ids, *geometry, rows.features, rows.depths, rows.radii, self._here, self._lines)

    def sinks(self, owners: Tensor, slots: Tensor) -> Sinks:
        self._table.zero_()
        return Sinks(self._at, owners, slots, system_scope=False)

    def bring_back(self, place: Tensor, count: Tensor, message: Tensor) -> tuple[Tensor, Tensor]:
        return self._table, message[None]


class CollectiveRows(RowTransport):
    """All-to-all of whole segments: between machines, and on CPU.

    Only packing can go on beside something else. Where the rows of a part end in a segment the device alone knows, so
    that parts that travel on their own would take segments of their own, each with room for all of its rows.
    """

    def __init__(self, world: World, rows: int, capacity: int, words: int) -> None:
        super().__init__(world, rows, capacity, words)
        shape = (world.size, capacity, RECORD_FLOATS)
        self._out, self._in = (torch.zeros(shape, device=world.device) for _ in range(2))
        self._segments, self._returned = _addresses(self._out), _addresses(self._in)
        self._arrived = torch.zeros(world.size, dtype=torch.int64, device=world.device)
        self._everyone = torch.zeros(world.size, words, dtype=torch.int64, device=world.device)
        lines = world.size * capacity
        self._lines = torch.arange(lines, dtype=torch.int32, device=world.device)
        self._here = torch.zeros(lines, dtype=torch.int32, device=world.device)
        self._sum = torch.tensor([self._out.data_ptr()], dtype=torch.int64, device=world.device)

    def arrive(self, rows: SplatRows, counts: Tensor, views: int) -> ArrivedRows:
        all_to_all_into(self._in, self._out, self.world)
        all_to_all_into(self._arrived, counts, self.world)
        return unpack(self._in, self._arrived, views)

    def sinks(self, owners: Tensor, slots: Tensor) -> Sinks:
        # What was sent is not needed any more: the gradients of what arrived leave from there.
        self._out.zero_()
        return Sinks(self._sum, self._here, self._lines, system_scope=False)

    def bring_back(self, place: Tensor, count: Tensor, message: Tensor) -> tuple[Tensor, Tensor]:
        all_to_all_into(self._in, self._out, self.world)
        all_gather_into(self._everyone, message, self.world)
        return collect(place, count, self._returned, self.capacity), self._everyone


class PeerRows(RowTransport):
    """Rows are written into the other GPUs' memory; gradients are added there, or read from there.

    A step has two barriers, which the devices pass without their hosts: one after the rows, one after the gradients. A
    rank writes rows only after the second barrier of the step before, when nobody reads the last ones any more, and
    zeroes what it adds up only after the first, when nobody reads those.

    Args:
        atomics: drawing adds each gradient to the owner's record over the link; else it is added up where it is drawn,
            and its owner reads it from there, once for each rank that drew the row.
    """

    def __init__(self, world: World, rows: int, capacity: int, words: int, *, atomics: bool) -> None:
        super().__init__(world, rows, capacity, words)
        self._atomics = atomics
        segment = capacity * _RECORD_BYTES
        table = rows * _RECORD_BYTES if atomics else world.size * segment
        parts = (world.size * segment, table, 8 * world.size, 8 * world.size * words)
        starts = [0]
        for size in parts:
            starts.append(starts[-1] + -(-size // _ALIGN) * _ALIGN)
        self._buffer = PeerBuffer(starts[-1], world)
        self._inbox_at, self._table_at, self._counts_at, self._messages_at, _ = starts
        rank, view = world.rank, self._buffer.view
        self._in = view(rank, self._inbox_at, (world.size, capacity, RECORD_FLOATS), torch.float32)
        length = rows if atomics else world.size * capacity
        self._table = view(rank, self._table_at, (length, RECORD_FLOATS), torch.float32)
        self._arrived = view(rank, self._counts_at, (world.size,), torch.int64)
        self._everyone = view(rank, self._messages_at, (world.size, words), torch.int64)
        at = self._buffer.addresses
        self._segments = self._numbers([address + self._inbox_at + rank * segment for address in at])
        mine = [self._table.data_ptr()]
        self._sums = self._numbers([address + self._table_at for address in at] if atomics else mine)
        self._returned = self._numbers([address + self._table_at + rank * segment for address in at])
        lines = world.size * capacity
        self._lines = torch.arange(lines, dtype=torch.int32, device=world.device)
        self._here = torch.zeros(lines, dtype=torch.int32, device=world.device)
        everyone = range(world.size)
        self._their_counts = [view(r, self._counts_at + 8 * rank, (1,), torch.int64) for r in everyone]
        self._their_messages = [view(r, self._messages_at + 8 * rank * words, (words,), torch.int64) for r in everyone]

    def leave(self, rows: SplatRows, place: Tensor, first: int, end: int) -> None:
        super().leave(rows, place, first, end)
        if self._atomics:
            self._table[first:end].zero_()

    def arrive(self, rows: SplatRows, counts: Tensor, views: int) -> ArrivedRows:
        torch._foreach_copy_(self._their_counts, list(counts.split(1)))  # one launch for all ranks
        self._buffer.barrier()
        return unpack(self._in, self._arrived, views)

    def sinks(self, owners: Tensor, slots: Tensor) -> Sinks:
        if self._atomics:
            return Sinks(self._sums, owners, slots, system_scope=True)
        self._table.zero_()
        return Sinks(self._sums, self._here, self._lines, system_scope=False)

    def bring_back(self, place: Tensor, count: Tensor, message: Tensor) -> tuple[Tensor, Tensor]:
        torch._foreach_copy_(self._their_messages, [message] * self.world.size)
        self._buffer.barrier()
        if self._atomics:
            return self._table, self._everyone
        return collect(place, count, self._returned, self.capacity), self._everyone

    def _numbers(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.world.device)


def _addresses(segments: Tensor) -> Tensor:
    """[ranks, ...] contiguous -> [ranks] int64, where each begins."""
    first, pitch = segments.data_ptr(), segments[0].numel() * segments.element_size()
    return torch.tensor([first + k * pitch for k in range(len(segments))], dtype=torch.int64, device=segments.device)
