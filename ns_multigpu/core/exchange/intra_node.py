"""Exchange within one machine without readback: through peer memory, or by collectives.

Each rank has a buffer of 4-byte words. An exchange copies parts of it into the buffers of the machine's other ranks. A
rank's sent parts are consecutive, and so are its received parts.
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


def intra_node_world(world: World) -> World:
    """Return the ranks of this machine as a world of its own; it shares the traffic counter."""
    alone = world.local_size == 1
    group = None if alone else world.local_group
    return replace(world, rank=world.local_rank, size=world.local_size, group=group, control=None)


class IntraNodeExchange(ABC):
    """One rank's side.

    Attributes:
        memory: [words] int32, not initialized: a rank that is ahead may have written to it already.
    """

    memory: Tensor

    @abstractmethod
    def exchange(self, sizes: Sequence[Sequence[int]], out_at: Sequence[int], in_at: Sequence[int]) -> Parts[None]:
        """Exchange parts. All ranks of the machine call it with the same arguments.

        Args:
            sizes: [source][destination] words, by local rank; 0 from a rank to itself.
            out_at, in_at: by local rank, the first word of its sent, and of its received parts.
        """


class IntraNodeCollectives(IntraNodeExchange):
    """All-to-all in the group of the machine's ranks.

    Args:
        world: all ranks. words: of this rank's memory.
    """

    def __init__(self, world: World, words: int) -> None:
        self._world = intra_node_world(world)
        self.memory = torch.empty(words, dtype=torch.int32, device=world.device)

    def exchange(self, sizes: Sequence[Sequence[int]], out_at: Sequence[int], in_at: Sequence[int]) -> Parts[None]:
        me = self._world.rank
        sent, received = list(sizes[me]), [row[me] for row in sizes]
        out = self.memory[out_at[me] : out_at[me] + sum(sent)]
        into = self.memory[in_at[me] : in_at[me] + sum(received)]
        yield Collective(lambda: all_to_all_parts(into, out, received, sent, self._world))


class IntraNodePeerMemory(IntraNodeExchange):
    """Copies into the other ranks' peer memory, followed by a barrier on the devices.

    An exchange may overwrite data of the one before last. No rank still reads these: all have passed the last one's
    barrier.

    Args:
        world: all ranks; they create it together. words: of the largest memory of any rank, the same on all.
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
