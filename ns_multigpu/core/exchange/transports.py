"""Exchange of splat rows from owners to the ranks that draw them, and of gradients back.

Rows are written to segments, one for each pair of ranks, with capacities that are known beforehand. Collectives first
exchange the counts, which the host reads, and send the rows of a segment, not its capacity. Peer memory needs no sizes.

A transport implements the legs of a fused step. `make_transport` chooses it by a strategy's legs and the machine. Steps
through autograd use the collective ones (`exchanged_rows`).
"""

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from ns_multigpu.core.dist.collectives import all_gather_into, all_to_all_into, all_to_all_segments
from ns_multigpu.core.dist.peer_memory import PeerBuffer
from ns_multigpu.core.dist.world import World
from ns_multigpu.core.exchange.hierarchical_rows import HierarchicalRows
from ns_multigpu.core.exchange.hierarchy import Hierarchy
from ns_multigpu.core.exchange.legs import GradientLeg, RowLeg
from ns_multigpu.core.exchange.pair_capacities import Pairs, pairs_of
from ns_multigpu.core.exchange.replicated_rows import OwnRows
from ns_multigpu.core.exchange.transport import Collective, Parts, RecordTransport, Returned, Transport
from ns_multigpu.core.kernels import Kernels, Received, Rows, Sinks
from ns_multigpu.core.row_wire import LOCAL, RowFormat, RowWire, WireSegments

_ALIGN = 256


