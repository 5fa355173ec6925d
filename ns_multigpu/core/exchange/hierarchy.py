"""Hierarchical all-to-all: who forwards rows, and what each rank counts.

A row needed on another machine is sent there once: to the rank with its owner's local number, its *relay*. The relay
forwards it to the ranks of its machine. Gradients return on the same path, and are summed on that machine first. So
each rank exchanges rows with one rank of each other machine, and with all of its own.

Traffic between machines never exceeds that of direct sends: the union of a machine's needs, not the sum.
"""

from dataclasses import dataclass

from ns_multigpu.core.dist.world import World
from ns_multigpu.core.exchange.pair_capacities import Pairs


@dataclass(frozen=True)
class Hierarchy:
    """Layout of the counts of a rank in a step:

    - `to_rank`: own rows for each rank of its machine;
    - `to_machine`: own rows for each machine (none for its own);
    - `forwarded`: rows of the counterpart on each machine, for each rank of its own machine (none of its own machine).

    Attributes:
        machines, per_machine: ranks are machines * per_machine; those of a machine are consecutive.
    """

    machines: int
    per_machine: int

    @staticmethod
    def of(world: World) -> "Hierarchy | None":
        """Return the layout of a world; None for one machine, or machines of one rank, which forward nothing."""
        several = world.machines > 1 and world.local_size > 1
        return Hierarchy(world.machines, world.local_size) if several else None

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return self.machines * self.per_machine

    @property
    def num_destinations(self) -> int:
        """Number of destinations of own rows; their counts come first."""
        return self.per_machine + self.machines

    @property
    def num_counts(self) -> int:
        """Number of counts per rank."""
        return self.num_destinations + self.ranks

    def to_rank(self, local: int) -> int:
        """Return the index of the count of own rows for a rank of the own machine."""
        return local

    def to_machine(self, machine: int) -> int:
        """Return the index of the count of own rows for a machine."""
        return self.per_machine + machine

    def forwarded(self, machine: int, local: int) -> int:
        """Return the index of the count of a machine's rows that are forwarded to a rank of the own one."""
        return self.num_destinations + machine * self.per_machine + local

    def destinations(self, rank: int) -> tuple[int, ...]:
        """Return the destination of rows of `rank` to each rank."""
        own = rank // self.per_machine
        return tuple(
            self.to_rank(other % self.per_machine) if other // self.per_machine == own
            else self.to_machine(other // self.per_machine)
            for other in range(self.ranks)
        )  # fmt: skip

    def sent_within(self, pairs: Pairs, source: int, target: int) -> list[int]:
        """Return by machine the rows that one rank sends to another of its machine: its own, and forwarded ones.

        Args:
            pairs: [ranks][numbers].
        """
        own, local, row = source // self.per_machine, target % self.per_machine, pairs[source]
        return [row[self.to_rank(local) if k == own else self.forwarded(k, local)] for k in range(self.machines)]

    def sent_between(self, pairs: Pairs, rank: int, machine: int) -> int:
        """Return the rows that a rank sends to its counterpart on a machine; 0 for its own."""
        return 0 if rank // self.per_machine == machine else pairs[rank][self.to_machine(machine)]

    def received(self, pairs: Pairs, rank: int) -> list[int]:
        """Return by owner the rows that a rank receives to draw, its own included."""
        first = rank // self.per_machine * self.per_machine
        sources = [self.sent_within(pairs, first + local, rank) for local in range(self.per_machine)]
        return [sources[local][machine] for machine in range(self.machines) for local in range(self.per_machine)]

    def counts_of(self, table: Pairs) -> Pairs:
        """Return all ranks' counts, from each one's rows for each rank, and then for all ranks of each machine.

        Args:
            table: [ranks][ranks + machines].
        """
        return tuple(self._counts_of(table, rank) for rank in range(self.ranks))

    def _counts_of(self, table: Pairs, rank: int) -> tuple[int, ...]:
        own, local = divmod(rank, self.per_machine)
        here = slice(own * self.per_machine, (own + 1) * self.per_machine)
        across = [0 if k == own else table[rank][self.ranks + k] for k in range(self.machines)]
        none = (0,) * self.per_machine
        forwarded = [none if k == own else table[k * self.per_machine + local][here] for k in range(self.machines)]
        return (*table[rank][here], *across, *(n for numbers in forwarded for n in numbers))
