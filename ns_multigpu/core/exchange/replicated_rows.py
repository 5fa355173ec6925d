"""Rows that are drawn where they are, and what ranks then tell each other of them.

Ranks that hold the same points tell each other their rows, by a collective (`ReplicatedRows`) or, on GPUs that reach
each other's memory, by writing them there (`PeerReplicas`): what NCCL gathers through buffers of its own, and what no
CUDA graph can hold, is then a few copies and two barriers that the devices pass without their hosts. So a step is one
graph.
"""

from collections.abc import Generator, Sequence
from contextlib import contextmanager

import torch
from cuda_ext.ops.exchange.put_rows import put_rows
from torch import Tensor

from ns_multigpu.core.dist.collectives import all_gather_into, all_gather_together
from ns_multigpu.core.dist.peer_memory import PeerBuffer
from ns_multigpu.core.dist.world import World
from ns_multigpu.core.exchange.pair_capacities import Pairs
from ns_multigpu.core.exchange.transport import Collective, Parts, Returned, Transport
from ns_multigpu.core.kernels import Arrived, Kernels, Rows, Sinks

_ALIGN = 256
_BEGUN = 1
"""The channel of the barrier at a step's begin, beside which the one at its end may be waited for."""
_MOST_SPARE = 1 << 20
"""Rows that there is room for beside those that were asked for, at most."""


class OwnRows(Transport):
    """Rows are drawn where they are: for a rank that is alone."""

    travels = False
    lasts = False

    def __init__(self, world: World, kernels: Kernels, rows: int, capacity: int | Pairs, words: int) -> None:
        super().__init__(world, kernels, rows, capacity, words)
        self._grow_capacity(rows)

    def _grow_capacity(self, rows: int) -> None:
        """For so many rows of this rank's own."""
        device = self.world.device
        self.rows = self.lines = rows
        # Where there is no message there is no way back.
        self._table = torch.zeros(rows if self.words else 0, self.kernels.record_floats, device=device)
        self._at = torch.tensor([self._table.data_ptr()], dtype=torch.int64, device=device)
        self._slots = torch.arange(rows, dtype=torch.int32, device=device)
        self._here = torch.zeros(rows, dtype=torch.int32, device=device)

    def leave(self, rows: Rows, place: Tensor) -> None:
        return

    def arrive(self, rows: Rows, counts: Tensor, views: int, patches: Sequence[int]) -> Parts[Arrived]:
        yield from ()
        return self.kernels.stay(rows, self._here, self._slots)

    def sinks(self, owners: Tensor, slots: Tensor) -> Sinks:
        self._table.zero_()
        return Sinks(self._at, owners, slots, system_scope=False)

    def bring_back(self, rows: Rows, place: Tensor, message: Tensor, views: range) -> Parts[Returned]:
        yield from ()
        return Returned(rows, self._table, message[None])


class KeptRows(OwnRows):
    """Rows are drawn where they are, by ranks that go on together: all take the step, or none does."""

    def __init__(self, world: World, kernels: Kernels, rows: int, capacity: int | Pairs, words: int) -> None:
        super().__init__(world, kernels, rows, capacity, words)
        self._messages = torch.zeros(world.size, words, dtype=torch.int64, device=world.device)

    def bring_back(self, rows: Rows, place: Tensor, message: Tensor, views: range) -> Parts[Returned]:
        yield Collective(lambda: all_gather_into(self._messages, message, self.world))
        return Returned(rows, self._table, self._messages)


class ReplicatedRows(OwnRows):
    """Rows are drawn where they are, and told, with their gradients, to all other ranks, which hold the same points:
    each then takes the same step."""

    def __init__(self, world: World, kernels: Kernels, rows: int, capacity: int | Pairs, words: int) -> None:
        super().__init__(world, kernels, rows, capacity, words)
        self._replicas = kernels.replicas(world.size, rows, world.device)
        self._messages = torch.zeros(world.size, words, dtype=torch.int64, device=world.device)

    def bring_back(self, rows: Rows, place: Tensor, message: Tensor, views: range) -> Parts[Returned]:
        mine = [message, *self._replicas.mine(rows, self._table, views.start)]
        yield Collective(lambda: all_gather_together([self._messages, *self._replicas.everyone], mine, self.world))
        everyone, records = self._replicas.rows(self._messages[:, 0])
        return Returned(everyone, records, self._messages, views)