class CollectiveRows(RecordTransport):
    """All-to-all with sizes per pair of ranks: between machines, and on CPU. Rows that a rank owns and draws bypass the
    buffer.

    Args:
        half: send as float16 where possible (`RowWire`).
        slots: rows carry their line at their owner, for `SortedLists`. All pairs then have the largest capacity: lists
            sorted over all ranks number lines so.
    """

    def __init__(
        self, world: World, kernels: RowFormat, rows: int, capacity: int | Pairs, words: int, *, half: bool = False,
        slots: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(world, kernels, rows, capacity, words)
        if slots:
            self.pairs = pairs_of(self.capacity, world.size)
        self.half, self.slots = half, slots
        device, here, ranks = world.device, world.rank, range(world.size)
        sent = [self.pairs[here][rank] for rank in ranks]
        received = [self.pairs[rank][here] for rank in ranks]
        self.lines = max(received)
        # Sent, then received segments. Gradients use the same memory in the reverse direction.
        wire = kernels.wire(half=half, slots=slots)
        self._out_rows, self._received_rows = _but(sent, here), _but(received, here)
        self._out = wire.row_words * sum(self._out_rows)
        self._end = self._out + wire.row_words * sum(self._received_rows)
        self._wire = torch.zeros(self._end, dtype=torch.int32, device=device)
        self._local_place = torch.empty(0)  # [rows] lines of local rows, set by `send`
        self._out_segments = self._segments(self._out_rows, 0, wire.row_words)
        self._received_segments = self._segments(self._received_rows, self._out, wire.row_words)
        self._allocate_records(sum(received))
        own = sum(received[:here])
        self._own_lines = slice(own, own + received[here])
        self._received_counts = torch.zeros(world.size, dtype=torch.int64, device=device)
        self._num_sent, self._num_received = [[0] * world.size] * 2  # rows of the step, by rank, set by `receive`

    @property
    def _format(self) -> RowWire:
        return self.kernels.wire(half=self.half, slots=self.slots)

    def send(self, rows: Rows, place: Tensor) -> None:
        self._local_place = place[self.world.rank]
        self._format.pack(rows, place, self._wire, self._out_segments)

    def receive(self, rows: Rows, counts: Tensor, views: int, patches: Sequence[int]) -> Parts[Received]:
        wire = self._format

        def send() -> None:
            all_to_all_into(self._received_counts, counts, self.world)
            self._num_sent, self._num_received = torch.stack([counts, self._received_counts]).tolist()
            into = self._received_segments.filled(self._wire, self._num_received, wire.row_words)
            out = self._out_segments.filled(self._wire, self._num_sent, wire.row_words)
            all_to_all_segments(into, out, self.world)

        yield Collective(send)
        received = wire.unpack(self._wire, self._received_segments, self._received_counts, views)
        wire.keep(rows, self._local_place, received, self._received_segments, self.world.rank)
        return received

    def return_gradients(self, rows: Rows, place: Tensor, message: Tensor, views: range) -> Parts[Returned]:
        wire = self._format
        words = wire.gradient_words
        back = self._segments(self._received_rows, self._out, words)
        wire.pack_gradients(self.records, self._received_counts, self._wire, back)

        come, own = self._segments(self._out_rows, 0, words), self.records[self._own_lines]

        def send() -> None:
            into = come.filled(self._wire, self._num_sent, words)
            all_to_all_segments(into, back.filled(self._wire, self._num_received, words), self.world)
            all_gather_into(self._messages, message, self.world)

        yield Collective(send)
        records = wire.collect(place, rows.count, self._wire, come, own)
        return Returned(rows, records, self._messages)

    def _segments(self, rows: list[int], first: int, words: int) -> WireSegments:
        """Return consecutive segments of the other ranks, from word `first` on."""
        starts = list(accumulate((words * n for n in rows), initial=first))[:-1]
        rank = self.world.rank
        starts[rank] = LOCAL
        return WireSegments(tuple(starts), (*rows[:rank], self.pairs[rank][rank], *rows[rank + 1 :]), rank)


class PeerRows(Transport):
    """Peer-memory transport: rows are written into the other GPUs' memory. Drawing adds each gradient to the owner's
    record over the link.

    All segments have the largest pair's capacity: unwritten lines are not transferred.

    A step has two barriers on the devices, without the hosts: one after the rows, one after the gradients. A rank
    writes rows only after the second barrier of the step before, when no rank reads the old ones. It zeroes gradient
    records only before the first barrier, when no rank adds to them.
    """

    def __init__(self, world: World, kernels: Kernels, rows: int, capacity: int | Pairs, words: int) -> None:
        super().__init__(world, kernels, rows, capacity, words)
        floats, capacity = kernels.record_floats, self.capacity
        segment = capacity * 4 * floats
        parts = (world.size * segment, rows * 4 * floats, 8 * world.size, 8 * world.size * words)
        starts = [0]
        for size in parts:
            starts.append(starts[-1] + -(-size // _ALIGN) * _ALIGN)
        self._buffer = PeerBuffer(starts[-1], world)
        self._inbox_at, self._table_at, self._counts_at, self._messages_at, _ = starts
        rank, view = world.rank, self._buffer.view
        self._in = view(rank, self._inbox_at, (world.size, capacity, floats), torch.float32)
        self._table = view(rank, self._table_at, (rows, floats), torch.float32)
        self._received_counts = view(rank, self._counts_at, (world.size,), torch.int64)
        self._everyone = view(rank, self._messages_at, (world.size, words), torch.int64)
        at = self._buffer.addresses
        self._segments = self._numbers([address + self._inbox_at + rank * segment for address in at])
        self._sums = self._numbers([address + self._table_at for address in at])
        everyone = range(world.size)
        self._their_counts = [view(r, self._counts_at + 8 * rank, (1,), torch.int64) for r in everyone]
        self._their_messages = [view(r, self._messages_at + 8 * rank * words, (words,), torch.int64) for r in everyone]

    def send(self, rows: Rows, place: Tensor) -> None:
        self.kernels.pack(rows, place, self._segments, self.capacity)
        self._table.zero_()

    def receive(self, rows: Rows, counts: Tensor, views: int, patches: Sequence[int]) -> Parts[Received]:
        torch._foreach_copy_(self._their_counts, list(counts.split(1)))  # pyright: ignore  # one launch for all ranks
        yield from self._barrier()
        return self.kernels.unpack(self._in, self._received_counts, views)

    def sinks(self, owners: Tensor, slots: Tensor) -> Sinks:
        return Sinks(self._sums, owners, slots, system_scope=True)

    def return_gradients(self, rows: Rows, place: Tensor, message: Tensor, views: range) -> Parts[Returned]:
        torch._foreach_copy_(self._their_messages, [message] * self.world.size)  # pyright: ignore
        yield from self._barrier()
        return Returned(rows, self._table, self._everyone)

    def written_bytes(self, steps: int, rows: int, sent: int) -> int:
        return 2 * 4 * self.kernels.record_floats * sent  # records there, and their gradients back

    def _barrier(self) -> Parts[None]:
        """Wait for all ranks on the device. The devices of one process do so between two parts."""
        if self.world.members is None:
            self._buffer.barrier()
        else:
            yield Collective(lambda: None)

    def _numbers(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.world.device)


def make_transport(
    rows_leg: RowLeg, gradient_leg: GradientLeg, world: World, kernels: Kernels, rows: int, capacity: int | Pairs,
    words: int, *, peer: bool,
) -> Transport:  # fmt: skip
    """Return the transport that implements these legs.

    Args:
        rows, capacity, words: see `Transport`.
        peer: True if the ranks of a machine share peer memory; with replicas, if all ranks do.
    """
    shape = (world, kernels, rows, capacity, words)
    if world.size == 1:
        return OwnRows(*shape)
    if rows_leg.is_exchanged and is_hierarchical(rows_leg, world, peer=peer):
        return HierarchicalRows(*shape, half=rows_leg.half, peer=peer)
    if rows_leg.is_exchanged:
        return PeerRows(*shape) if peer else CollectiveRows(*shape, half=rows_leg.half, slots=rows_leg.slots)
    return gradient_leg.operators(*shape, peer=peer)


def is_hierarchical(rows_leg: RowLeg, world: World, *, peer: bool) -> bool:
    """Return True if fused steps forward rows on each machine: several machines, and no lists sorted over all ranks.

    Args:
        peer: True if the ranks of a machine share peer memory.
    """
    wanted = peer if rows_leg.hierarchical is None else rows_leg.hierarchical
    return wanted and not rows_leg.slots and Hierarchy.of(world) is not None


def _but(numbers: list[int], rank: int) -> list[int]:
    """Return the numbers with zero for this rank."""
    return [*numbers[:rank], 0, *numbers[rank + 1 :]]
