"""Rows that are drawn where they are, and what ranks then tell each other of them.

Ranks that hold the same points tell each other their rows, by a collective (`ReplicatedRows`) or, on GPUs that reach
each other's memory, by writing them there (`PeerReplicas`): what NCCL gathers through buffers of its own, and what no
CUDA graph can hold, is then a few copies and two barriers that the devices pass without their hosts. So a step is one
graph.
"""

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from cuda_ext.ops.told_lines import MOST_BLOCKS, tell_lines
from ns_multigpu.core.collectives import all_gather_into, all_gather_together
from ns_multigpu.core.kernels import Arrived, Kernels, Rows, Sinks, ToldLines
from ns_multigpu.core.pairs import Pairs
from ns_multigpu.core.peer_memory import PeerBuffer
from ns_multigpu.core.transport import Collective, Parts, Returned, Transport
from ns_multigpu.core.world import World

_ALIGN = 256
_MOST_SPARE = 1 << 20
"""Rows that there is room for beside those that were asked for, at most."""
_BLOCKS_BESIDE = 128
"""Blocks that tell an array while points without rows take their step: enough to keep NVLink busy."""


class OwnRows(Transport):
    """Rows are drawn where they are: for a rank that is alone."""

    travels = False
    lasts = False

    def __init__(self, world: World, kernels: Kernels, rows: int, capacity: int | Pairs, words: int) -> None:
        super().__init__(world, kernels, rows, capacity, words)
        self._fit(rows)

    def _fit(self, rows: int) -> None:
        """Makes room for so many."""
        device = self.world.device
        self.rows = self.lines = rows
        self._table = torch.zeros(rows, self.kernels.record_floats, device=device)
        self._at = torch.tensor([self._table.data_ptr()], dtype=torch.int64, device=device)
        self._slots = torch.arange(rows, dtype=torch.int32, device=device)
        self._here = torch.zeros(rows, dtype=torch.int32, device=device)

    def leave(self, rows: Rows, place: Tensor, first: int, end: int) -> None:
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

    A step has two barriers, around the writing: behind the first, nobody reads what was written in the step before any
    more; behind the second, all have written. As many rows are written as there are: there is room for more.

    With groups it has three. Between the first two ranks tell each other which groups of points they have rows of, and
    whether the step counts. Then all others take their step while the rows are on their way.

    Args:
        groups: of points, of which is told whether they have rows (see `Kernels.groups`); 0 for none.

    Raises:
        RuntimeError: there is no peer memory (see `PeerBuffer`).
    """

    lasts = True

    def __init__(
        self, world: World, kernels: Kernels, rows: int, capacity: int | Pairs, words: int, *, groups: int = 0
    ) -> None:
        super().__init__(world, kernels, rows, capacity, words)
        self._groups, self._most_groups = groups, groups + groups // 4
        # So that each rank's lines of each array begin at a multiple of 16 bytes.
        self._most = -(-(rows + min(rows, _MOST_SPARE)) // 4) * 4
        self._replicas = kernels.replicas(world.size, self._most, world.device)
        device, ranks = world.device, range(world.size)
        messages = torch.zeros(world.size, words, dtype=torch.int64, device=device)
        marks = torch.zeros(world.size, -(-self._most_groups // 16) * 16, dtype=torch.uint8, device=device)
        first = [messages, marks, *self._replicas.everyone]
        starts = [0]
        for tensor in first:
            starts.append(starts[-1] + -(-tensor.nbytes // _ALIGN) * _ALIGN)
        self._buffer = buffer = PeerBuffer(starts[-1], world)
        here = world.rank
        own = [buffer.view(here, at, one.shape, one.dtype) for at, one in zip(starts, first, strict=False)]
        self._messages, self._marks, self._replicas.everyone = own[0], own[1], own[2:]
        # Where each rank keeps what this one tells, as numbers of 32 bits: [ranks][tensors].
        shares = [one.nbytes // world.size for one in first]
        places = list(zip(starts, shares, strict=False))
        self._theirs = [
            [buffer.view(rank, at + here * size, (size // 4,), torch.int32) for at, size in places] for rank in ranks
        ]
        addresses = [[one.data_ptr() for one in theirs[2:]] for theirs in self._theirs]
        self._places = torch.tensor(addresses, dtype=torch.int64, device=device)
        # Rows go first: behind the step of other points they would begin when that is done.
        self._side = torch.cuda.Stream(device, priority=-1) if groups and device.type == "cuda" else None
        self._line_bytes = 0  # of what is told of a row

    def fit(self, rows: int, groups: int) -> bool:
        """Serves steps of other sizes from now on, if it has room for them and not far too much: ranks take 20 ms to
        make another."""
        if not rows <= self._most <= 2 * rows + 2 * _MOST_SPARE or not groups <= self._most_groups:
            return False
        self._groups = groups
        self._fit(rows)
        return True

    def bring_back(self, rows: Rows, place: Tensor, message: Tensor, views: range) -> Parts[Returned]:
        yield from ()
        told = self._replicas.told(rows, self._table, views.start)
        self._line_bytes = 4 * sum(told.taken)
        mine = [message.view(torch.int32)]
        if self._groups:
            mine.append(torch.zeros_like(self._theirs[self.world.rank][1]))
            self.kernels.mark(rows, mine[1].view(torch.uint8)[: self._groups])
        self._buffer.barrier()
        into = [theirs[k] for theirs in self._theirs for k in range(len(mine))]
        torch._foreach_copy_(into, mine * self.world.size)  # pyright: ignore
        if not self._groups:
            self._tell(told, rows, MOST_BLOCKS)
            return self._returned(views)
        self._buffer.barrier()
        with self._beside():
            self._tell(told, rows, _BLOCKS_BESIDE)
        held = [told, rows]  # until they are told: they were made on another stream than the one that reads them

        def arrive() -> None:
            if self._side is not None:
                torch.cuda.current_stream(self.world.device).wait_stream(self._side)
            held.clear()

        return replace(self._returned(views), marks=self._marks[:, : self._groups].contiguous(), arrive=arrive)

    def _tell(self, told: ToldLines, rows: Rows, blocks: int) -> None:
        tell_lines(told.arrays, told.taken, rows.count, self._places, told.gate, told.gate_column, blocks, told.offset)
        self._buffer.barrier()

    def _returned(self, views: range) -> Returned:
        everyone, records = self._replicas.rows(self._messages[:, 0])
        return Returned(everyone, records, self._messages, views)

    @contextmanager
    def _beside(self) -> Generator[None]:
        if self._side is None:
            yield
            return
        self._side.wait_stream(torch.cuda.current_stream(self.world.device))
        with torch.cuda.stream(self._side):
            yield

    def step_bytes(self, rows: int) -> int:
        """What this rank sends to others in a step of so many rows, of which there has been one."""
        first = self._messages[0].nbytes + (self._marks[0].nbytes if self._groups else 0)
        return (self.world.size - 1) * (first + rows * self._line_bytes)