class PeerReplicas(OwnRows):
    """Rows are drawn where they are, and written, with their gradients, into the memory of all ranks, which hold the
    same points: each then takes the same step.

    A step has two barriers: behind the first, at its begin, nobody reads what was written in the step before any more;
    behind the second all have written. As many rows are written as there are: there is room for more.

    Raises:
        RuntimeError: there is no peer memory (see `PeerBuffer`).
    """

    lasts = True

    def __init__(self, world: World, kernels: Kernels, rows: int, capacity: int | Pairs, words: int) -> None:
        super().__init__(world, kernels, rows, capacity, words)
        # So that each rank's lines of each array begin at a multiple of 16 bytes.
        self._most = -(-(rows + min(rows, _MOST_SPARE)) // 4) * 4
        self._replicas = kernels.replicas(world.size, self._most, world.device)
        first = [torch.zeros(world.size, words, dtype=torch.int64, device=world.device), *self._replicas.everyone]
        starts = [0]
        for tensor in first:
            starts.append(starts[-1] + -(-tensor.nbytes // _ALIGN) * _ALIGN)
        self._buffer = buffer = PeerBuffer(starts[-1], world)
        here, ranks = world.rank, range(world.size)
        own = [buffer.view(here, at, one.shape, one.dtype) for at, one in zip(starts, first, strict=False)]
        self._messages, self._replicas.everyone = own[0], own[1:]
        # Where each rank keeps what this one tells, as numbers of 32 bits: [ranks][tensors].
        shares = [one.nbytes // world.size for one in first]
        places = list(zip(starts, shares, strict=False))
        self._theirs = [
            [buffer.view(rank, at + here * size, (size // 4,), torch.int32) for at, size in places] for rank in ranks
        ]
        addresses = [[one.data_ptr() for one in theirs[1:]] for theirs in self._theirs]
        self._places = torch.tensor(addresses, dtype=torch.int64, device=world.device)
        self._line_bytes = 0  # of what is told of a row
        self._side = torch.cuda.Stream(world.device) if world.device.type == "cuda" else None

    def fit(self, rows: int) -> bool:
        """Serves steps of so many rows from now on, if there is room for them, and not far too much: ranks take 20 ms
        to make another."""
        if not rows <= self._most <= 2 * rows + 2 * _MOST_SPARE:
            return False
        self._grow_capacity(rows)
        return True

    def arrive(self, rows: Rows, counts: Tensor, views: int, patches: Sequence[int]) -> Parts[Arrived]:
        # All ranks have got here, and so are done with what they were told last. Nobody waits for that while it draws.
        with self._beside():
            self._buffer.barrier(_BEGUN)
        return (yield from super().arrive(rows, counts, views, patches))

    @contextmanager
    def _beside(self) -> Generator[None]:
        """A stream that goes on from here beside the current one; `bring_back` brings them together again."""
        if self._side is None:
            yield
            return
        self._side.wait_stream(torch.cuda.current_stream(self.world.device))
        with torch.cuda.stream(self._side):
            yield

    def bring_back(self, rows: Rows, place: Tensor, message: Tensor, views: range) -> Parts[Returned]:
        yield from ()
        if self._side is not None:
            torch.cuda.current_stream(self.world.device).wait_stream(self._side)
        told = self._replicas.told(rows, self._table, views.start)
        words = told.words(self.kernels.sized)
        self._line_bytes = 4 * sum(words)
        mine = message.view(torch.int32)
        torch._foreach_copy_([theirs[0] for theirs in self._theirs], [mine] * self.world.size)  # pyright: ignore
        put_rows(told.arrays, words, rows.count, self._places, told.gate, told.gate_column, told.offset)
        self._buffer.barrier()
        everyone, records = self._replicas.rows(self._messages[:, 0])
        return Returned(everyone, records, self._messages, views)

    def written_bytes(self, steps: int, rows: int, sent: int) -> int:
        """See `Transport`; there has been a step before."""
        return steps * (self.world.size - 1) * (self._messages[0].nbytes + rows * self._line_bytes)
