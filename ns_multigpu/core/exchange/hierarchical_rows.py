"""Exchange of rows over several machines: within a machine through its own memory, and once to each other machine.

    there: own rows -> relays on other machines (collective) -> all that draws them on this machine (`Inside`)
    back:  who drew them -> their owner, or the relay that gave them (`Inside`), which sums -> owners (collective)

A row needed on another machine is sent to one of its ranks, the relay (`Relays`). That one has the row's place and
size, and so finds out by itself, with the operator that the owner uses, which ranks of its machine the row touches.
What a rank draws still comes in segments by owner, in the order of the owners' lines: drawing is as with one machine.

Gradients are added up in an order of their own, the same in each run: an owner adds what the ranks of its machine
return, in the ranks' order, to what the machines return, in the machines' order; a relay adds in its ranks' order.
"""

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from cuda_ext.ops.exchange.row_exchange import MOST_RANKS, route_lines
from cuda_ext.ops.exchange.row_wire import MOST_SEGMENTS
from ns_multigpu.core.dist.collectives import all_gather_into, all_to_all_parts
from ns_multigpu.core.dist.world import World
from ns_multigpu.core.exchange.hierarchy import Relays
from ns_multigpu.core.exchange.intra_node import ByCollectives, ByPeerMemory
from ns_multigpu.core.exchange.pair_capacities import Pairs
from ns_multigpu.core.exchange.transport import Collective, Parts, Returned, Transport
from ns_multigpu.core.kernels import Arrived, Rows, Sinks
from ns_multigpu.core.row_wire import STAYS, RowFormat, RowWire, WireSegments


