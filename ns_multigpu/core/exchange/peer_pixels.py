"""Pixels that ranks write into each other's memory, in place of a collective."""

from collections.abc import Sequence

from torch import Tensor

from ns_multigpu.core.dist.peer_memory import PeerBuffer
from ns_multigpu.core.dist.world import World
from ns_multigpu.core.exchange.transport import Collective, Parts


class PeerPixels:
    """Two regions of each rank's memory that all ranks write: one for pixels, one for their gradients.

    An exchange ends with a barrier on the devices. A rank writes pixels only after the barrier of the gradients, when
    no rank reads the old pixels any more, and gradients only after that of the next pixels.

    Args:
        world: the ranks, all of which make theirs together.
        numbers: maximum float32 numbers that a rank receives at once, the same on every rank.
    """

    def __init__(self, world: World, numbers: int) -> None:
        self.numbers, self._world = numbers, world
        self._buffer = PeerBuffer(2 * 4 * numbers, world)

    def exchange(self, out: Tensor, sizes: Sequence[Sequence[int]], region: int) -> Parts[Tensor]:
        """Exchange numbers; return those received, in the order of ranks, as part of the region.

        Args:
            out: what this rank sends, contiguous: that for rank 0 first. sizes: [source][destination] numbers; 0 from a
                rank to itself. region: 0 and 1 alternately.
        """
        me, start, view = self._world.rank, 0, self._buffer.view
        for other, size in enumerate(sizes[me]):
            if size:
                place = sum(row[other] for row in sizes[:me])
                there = view(other, self._at(region) + place * out.itemsize, (size,), out.dtype)
                there.copy_(out.view(-1)[start : start + size])
            start += size
        if self._world.members is None:
            self._buffer.barrier()
        else:
            yield Collective(lambda: None)
        return view(me, self._at(region), (sum(row[me] for row in sizes),), out.dtype)

    def _at(self, region: int) -> int:
        return region * 4 * self.numbers
