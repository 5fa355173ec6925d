"""Hierarchical all-to-all of rows: within a machine through its own memory, and once to each other machine.

    send:   owners -> relays on other machines (collective) -> ranks that draw the rows there (`IntraNodeExchange`)
    return: ranks that drew -> owner, or relay, which sums (`IntraNodeExchange`) -> owners (collective)

The relay on a machine is the rank with the owner's local number. From a row's position and size it finds the ranks of
its machine that need the row, by the owner's operator. Received rows are in segments by owner, in the order of the
owners' lines, as with one machine.

Sums of gradients have a fixed order, so that runs are equal bit for bit. An owner adds what the ranks of its machine
return, in their order, to what the machines return, in theirs. A relay adds in its ranks' order.
"""

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from cuda_ext.ops.exchange.row_exchange import MOST_RANKS, route_lines
from cuda_ext.ops.exchange.row_wire import MOST_SEGMENTS
from ns_multigpu.core.dist.collectives import all_gather_into, all_to_all_parts, all_to_all_segments
from ns_multigpu.core.dist.world import World
from ns_multigpu.core.exchange.hierarchy import Hierarchy
from ns_multigpu.core.exchange.intra_node import IntraNodeCollectives, IntraNodePeerMemory
from ns_multigpu.core.exchange.pair_capacities import Pairs
from ns_multigpu.core.exchange.transport import Collective, Parts, RecordTransport, Returned
from ns_multigpu.core.kernels import Received, Rows
from ns_multigpu.core.row_wire import LOCAL, RowFormat, RowWire, WireSegments