class RelayedRows(Transport):
    """See above. Rows and gradients inside a machine are not rounded.

    Capacities are [ranks][`Relays.numbers`]: they are of own rows for each way, and of rows that are handed on.

    Args:
        half: between machines send as float16 where possible (`RowWire`).
        peer: the ranks of a machine share peer memory.

    Raises:
        ValueError: there are more ranks than the kernels know.
    """

    def __init__(
        self, world: World, kernels: RowFormat, rows: int, capacity: int | Pairs, words: int, *, half: bool = False,
        peer: bool = False,
    ) -> None:  # fmt: skip
        relays = Relays.of(world)
        assert relays is not None, "asked before: see `make_transport`"
        if relays.directions > MOST_RANKS or relays.ranks > MOST_SEGMENTS:
            raise ValueError(
                f"{world.machines} machines of {world.local_size} ranks: rows travel where machines and the ranks of "
                f"one are {MOST_RANKS} together at most, and ranks {MOST_SEGMENTS} in all."
            )
        super().__init__(world, kernels, rows, capacity, words, numbers=relays.numbers)
        self.relays, self.half, self.peer = relays, half, peer
        self.directions, self.ways = relays.directions, relays.ways(world.rank)
        self.stays = relays.inside(world.local_rank)
        device, machines, here = world.device, range(world.machines), world.ranks_of(world.machine)
        self._leaving = [relays.crossing(self.pairs, world.rank, k) for k in machines]
        self._meeting = [relays.crossing(self.pairs, r, world.machine) for r in self._counterparts]
        self._passed = [[relays.passed(self.pairs, giver, taker) for taker in here] for giver in here]
        self._coming = relays.arriving(self.pairs, world.rank)
        self.lines = max(self._coming)
        # What crosses: a number of rows, and the rows, for each machine. What leaves, and then what comes.
        wide = self._between.row_words
        self._sent = [wide * n + 1 if k != world.machine else 0 for k, n in enumerate(self._leaving)]
        self._got = [wide * n + 1 if k != world.machine else 0 for k, n in enumerate(self._meeting)]
        self._wire = torch.zeros(sum(self._sent) + sum(self._got), dtype=torch.int32, device=device)
        self._leave_at = self._crossing(self._leaving, 0, wide, 1)
        self._meet_at = self._crossing(self._meeting, sum(self._sent), wide, 1)
        # What is passed on inside: to each rank a number of rows by machine, and these rows. In each rank's memory what
        # comes, and what leaves.
        full = self._within.row_words
        own = world.local_rank
        self._parts = [
            [world.machines + full * sum(rows) if a != b else 0 for b, rows in enumerate(of)]
            for a, of in enumerate(self._passed)
        ]
        self._out_at = [sum(row[b] for row in self._parts) for b in range(world.local_size)]
        size = self._out_at[own] + sum(self._parts[own])
        if peer:
            self._inside = ByPeerMemory(world, most_words(relays, self.pairs, full))
        else:
            self._inside = ByCollectives(world, size)
        self._stay = torch.empty(0)  # [rows] lines of local rows, set by `leave`
        come = list(accumulate((row[own] for row in self._parts), initial=0))
        leave = list(accumulate(self._parts[own], initial=self._out_at[own]))
        self._from = [self._passing(row[own], come[a], a, full) for a, row in enumerate(self._passed)]
        self._to = [self._passing(rows, leave[b], b, full) for b, rows in enumerate(self._passed[own])]
        self._come_at = self._by_owner(self._from)
        # Where the numbers of rows stand.
        others = [k for k in machines if k != world.machine]
        self._sent_counts = self._indices([self._leave_at.starts[k] - 1 for k in others])
        self._got_counts = self._indices([self._meet_at.starts[k] - 1 for k in others])
        self._others = self._indices(others)
        locals_ = [b for b in range(world.local_size) if b != own]
        self._passed_counts = self._indices([leave[b] + k for b in locals_ for k in machines])
        self._come_counts = self._indices([come[a] + k for a in locals_ for k in machines])
        self._locals = self._indices(locals_)
        # [machine, giver] how many rows have come to be drawn; [machine, taker] how many this rank passes on.
        shape = (world.machines, world.local_size)
        self._arrived = torch.zeros(shape, dtype=torch.int64, device=device)
        self._gives = torch.zeros(shape, dtype=torch.int64, device=device)
        self._met = torch.zeros(world.machines, dtype=torch.int64, device=device)
        self._places = [torch.empty(world.local_size, n, dtype=torch.int32, device=device) for n in self._meeting]
        lines = sum(self._coming) if words else 0  # without step statistics there is no backward
        self.records = torch.zeros(lines, kernels.record_floats, device=device)
        self._ends = [0, *accumulate(self._coming)]
        self._lines = torch.arange(lines, dtype=torch.int32, device=device)
        self._here = torch.zeros(lines, dtype=torch.int32, device=device)
        self._at = torch.tensor([self.records.data_ptr()], dtype=torch.int64, device=device)
        self._everyone = torch.zeros(world.size, words, dtype=torch.int64, device=device)

    @property
    def step_bytes(self) -> tuple[int, int]:
        """Bytes that this rank sends in a step to ranks of its machine, and to other machines."""
        inside, between = self._within, self._between
        rows, gradients = (inside.row_words, between.row_words), (inside.gradient_words, between.gradient_words)
        return self.relays.step_bytes(
            self.pairs, self.world.rank, [4 * n for n in rows], [4 * n for n in gradients], self.words
        )

    def leave(self, rows: Rows, place: Tensor) -> None:
        inside, across = place.split([self.world.local_size, self.world.machines])
        self._stay = inside[self.world.local_rank]
        self._within.pack(rows, inside, self._inside.memory, self._own_out, 0, self.rows)
        self._between.pack(rows, across, self._wire, self._leave_at, 0, self.rows)

    def arrive(self, rows: Rows, counts: Tensor, views: int, patches: Sequence[int]) -> Parts[Arrived]:
        world, memory = self.world, self._inside.memory
        own, directions = world.machine, self.relays.directions
        ways = counts[:directions]
        self._wire[self._sent_counts] = ways[world.local_size :][self._others].int()
        out, into = self._wire.split([sum(self._sent), sum(self._got)])
        between = into, self._got, out, self._sent, self._parts
        yield Collective(lambda: self._cross(*between))
        self._met[self._others] = self._wire[self._got_counts].long()
        met = self._between.unpack(self._wire, self._meet_at, self._met, views)
        self._gives[own] = ways[: world.local_size]
        mine = [n for k in range(0, len(patches), 6) for n in self._of_machine(patches[k : k + 6])]
        ends = [0, *accumulate(self._meeting)]
        kept = [(own, rows, self._stay)]  # by machine, what this rank draws of what it has or hands on
        for k, place in enumerate(self._places):
            if k == own:
                continue
            some = self._between.lines(met, ends[k], ends[k + 1])
            size, count = ends[k + 1] - ends[k], self._met[k : k + 1]
            route_lines(some.view_ids, count, some.means2d, some.radii, mine, 0, size, place, self._gives[k])
            starts = tuple(starts[k] for starts, _ in self._to)
            to = WireSegments(starts, tuple(rows[k] for _, rows in self._to), world.local_rank)
            self._within.pack(some, place, memory, to, 0, size)
            kept.append((k, some, place[world.local_rank]))
        handed = self._gives.clone()
        handed[own] = 0  # these are counted as its own rows
        counts[directions:] = handed.view(-1)
        memory[self._passed_counts] = self._gives.T[self._locals].reshape(-1).int()
        yield from self._inside.exchange(self._parts, self._out_at, [0] * world.local_size)
        come = memory[self._come_counts].long().view(-1, world.machines)
        self._arrived[:, world.local_rank] = self._gives[:, world.local_rank]
        self._arrived[:, self._locals] = come.T
        arrived = self._within.unpack(memory, self._come_at, self._arrived.view(-1), views)
        for k, some, place in kept:
            self._within.keep(some, place, arrived, self._come_at, k * world.local_size + world.local_rank)
        return arrived

    def sinks(self, owners: Tensor, slots: Tensor) -> Sinks:
        self.records.zero_()
        return Sinks(self._at, self._here, self._lines, system_scope=False)

    def bring_back(self, rows: Rows, place: Tensor, message: Tensor, views: range) -> Parts[Returned]:
        world, memory, own = self.world, self._inside.memory, self.world.local_rank
        words = self._within.gradient_words
        back = [
            [words * sum(self._passed[b][a]) if a != b else 0 for b in range(world.local_size)]
            for a in range(world.local_size)
        ]  # [who drew][who gave]
        out = list(accumulate(back[own], initial=0))
        drew = [self._passing(of[own], out[a], a, words, 0) for a, of in enumerate(self._passed)]
        self._within.pack_gradients(self.records, self._arrived.view(-1), memory, self._by_owner(drew))
        yield from self._inside.exchange(back, [0] * world.local_size, self._out_at)
        into = list(accumulate((row[own] for row in back), initial=self._out_at[own]))
        gave = [self._passing(of, into[b], b, words, 0) for b, of in enumerate(self._passed[own])]
        summed: list[Tensor] = []
        for k, given in enumerate(self._places):
            if k != world.machine:
                summed.append(self._collected(k, given, self._met[k : k + 1], gave))
        crossing = self._between.gradient_words
        to = self._crossing(self._meeting, sum(self._sent), crossing, 0)
        self._between.pack_gradients(torch.cat(summed), self._met, self._wire, to)
        come = self._crossing(self._leaving, 0, crossing, 0)
        got, sent = ([crossing * n for n in rows] for rows in (self._leaving, self._meeting))
        there, home = self._wire[sum(self._sent) :][: sum(sent)], self._wire[: sum(got)]

        def send() -> None:
            self._cross(home, got, there, sent, back)
            all_gather_into(self._everyone, message, world)

        yield Collective(send)
        inside, across = place.split([world.local_size, world.machines])
        records = self._collected(world.machine, inside, rows.count, gave)
        none = self.records[:0]
        return Returned(
            rows, records.add_(self._between.collect(across, rows.count, self._wire, come, none)), self._everyone
        )

    @property
    def _within(self) -> RowWire:
        return self.kernels.wire(half=False, slots=False)

    @property
    def _between(self) -> RowWire:
        return self.kernels.wire(half=self.half, slots=False)

    @property
    def _counterparts(self) -> list[int]:
        """By machine, the rank that this one exchanges rows with there; itself on its own."""
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
        return self._within.collect(place, count, self._inside.memory, WireSegments(starts, sizes, own), mine)

    def _cross(
        self, into: Tensor, got: list[int], out: Tensor, sent: list[int], passed: Sequence[Sequence[int]]
    ) -> None:
        """Between machines, each rank with its counterparts. Counts, too, what peers pass each other in this way."""
        world = self.world
        receive, send = ([0] * world.size for _ in range(2))
        for k, rank in enumerate(self._counterparts):
            receive[rank], send[rank] = got[k], sent[k]
        if self.peer:
            world.traffic.add(4 * sum(passed[world.local_rank]))
        all_to_all_parts(into, out, receive, send, world)

    def _of_machine(self, patch: Sequence[int]) -> list[int]:
        """A patch with its rank's number on this machine; nothing where another machine draws it."""
        rank, *rest = patch
        return [rank % self.world.local_size, *rest] if self.world.machine_of(rank) == self.world.machine else []

    def _crossing(self, rows: list[int], first: int, words: int, head: int) -> WireSegments:
        """Segments of the machines, one behind the other from word `first` on, each behind `head` words."""
        sizes = [words * n + (head if k != self.world.machine else 0) for k, n in enumerate(rows)]
        starts = [start + head for start in list(accumulate(sizes, initial=first))[:-1]]
        starts[self.world.machine] = 0  # no rows
        return WireSegments(tuple(starts), tuple(rows), self.world.machine)

    def _passing(
        self, rows: list[int], first: int, other: int, words: int, head: int | None = None
    ) -> tuple[list[int], list[int]]:
        """Return the segments of rows sent to or from one rank of this machine, by machine: first words, and sizes.

        Args:
            rows: by machine. first: word of the part. other: that rank; what a rank passes itself stays.
            words: of a row. head: before the rows; a number for each machine, unless given.
        """
        if other == self.world.local_rank:
            return [STAYS] * len(rows), rows
        start = first + (self.world.machines if head is None else head)
        return list(accumulate((words * n for n in rows), initial=start))[:-1], rows

    def _by_owner(self, parts: Sequence[tuple[list[int], list[int]]]) -> WireSegments:
        """The segments of all owners, given for each rank of this machine where those of each machine stand."""
        machines = range(self.world.machines)
        starts = tuple(starts[k] for k in machines for starts, _ in parts)
        return WireSegments(starts, tuple(rows[k] for k in machines for _, rows in parts), self.world.rank)

    def _indices(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.world.device)


def most_words(relays: Relays, pairs: Pairs, words: int) -> int:
    """Words of the largest memory of any rank: what comes and leaves."""
    each = relays.per_machine
    most = 0
    for rank in range(relays.ranks):
        first = rank // each * each
        givers, takers = (
            [sum(relays.passed(pairs, *pair)) for pair in pairs_]
            for pairs_ in ([(first + a, rank) for a in range(each)], [(rank, first + a) for a in range(each)])
        )
        kept = sum(relays.passed(pairs, rank, rank))
        most = max(most, words * (sum(givers) + sum(takers) - 2 * kept) + 2 * (each - 1) * relays.machines)
    return most
