"""Hierarchical all-to-all: relays that forward rows to the ranks of their machine, and each rank's counts.

A row needed on another machine is sent there once: to the rank with its owner's local number, its *relay*, which
forwards it. Gradients return the same way, and are summed on that machine first. So each rank exchanges rows with one
rank of each other machine, and with all of its own.

Traffic between machines never exceeds that of direct sends: the union of a machine's needs, not the sum.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from ns_multigpu.core.dist.world import World
from ns_multigpu.core.exchange.pair_capacities import Pairs


@dataclass(frozen=True)
class Relays:
    """The numbers that a rank counts in a step, by what they are of:

    - `inside`: its own rows for each rank of its machine;
    - `across`: its own rows for each machine (none for its own);
    - `handed`: the rows of its counterpart on each machine that it hands on to each rank of its own (none of its own).

    Attributes:
        machines, per_machine: ranks are machines * per_machine; those of a machine follow one another.
    """

    machines: int
    per_machine: int

    @staticmethod
    def of(world: World) -> "Relays | None":
        """Those of a world, or None where there is nothing to hand on: one machine, or machines of one rank."""
        several = world.machines > 1 and world.local_size > 1
        return Relays(world.machines, world.local_size) if several else None

    @property
    def ranks(self) -> int:
        """Ranks in all."""
        return self.machines * self.per_machine

    @property
    def directions(self) -> int:
        """Ways that a rank's own rows can take: the first of its numbers."""
        return self.per_machine + self.machines

    @property
    def numbers(self) -> int:
        """Number of counts per rank."""
        return self.directions + self.ranks

    def inside(self, local: int) -> int:
        """Return the index of the count of own rows for a rank of the own machine."""
        return local

    def across(self, machine: int) -> int:
        """Return the index of the count of own rows for a machine."""
        return self.per_machine + machine

    def handed(self, machine: int, local: int) -> int:
        """Return the index of the count of a machine's rows that are forwarded to a rank of the own one."""
        return self.directions + machine * self.per_machine + local

    def ways(self, rank: int) -> tuple[int, ...]:
        """By rank, the way that rows of `rank` take to it."""
        own = rank // self.per_machine
        return tuple(
            self.inside(other % self.per_machine) if other // self.per_machine == own
            else self.across(other // self.per_machine)
            for other in range(self.ranks)
        )  # fmt: skip

    def passed(self, pairs: Pairs, giver: int, taker: int) -> list[int]:
        """By machine, rows that one rank gives another of its machine: its own, and those that it hands on.

        Args:
            pairs: [ranks][numbers].
        """
        own, local, row = giver // self.per_machine, taker % self.per_machine, pairs[giver]
        return [row[self.inside(local) if k == own else self.handed(k, local)] for k in range(self.machines)]

    def crossing(self, pairs: Pairs, rank: int, machine: int) -> int:
        """Rows that a rank sends to its counterpart on a machine: 0 to its own."""
        return 0 if rank // self.per_machine == machine else pairs[rank][self.across(machine)]

    def arriving(self, pairs: Pairs, rank: int) -> list[int]:
        """Return by owner the rows that a rank receives to draw, its own included."""
        first = rank // self.per_machine * self.per_machine
        givers = [self.passed(pairs, first + local, rank) for local in range(self.per_machine)]
        return [givers[local][machine] for machine in range(self.machines) for local in range(self.per_machine)]

    def numbers_of(self, table: Pairs) -> Pairs:
        """Return all ranks' counts, from each one's rows for each rank, and then for all ranks of each machine.

        Args:
            table: [ranks][ranks + machines].
        """
        return tuple(self._numbers_of(table, rank) for rank in range(self.ranks))

    def _numbers_of(self, table: Pairs, rank: int) -> tuple[int, ...]:
        own, local = divmod(rank, self.per_machine)
        here = slice(own * self.per_machine, (own + 1) * self.per_machine)
        across = [0 if k == own else table[rank][self.ranks + k] for k in range(self.machines)]
        none = (0,) * self.per_machine
        handed = [none if k == own else table[k * self.per_machine + local][here] for k in range(self.machines)]
        return (*table[rank][here], *across, *(n for numbers in handed for n in numbers))

    def step_bytes(
        self, pairs: Pairs, rank: int, rows: Sequence[int], gradients: Sequence[int], words: int
    ) -> tuple[int, int]:
        """Bytes that a rank sends in a step to ranks of its machine, and to other machines.

        Args:
            pairs: rows that go on the wire: capacities.
            rows, gradients: bytes of a row, and of its gradients: inside a machine, and between two.
            words: int64 numbers of a rank's message. All go around a ring: the last rank of a machine sends to another.
        """
        own, local = divmod(rank, self.per_machine)
        inside = between = 0
        for machine in range(self.machines):
            if machine != own:
                there = self.crossing(pairs, rank, machine)
                back = self.crossing(pairs, machine * self.per_machine + local, own)
                between += rows[1] * there + gradients[1] * back + 4
        for other in range(self.per_machine):
            if other != local:
                peer = own * self.per_machine + other
                there, back = sum(self.passed(pairs, rank, peer)), sum(self.passed(pairs, peer, rank))
                inside += rows[0] * there + gradients[0] * back + 4 * self.machines
        messages = 8 * words * (self.ranks - 1)
        return (inside, between + messages) if local == self.per_machine - 1 else (inside + messages, between)
