"""What carries rows between ranks, and their gradients back, in a step that reads nothing back."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import ClassVar, TypeVar

from torch import Tensor

from ns_multigpu.core.dist.world import World
from ns_multigpu.core.exchange.pair_capacities import Pairs, most_of, pairs_of
from ns_multigpu.core.kernels import Arrived, Kernels, Rows, Sinks

T = TypeVar("T")


@dataclass(frozen=True)
class Collective:
    """Something that a step needs launched by itself: no CUDA graph holds it.

    Attributes:
        launch: does it, on the current stream, without waiting for the device.
    """

    launch: Callable[[], object]


Parts = Generator[Collective, None, T]
"""Work that is given to the device as it is gone through. It yields what has to be launched in between; what lies
between two of these can be captured in a CUDA graph. T is what it returns."""


def launched(parts: Parts[T]) -> T:
    """Goes through work that is not captured; returns what it returns."""
    while True:
        try:
            collective = next(parts)
        except StopIteration as end:
            return end.value
        collective.launch()


@dataclass(frozen=True)
class Returned:
    """What an owner's update works with.

    Attributes:
        rows: of its points: its own, or where replicas have told each other all ranks', a segment each.
        records: the rows' gradients.
        messages: [ranks, words] int64, everybody's.
        finite_flag_views: the views of the batch that this rank drew, where there are rows of other ranks; else None.
    """

    rows: Rows
    records: Tensor
    messages: Tensor
    finite_flag_views: range | None = None


class Transport(ABC):
    """One rank's side; every rank makes one and calls its methods in the order below, once a step; `leave` only where
    rows travel.

    Args:
        world: the ranks. kernels: they lay records out.
        rows: lines of this rank's own rows.
        capacity: rows of the segment of each pair of ranks, or one number for all of them.
        numbers: that each rank counts, where that is not one for each rank.
        words: int64 numbers of a rank's message at the end of a step; 0 for none.

    Attributes:
        travels: whether rows do.
        lasts: whether it serves on when a step is made anew: ranks have to meet for another.
        pairs: capacities by pair. capacity: the largest of them.
        lines: of what arrives from each source; of the one that sends most, where they differ.
        directions: how many ways its rows can take. ways: by rank, which of them they take to there; ranks may share
            one.
        room: of each number that a step counts how much there is room for: first the rows that take each way.
        stays: which of these numbers are rows that do not leave this rank.
    """

    travels: ClassVar[bool] = True
    lasts: ClassVar[bool] = True

    def __init__(
        self, world: World, kernels: Kernels, rows: int, capacity: int | Pairs, words: int, *, numbers: int = 0
    ) -> None:
        self.world, self.kernels, self.rows, self.words = world, kernels, rows, words
        self.pairs = pairs_of(capacity, world.size, numbers)
        self.capacity = most_of(self.pairs)
        self.lines = self.capacity
        self.directions, self.ways = world.size, tuple(range(world.size))
        self.room: Sequence[int] = self.pairs[world.rank]
        self.stays = world.rank

    def fit(self, rows: int) -> bool:
        """Serve steps of so many rows of this rank from now on, if the buffers allow it; return whether they do."""
        return False

    def written_bytes(self, steps: int, rows: int, sent: int) -> int:
        """Return the bytes that this rank wrote into other ranks' memory; collectives count their own.

        Args:
            steps: that were taken. rows: of this rank in each. sent: that went to other ranks, in all.
        """
        return 0

    @abstractmethod
    def leave(self, rows: Rows, place: Tensor) -> None:
        """Send the rows off to where `place` [ways, rows] says."""

    @abstractmethod
    def arrive(self, rows: Rows, counts: Tensor, views: int, patches: Sequence[int]) -> Parts[Arrived]:
        """What arrived here when all have sent all of their rows.

        Args:
            rows: this rank's.
            counts: [numbers] int64, first how many of them took each way; the other numbers are written.
            views: that the rows are of.
            patches: 6 integers for each that is drawn (rank, view, x0, y0, x1, y1), halo included.
        """

    @abstractmethod
    def sinks(self, owners: Tensor, slots: Tensor) -> Sinks:
        """Where the gradients of what arrived are to be added; all zero now."""

    @abstractmethod
    def bring_back(self, rows: Rows, place: Tensor, message: Tensor, views: range) -> Parts[Returned]:
        """Brings gradients to the rows' owners.

        Args:
            rows, place: as given to `leave`.
            message: [words] int64 for everybody.
            views: positions in the batch of the views that the rows are of.
        """
