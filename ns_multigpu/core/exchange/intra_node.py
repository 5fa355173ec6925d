"""Exchange within one machine in a fused step, which reads nothing back: through peer memory, or by collectives.

Each rank has one memory of words of 4 bytes. An exchange moves parts of it into the memories of the machine's other
ranks: of each rank the parts for the others follow one another, and so do those that come to it.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ns_multigpu.core.dist.collectives import all_to_all_parts
from ns_multigpu.core.dist.peer_memory import PeerBuffer
from ns_multigpu.core.dist.world import World
from ns_multigpu.core.exchange.transport import Collective, Parts


def machine_world(world: World) -> World:
    """The ranks of this machine as a world of their own; what it sends counts as the whole's traffic."""
    alone = world.local_size == 1
    group = None if alone else world.local_group
    return replace(world, rank=world.local_rank, size=world.local_size, group=group, control=None)


class Inside(ABC):
    """One rank's side.

    Attributes:
        memory: [words] int32, with anything in it at first: another rank may be ahead, and have written there already.
    """

    memory: Tensor

    @abstractmethod
    def exchange(self, sizes: Sequence[Sequence[int]], out_at: Sequence[int], in_at: Sequence[int]) -> Parts[None]:
        """Move parts to where they belong. Every rank of the machine calls it with the same.

        Args:
            sizes: [from][to] words, by the machine's own numbers of its ranks; none from a rank to itself.
            out_at, in_at: by rank, where in its memory what leaves begins, and what comes.
        """


class ByCollectives(Inside):
    """All-to-all in the group of the machine's ranks.

    Args:
        world: all ranks. words: of this rank's memory.
    """

    def __init__(self, world: World, words: int) -> None:
        self._world = machine_world(world)
        self.memory = torch.empty(words, dtype=torch.int32, device=world.device)

    def exchange(self, sizes: Sequence[Sequence[int]], out_at: Sequence[int], in_at: Sequence[int]) -> Parts[None]:
        me = self._world.rank
        leaves, comes = list(sizes[me]), [row[me] for row in sizes]
        out = self.memory[out_at[me] : out_at[me] + sum(leaves)]
        into = self.memory[in_at[me] : in_at[me] + sum(comes)]
        yield Collective(lambda: all_to_all_parts(into, out, comes, leaves, self._world))


class ByPeerMemory(Inside):
    """Each rank copies its parts into the others' memories, and all wait, on their devices, until all have.

    An exchange may overwrite data of the one before last: no rank still reads it, because all have passed
    the barrier of the last one since.

    Args:
        world: all ranks, which make it together. words: of the largest memory of any rank: the same on all.
    """

    def __init__(self, world: World, words: int) -> None:
        self._world = world
        self._buffer = PeerBuffer(4 * max(words, 1), world, machine=True)
        self.memory = self._part(world.local_rank, 0, words)

    def exchange(self, sizes: Sequence[Sequence[int]], out_at: Sequence[int], in_at: Sequence[int]) -> Parts[None]:
        yield from ()
        me, start = self._world.local_rank, out_at[self._world.local_rank]
        for other, size in enumerate(sizes[me]):
            if size:
                there = in_at[other] + sum(row[other] for row in sizes[:me])
                self._part(other, there, size).copy_(self.memory[start : start + size])
            start += size
        self._buffer.barrier()

    def _part(self, rank: int, first: int, words: int) -> Tensor:
        return self._buffer.view(rank, 4 * first, (words,), torch.int32)
