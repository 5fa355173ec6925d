"""Interface of transports: exchange of rows and of their gradients."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from ns_multigpu.core.dist.members import Members
from ns_multigpu.core.dist.world import World
from ns_multigpu.core.exchange.pair_capacities import Pairs, most_of, pairs_of
from ns_multigpu.core.kernels import Received, Rows, Sinks
from ns_multigpu.core.row_wire import RowFormat

T = TypeVar("T")


@dataclass(frozen=True)
class Collective:
    """Operation that a step must launch outside of CUDA graphs.

    Attributes:
        launch: enqueues it on the current stream. It waits for the device only to read the sizes of what it sends.
    """

    launch: Callable[[], object]


Parts = Generator[Collective, None, T]
"""Work that is enqueued on the device as the generator advances. It yields the operations to launch in between; the
work between two of them can be captured in a CUDA graph. T is its result."""


def begun(parts: Parts[T]) -> Parts[Parts[T]]:
    """Run work up to its first collective and launch that; return the rest of the work."""
    try:
        yield next(parts)
    except StopIteration as end:
        return _ended(end.value)
    return parts


def _ended(value: T) -> Parts[T]:
    yield from ()
    return value


def launched(parts: Parts[T], measured: Callable[[], AbstractContextManager[Any]] = nullcontext) -> T:
    """Run work without capture; return its result. `measured` encloses each collective."""
    while True:
        try:
            collective = next(parts)
        except StopIteration as end:
            return end.value
        with measured():
            collective.launch()


def launched_together(parts: Sequence[Parts[T]], members: Members) -> list[T]:
    """Run the work of all ranks of one process without capture; return their results.

    The devices wait for each other at the beginning, at each collective, and at the end.

    Args:
        parts: of each rank, with equally many collectives.
    """
    results: list[T] = []
    members.meet()
    while not results:
        collectives: list[Collective] = []
        for rank, one in enumerate(parts):
            with members.on(rank):
                try:
                    collectives.append(next(one))
                except StopIteration as end:
                    results.append(end.value)
        members.meet()
        for rank, collective in enumerate(collectives):
            with members.on(rank):
                collective.launch()
    assert len(results) == len(parts), "ranks have equally many collectives"
    return results


@dataclass(frozen=True)
class Returned:
    """Inputs of an owner's update.

    Attributes:
        rows: of its points: its own, or all ranks' rows with replicas, one segment per rank.
        records: the rows' gradients.
        messages: [ranks, words] int64, the step statistics of all ranks.
        finite_flag_views: the views of the batch that this rank drew, if there are rows of other ranks; else None.
    """

    rows: Rows
    records: Tensor
    messages: Tensor
    finite_flag_views: range | None = None


class Transport(ABC):
    """One rank's side of the exchange. Every rank creates one and calls its methods in the order below, once a step;
    `send` only if rows are exchanged.

    Args:
        world: the ranks. kernels: the primitive's; collectives need the rows' format only.
        rows: capacity for this rank's own rows.
        capacity: rows of the segment of each pair of ranks, or one number for all of them.
        numbers: counts per rank, if not one for each rank.
        words: int64 numbers of a rank's step statistics; 0 for none.

    Attributes:
        is_exchanged: True if rows are exchanged.
        is_reusable: True if it is reused when a step is rebuilt: a new one needs a rendezvous of all ranks.
        pairs: capacities by pair. capacity: the largest of them.
        lines: received lines per source; the maximum, if they differ.
        num_destinations: number of destinations of own rows.
        destinations: by rank, the index of its destination; ranks may share one.
        capacities: limits of the step's counts, in their order: destinations first.
        local_index: index of the local rows among these numbers.
    """

    is_exchanged: ClassVar[bool] = True
    is_reusable: ClassVar[bool] = True

    def __init__(
        self, world: World, kernels: RowFormat, rows: int, capacity: int | Pairs, words: int, *, numbers: int = 0
    ) -> None:
        self.world, self.rows, self.words = world, rows, words
        self.kernels: Any = kernels
        self.pairs = pairs_of(capacity, world.size, numbers)
        self.capacity = most_of(self.pairs)
        self.lines = self.capacity
        self.num_destinations, self.destinations = world.size, tuple(range(world.size))
        self.capacities: Sequence[int] = self.pairs[world.rank]
        self.local_index = world.rank

    def fit(self, rows: int) -> bool:
        """Adapt to `rows` rows of this rank from now on, if the buffers allow it; return True on success."""
        return False

    def written_bytes(self, steps: int, rows: int, sent: int) -> int:
        """Return the bytes that this rank wrote into other ranks' memory; collectives count their own.

        Args:
            steps: completed steps. rows: of this rank in each. sent: rows sent to other ranks, in all.
        """
        return 0

    @abstractmethod
    def send(self, rows: Rows, place: Tensor) -> None:
        """Send the rows to the lines `place` [destinations, rows]."""

    @abstractmethod
    def receive(self, rows: Rows, counts: Tensor, views: int, patches: Sequence[int]) -> Parts[Received]:
        """Wait for all ranks' rows and return those that this rank received.

        Args:
            rows: this rank's.
            counts: [numbers] int64, first the rows per destination; the other numbers are written.
            views: number of views of the rows.
            patches: 6 integers per drawn patch (rank, view, x0, y0, x1, y1), halo included.
        """

    @abstractmethod
    def sinks(self, owners: Tensor, slots: Tensor) -> Sinks:
        """Return the destinations of the received rows' gradients, zeroed."""

    @abstractmethod
    def return_gradients(self, rows: Rows, place: Tensor, message: Tensor, views: range) -> Parts[Returned]:
        """Return gradients to the rows' owners.

        Args:
            rows, place: as given to `send`.
            message: [words] int64, step statistics gathered on all ranks.
            views: positions in the batch of the rows' views.
        """


class RecordTransport(Transport):
    """Transport that returns gradient records from one tensor of this rank, by collectives.

    Attributes:
        records: [lines, record_floats] gradients of the received rows, in their order: written through `sinks`, or set
            by autograd. Empty without step statistics, because there is no backward in a fused step then.
    """

    records: Tensor

    def _allocate_records(self, lines: int) -> None:
        """Allocate the records of `lines` received rows, and the step statistics of all ranks."""
        device, lines = self.world.device, lines if self.words else 0
        self.records = torch.zeros(lines, self.kernels.record_floats, device=device)
        self._slots = torch.arange(lines, dtype=torch.int32, device=device)
        self._owners = torch.zeros(lines, dtype=torch.int32, device=device)
        self._address = torch.tensor([self.records.data_ptr()], dtype=torch.int64, device=device)
        self._messages = torch.zeros(self.world.size, self.words, dtype=torch.int64, device=device)

    def sinks(self, owners: Tensor, slots: Tensor) -> Sinks:
        self.records.zero_()
        return Sinks(self._address, self._owners, self._slots, system_scope=False)
