"""Rows that are drawn on their own rank, and their exchange between replicas.

Ranks with the same points gather each other's rows, by a collective (`ReplicatedRows`) or by writing them into peer
memory (`PeerReplicas`). Peer memory replaces NCCL's gather, which no CUDA graph can hold, by a few copies and two
device-side barriers. So a step is one graph.
"""

from collections.abc import Generator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from cuda_ext.ops.exchange.put_rows import put_rows
from ns_multigpu.core.dist.collectives import all_gather_into, all_gather_together
from ns_multigpu.core.dist.peer_memory import PeerBuffer
from ns_multigpu.core.dist.world import World
from ns_multigpu.core.exchange.pair_capacities import Pairs
from ns_multigpu.core.exchange.transport import Collective, Parts, Returned, Transport
from ns_multigpu.core.kernels import Kernels, Received, Rows, Sinks

_ALIGN = 256
_BEGUN = 1
"""Channel of the barrier at a step's begin, which may be pending together with the one at its end."""
_MOST_SPARE = 1 << 20
"""Maximum spare capacity in rows, in addition to the requested rows."""


class OwnRows(Transport):
    """Local rows of a single rank."""

    is_exchanged = False
    is_reusable = False

    def __init__(self, world: World, kernels: Kernels, rows: int, capacity: int | Pairs, words: int) -> None:
        super().__init__(world, kernels, rows, capacity, words)
        self._grow_capacity(rows)

    def _grow_capacity(self, rows: int) -> None:
        """Allocate for `rows` rows of this rank's own."""
        device = self.world.device
        self.rows = self.lines = rows
        # Without step statistics there is no backward.
        self._table = torch.zeros(rows if self.words else 0, self.kernels.record_floats, device=device)
        self._at = torch.tensor([self._table.data_ptr()], dtype=torch.int64, device=device)
        self._slots = torch.arange(rows, dtype=torch.int32, device=device)
        self._here = torch.zeros(rows, dtype=torch.int32, device=device)

    def send(self, rows: Rows, place: Tensor) -> None:
        return

    def receive(self, rows: Rows, counts: Tensor, views: int, patches: Sequence[int]) -> Parts[Received]:
        yield from ()
        return self.kernels.receive_local(rows, self._here, self._slots)

    def sinks(self, owners: Tensor, slots: Tensor) -> Sinks:
        self._table.zero_()
        return Sinks(self._at, owners, slots, system_scope=False)

    def return_gradients(self, rows: Rows, place: Tensor, message: Tensor, views: range) -> Parts[Returned]:
        yield from ()
        return Returned(rows, self._table, message[None])


class LockstepRows(OwnRows):
    """As `OwnRows`, on several ranks. They take or skip a step together, so step statistics are all-gathered."""

    def __init__(self, world: World, kernels: Kernels, rows: int, capacity: int | Pairs, words: int) -> None:
        super().__init__(world, kernels, rows, capacity, words)
        self._messages = torch.zeros(world.size, words, dtype=torch.int64, device=world.device)

    def return_gradients(self, rows: Rows, place: Tensor, message: Tensor, views: range) -> Parts[Returned]:
        yield Collective(lambda: all_gather_into(self._messages, message, self.world))
        return Returned(rows, self._table, self._messages)


class ReplicatedRows(OwnRows):
    """Local rows, gathered with their gradients on all ranks. All ranks hold the same points, so each takes the same
    step."""

    def __init__(self, world: World, kernels: Kernels, rows: int, capacity: int | Pairs, words: int) -> None:
        super().__init__(world, kernels, rows, capacity, words)
        self._replicas = kernels.replicas(world.size, rows, world.device)
        self._messages = torch.zeros(world.size, words, dtype=torch.int64, device=world.device)

    def return_gradients(self, rows: Rows, place: Tensor, message: Tensor, views: range) -> Parts[Returned]:
        mine = [message, *self._replicas.mine(rows, self._table, views.start)]
        yield Collective(lambda: all_gather_together([self._messages, *self._replicas.everyone], mine, self.world))
        everyone, records = self._replicas.rows(self._messages[:, 0])
        return Returned(everyone, records, self._messages, views)


class PeerReplicas(OwnRows):
    """Local rows, written with their gradients into the memory of all ranks. All ranks hold the same points, so each
    takes the same step.

    A step has two barriers. After the first, at its begin, no rank still reads the rows of the step before; after the
    second all ranks have written. Only valid rows are written; the capacity is larger.

    Raises:
        RuntimeError: there is no peer memory (see `PeerBuffer`).
    """

    is_reusable = True

    def __init__(self, world: World, kernels: Kernels, rows: int, capacity: int | Pairs, words: int) -> None:
        super().__init__(world, kernels, rows, capacity, words)
        # Each rank's lines of each array must begin at a multiple of 16 bytes.
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
        # This rank's segment in each rank's memory, as 32-bit words: [ranks][tensors].
        shares = [one.nbytes // world.size for one in first]
        places = list(zip(starts, shares, strict=False))
        self._theirs = [
            [buffer.view(rank, at + here * size, (size // 4,), torch.int32) for at, size in places] for rank in ranks
        ]
        addresses = [[one.data_ptr() for one in theirs[1:]] for theirs in self._theirs]
        self._places = torch.tensor(addresses, dtype=torch.int64, device=world.device)
        self._line_bytes = 0  # bytes written per row
        self._side = torch.cuda.Stream(world.device) if world.device.type == "cuda" else None

    def fit(self, rows: int) -> bool:
        """Adapt to `rows` rows, if the capacity suffices and is not far too large: a new transport takes 20 ms."""
        if not rows <= self._most <= 2 * rows + 2 * _MOST_SPARE:
            return False
        self._grow_capacity(rows)
        return True

    def receive(self, rows: Rows, counts: Tensor, views: int, patches: Sequence[int]) -> Parts[Received]:
        # After this barrier no rank reads the last step's rows. Drawing does not wait for it.
        with self._on_side_stream():
            self._buffer.barrier(_BEGUN)
        return (yield from super().receive(rows, counts, views, patches))

    @contextmanager
    def _on_side_stream(self) -> Generator[None]:
        """Run on a side stream that forks from the current one; `return_gradients` joins them again."""
        if self._side is None:
            yield
            return
        self._side.wait_stream(torch.cuda.current_stream(self.world.device))
        with torch.cuda.stream(self._side):
            yield

    def return_gradients(self, rows: Rows, place: Tensor, message: Tensor, views: range) -> Parts[Returned]:
        yield from ()
        if self._side is not None:
            torch.cuda.current_stream(self.world.device).wait_stream(self._side)
        to_put = self._replicas.to_put(rows, self._table, views.start)
        words = to_put.words(self.kernels.sized)
        self._line_bytes = 4 * sum(words)
        mine = message.view(torch.int32)
        torch._foreach_copy_([theirs[0] for theirs in self._theirs], [mine] * self.world.size)  # pyright: ignore
        put_rows(to_put.arrays, words, rows.count, self._places, to_put.gate, to_put.gate_column, to_put.offset)
        self._buffer.barrier()
        everyone, records = self._replicas.rows(self._messages[:, 0])
        return Returned(everyone, records, self._messages, views)

    def written_bytes(self, steps: int, rows: int, sent: int) -> int:
        """Return the bytes written; see `Transport`. Requires a completed step."""
        return steps * (self.world.size - 1) * (self._messages[0].nbytes + rows * self._line_bytes)