class HierarchicalRows(RecordTransport):
    """Transport over several machines; see the module. Rows and gradients within a machine are not rounded.

    Capacities are [ranks][`Hierarchy.num_counts`]: of own rows by destination, and of forwarded rows.

    Args:
        half: between machines send as float16 where possible (`RowWire`).
        peer: True if the ranks of a machine share peer memory.

    Raises:
        ValueError: there are more ranks than the kernels support.
    """

    def __init__(
        self, world: World, kernels: RowFormat, rows: int, capacity: int | Pairs, words: int, *, half: bool = False,
        peer: bool = False,
    ) -> None:  # fmt: skip
        hierarchy = Hierarchy.of(world)
        assert hierarchy is not None, "`is_hierarchical` comes first"
        if hierarchy.per_machine > MOST_RANKS or hierarchy.ranks > MOST_SEGMENTS:
            raise ValueError(
                f"{world.machines} machines of {world.local_size} ranks: rows are exchanged between {MOST_SEGMENTS} "
                f"ranks at most, {MOST_RANKS} of a machine."
            )
        super().__init__(world, kernels, rows, capacity, words, numbers=hierarchy.num_counts)
        self.hierarchy, self.half, self.peer = hierarchy, half, peer
        self.num_destinations, self.destinations = hierarchy.num_destinations, hierarchy.destinations(world.rank)
        self.local_index = hierarchy.to_rank(world.local_rank)
        device, machines, here = world.device, range(world.machines), world.ranks_of(world.machine)
        self._out_rows = [hierarchy.sent_between(self.pairs, world.rank, k) for k in machines]
        self._in_rows = [hierarchy.sent_between(self.pairs, r, world.machine) for r in self._counterparts]
        self._within_rows = [[hierarchy.sent_within(self.pairs, source, target) for target in here] for source in here]
        self._received_rows = hierarchy.received(self.pairs, world.rank)
        self.lines = max(self._received_rows)
        # Between machines: the rows for each machine; the sent ones, then the received ones.
        wide = self._between.row_words
        self._in_at = wide * sum(self._out_rows)
        self._wire = torch.zeros(self._in_at + wide * sum(self._in_rows), dtype=torch.int32, device=device)
        self._out_segments = self._machine_segments(self._out_rows, 0, wide)
        self._in_segments = self._machine_segments(self._in_rows, self._in_at, wide)
        # Within the machine: for each rank counts by machine, and the rows; the received ones, then the sent ones.
        full = self._within.row_words
        own = world.local_rank
        self._within_words = [
            [world.machines + full * sum(rows) if a != b else 0 for b, rows in enumerate(of)]
            for a, of in enumerate(self._within_rows)
        ]
        self._out_at = [sum(row[b] for row in self._within_words) for b in range(world.local_size)]
        size = self._out_at[own] + sum(self._within_words[own])
        if peer:
            self._intra_node = IntraNodePeerMemory(world, most_words(hierarchy, self.pairs, full))
        else:
            self._intra_node = IntraNodeCollectives(world, size)
        self._local_place = torch.empty(0)  # [rows] lines of local rows, set by `send`
        starts_in = list(accumulate((row[own] for row in self._within_words), initial=0))
        starts_out = list(accumulate(self._within_words[own], initial=self._out_at[own]))
        self._from = [self._rank_segments(row[own], starts_in[a], a, full) for a, row in enumerate(self._within_rows)]
        self._to = [self._rank_segments(rows, starts_out[b], b, full) for b, rows in enumerate(self._within_rows[own])]
        self._received_segments = self._by_owner(self._from)
        # Positions of the counts.
        self._others = self._indices([k for k in machines if k != world.machine])
        locals_ = [b for b in range(world.local_size) if b != own]
        self._forward_counts_at = self._indices([starts_out[b] + k for b in locals_ for k in machines])
        self._received_counts_at = self._indices([starts_in[a] + k for a in locals_ for k in machines])
        self._locals = self._indices(locals_)
        # [machine, source] received rows; [machine, destination] rows that this rank sends within its machine.
        shape = (world.machines, world.local_size)
        self._received_counts = torch.zeros(shape, dtype=torch.int64, device=device)
        self._forward_counts = torch.zeros(shape, dtype=torch.int64, device=device)
        self._in_counts = torch.zeros(world.machines, dtype=torch.int64, device=device)
        self._num_sent, self._num_received = [[0] * world.machines] * 2  # rows of the step, set by `receive`
        self._places = [torch.empty(world.local_size, n, dtype=torch.int32, device=device) for n in self._in_rows]
        self._allocate_records(sum(self._received_rows))
        self._ends = [0, *accumulate(self._received_rows)]

    def send(self, rows: Rows, place: Tensor) -> None:
        inside, across = place.split([self.world.local_size, self.world.machines])
        self._local_place = inside[self.world.local_rank]
        self._within.pack(rows, inside, self._intra_node.memory, self._own_out)
        self._between.pack(rows, across, self._wire, self._out_segments)

    def receive(self, rows: Rows, counts: Tensor, views: int, patches: Sequence[int]) -> Parts[Received]:
        world, memory = self.world, self._intra_node.memory
        own, num_destinations = world.machine, self.hierarchy.num_destinations
        own_counts = counts[:num_destinations]

        def send() -> None:
            self._exchange_counts(own_counts[world.local_size :])
            words = self._between.row_words
            into = self._in_segments.filled(self._wire, self._num_received, words)
            out = self._out_segments.filled(self._wire, self._num_sent, words)
            self._exchange_between(into, out, self._within_words)

        yield Collective(send)
        incoming = self._between.unpack(self._wire, self._in_segments, self._in_counts, views)
        self._forward_counts[own] = own_counts[: world.local_size]
        mine = [n for k in range(0, len(patches), 6) for n in self._of_machine(patches[k : k + 6])]
        ends = [0, *accumulate(self._in_rows)]
        local = [(own, rows, self._local_place)]  # by machine, rows that this rank has and draws
        for k, place in enumerate(self._places):
            if k == own:
                continue
            some = self._between.lines(incoming, ends[k], ends[k + 1])
            count = self._in_counts[k : k + 1]
            route_lines(some.view_ids, count, some.means2d, some.radii, mine, place, self._forward_counts[k])
            starts = tuple(starts[k] for starts, _ in self._to)
            to = WireSegments(starts, tuple(rows[k] for _, rows in self._to), world.local_rank)
            self._within.pack(some, place, memory, to)
            local.append((k, some, place[world.local_rank]))
        forwarded = self._forward_counts.clone()
        forwarded[own] = 0  # these are counted as its own rows
        counts[num_destinations:] = forwarded.view(-1)
        memory[self._forward_counts_at] = self._forward_counts.T[self._locals].reshape(-1).int()
        yield from self._intra_node.exchange(self._within_words, self._out_at, [0] * world.local_size)
        by_machine = memory[self._received_counts_at].long().view(-1, world.machines)
        self._received_counts[:, world.local_rank] = self._forward_counts[:, world.local_rank]
        self._received_counts[:, self._locals] = by_machine.T
        received = self._within.unpack(memory, self._received_segments, self._received_counts.view(-1), views)
        for k, some, place in local:
            self._within.keep(some, place, received, self._received_segments, k * world.local_size + world.local_rank)
        return received

    def return_gradients(self, rows: Rows, place: Tensor, message: Tensor, views: range) -> Parts[Returned]:
        world, memory, own = self.world, self._intra_node.memory, self.world.local_rank
        words = self._within.gradient_words
        back = [
            [words * sum(self._within_rows[b][a]) if a != b else 0 for b in range(world.local_size)]
            for a in range(world.local_size)
        ]  # [who drew][who gave]
        out = list(accumulate(back[own], initial=0))
        drew = [self._rank_segments(of[own], out[a], a, words, 0) for a, of in enumerate(self._within_rows)]
        self._within.pack_gradients(self.records, self._received_counts.view(-1), memory, self._by_owner(drew))
        yield from self._intra_node.exchange(back, [0] * world.local_size, self._out_at)
        into = list(accumulate((row[own] for row in back), initial=self._out_at[own]))
        gave = [self._rank_segments(of, into[b], b, words, 0) for b, of in enumerate(self._within_rows[own])]
        summed: list[Tensor] = []
        for k, given in enumerate(self._places):
            if k != world.machine:
                summed.append(self._collected(k, given, self._in_counts[k : k + 1], gave))
        between_words = self._between.gradient_words
        to = self._machine_segments(self._in_rows, self._in_at, between_words)
        self._between.pack_gradients(torch.cat(summed), self._in_counts, self._wire, to)
        come = self._machine_segments(self._out_rows, 0, between_words)

        def send() -> None:
            into = come.filled(self._wire, self._num_sent, between_words)
            self._exchange_between(into, to.filled(self._wire, self._num_received, between_words), back)
            all_gather_into(self._messages, message, world)

        yield Collective(send)
        inside, across = place.split([world.local_size, world.machines])
        records = self._collected(world.machine, inside, rows.count, gave)
        none = self.records[:0]
        records.add_(self._between.collect(across, rows.count, self._wire, come, none))
        return Returned(rows, records, self._messages)

    @property
    def _within(self) -> RowWire:
        return self.kernels.wire(half=False, slots=False)

    @property
    def _between(self) -> RowWire:
        return self.kernels.wire(half=self.half, slots=False)

    @property
    def _counterparts(self) -> list[int]:
        """Ranks with which this one exchanges rows, by machine; itself on its own."""
        return [k * self.world.local_size + self.world.local_rank for k in range(self.world.machines)]

    @property
    def _own_out(self) -> WireSegments:
        """Segments of own rows for the ranks of this machine."""
        own = self.world.machine
        starts, sizes = zip(*((starts[own], rows[own]) for starts, rows in self._to), strict=True)
        return WireSegments(starts, sizes, self.world.local_rank)

    def _collected(
        self, machine: int, place: Tensor, count: Tensor, gave: Sequence[tuple[list[int], list[int]]]
    ) -> Tensor:
        """Return gradient sums of a machine's rows that this rank has forwarded, over the ranks that drew them."""
        own, rank = self.world.local_rank, machine * self.world.local_size + self.world.local_rank
        starts, sizes = zip(*((starts[machine], rows[machine]) for starts, rows in gave), strict=True)
        mine = self.records[self._ends[rank] : self._ends[rank + 1]]
        return self._within.collect(place, count, self._intra_node.memory, WireSegments(starts, sizes, own), mine)

    def _exchange_counts(self, sent: Tensor) -> None:
        """Exchange the numbers of rows [machines] with the counterparts on other machines, and read them."""
        received = sent.new_empty(len(self._others))
        one_each = [int(rank in self._counterparts and rank != self.world.rank) for rank in range(self.world.size)]
        all_to_all_parts(received, sent[self._others], one_each, one_each, self.world)
        self._in_counts[self._others] = received
        self._num_sent, self._num_received = torch.stack([sent, self._in_counts]).tolist()

    def _exchange_between(self, into: Sequence[Tensor], out: Sequence[Tensor], passed: Sequence[Sequence[int]]) -> None:
        """Exchange with the counterparts on other machines; count these bytes, and those through peer memory."""
        world = self.world
        receive, send = ([self._wire[:0]] * world.size for _ in range(2))
        for k, rank in enumerate(self._counterparts):
            receive[rank], send[rank] = into[k], out[k]
        if self.peer:
            world.traffic.add(4 * sum(passed[world.local_rank]))
        all_to_all_segments(receive, send, world)

    def _of_machine(self, patch: Sequence[int]) -> list[int]:
        """Return a patch with its rank's local number; nothing if another machine draws it."""
        rank, *rest = patch
        return [rank % self.world.local_size, *rest] if self.world.machine_of(rank) == self.world.machine else []

    def _machine_segments(self, rows: list[int], first: int, words: int) -> WireSegments:
        """Return consecutive segments of the machines from word `first` on."""
        starts = list(accumulate((words * n for n in rows), initial=first))[:-1]
        starts[self.world.machine] = 0  # no rows
        return WireSegments(tuple(starts), tuple(rows), self.world.machine)

    def _rank_segments(
        self, rows: list[int], first: int, other: int, words: int, head: int | None = None
    ) -> tuple[list[int], list[int]]:
        """Return the segments of rows sent to or from one rank of this machine, by machine: first words, and sizes.

        Args:
            rows: by machine. first: word of the part. other: that rank; rows for itself are local.
            words: of a row. head: before the rows; a number for each machine, unless given.
        """
        if other == self.world.local_rank:
            return [LOCAL] * len(rows), rows
        start = first + (self.world.machines if head is None else head)
        return list(accumulate((words * n for n in rows), initial=start))[:-1], rows

    def _by_owner(self, parts: Sequence[tuple[list[int], list[int]]]) -> WireSegments:
        """Return the segments of all owners, from each local rank's segments by machine."""
        machines = range(self.world.machines)
        starts = tuple(starts[k] for k in machines for starts, _ in parts)
        return WireSegments(starts, tuple(rows[k] for k in machines for _, rows in parts), self.world.rank)

    def _indices(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.world.device)


def most_words(hierarchy: Hierarchy, pairs: Pairs, words: int) -> int:
    """Return the words of the largest memory of any rank, for received and sent rows."""
    each = hierarchy.per_machine
    most = 0
    for rank in range(hierarchy.ranks):
        first = rank // each * each
        incoming, outgoing = (
            [sum(hierarchy.sent_within(pairs, *pair)) for pair in pairs_]
            for pairs_ in ([(first + a, rank) for a in range(each)], [(rank, first + a) for a in range(each)])
        )
        kept = sum(hierarchy.sent_within(pairs, rank, rank))
        most = max(most, words * (sum(incoming) + sum(outgoing) - 2 * kept) + 2 * (each - 1) * hierarchy.machines)
    return most
