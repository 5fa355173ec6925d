"""Interfaces of wire formats: rows and their gradients in collectives between ranks without peer memory."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

LOCAL = -1
"""Start of a segment that is not in the buffer."""


@dataclass(frozen=True)
class WireSegments:
    """Segments of a buffer of 4-byte words, one per pair with this rank: columns of `capacity` words.

    Attributes:
        starts: [ranks] the first word of each; `LOCAL` for local rows.
        capacities: [ranks] capacity of each in rows.
        rank: this one. Its own segment is never sent.
    """

    starts: Sequence[int]
    capacities: Sequence[int]
    rank: int

    def line(self, source: int) -> int:
        """Return the first line of a segment among the rows of all."""
        return sum(self.capacities[:source])

    def filled(self, wire: Tensor, counts: Sequence[int], words: int) -> list[Tensor]:
        """Return the part of each segment that rows fill, [words, rows]; no rows of a local segment.

        Args:
            wire: [words] int32. counts: [ranks] rows; more than a capacity count as the capacity. words: of a row.
        """
        of_ranks = zip(self.starts, counts, self.capacities, strict=True)
        return [
            wire[:0].view(words, 0) if start == LOCAL
            else wire[start : start + words * capacity].view(words, capacity)[:, :count]
            for start, count, capacity in of_ranks
        ]  # fmt: skip


class RowWire(ABC):
    """Wire format of a primitive's rows and gradients; each is `words` columns of a segment.

    Rows and gradients of a rank's own segment are never rounded.

    Attributes:
        row_words: words of a row.
        gradient_words: words of its gradients; at most as many, because they return through the same memory.
    """

    row_words: int
    gradient_words: int

    @abstractmethod
    def pack(self, rows: Any, place: Tensor, wire: Tensor, to: WireSegments) -> None:
        """Write the rows to the lines `place` [ranks, M] of the other ranks' segments.

        Args:
            wire: [words] int32.
        """

    @abstractmethod
    def unpack(self, wire: Tensor, come: WireSegments, counts: Tensor, views: int) -> Any:
        """Return the received rows (`Received`), source by source, of which `counts` [ranks] are valid. Local segments
        are filled by `keep`.

        Raises:
            ValueError: a row cannot distinguish so many views.
        """

    @abstractmethod
    def keep(self, rows: Any, place: Tensor, received: Any, come: WireSegments, source: int) -> None:
        """Copy this rank's rows to the lines `place` [M] of a source's segment of the received rows."""

    def lines(self, received: Any, first: int, end: int) -> Any:
        """Return lines first to end of received rows."""
        return type(received)(*(column[first:end] for column in received))

    @abstractmethod
    def pack_gradients(self, records: Tensor, counts: Tensor, wire: Tensor, to: WireSegments) -> None:
        """Write the gradient records [lines, record_floats] of received rows to the segments of their sources.

        Lines are those of `unpack`, of which `counts` [ranks] are rows. The rank's own are left out.
        """

    @abstractmethod
    def collect(self, place: Tensor, count: Tensor, wire: Tensor, come: WireSegments, own: Tensor) -> Tensor:
        """Return the sums of gradients as records [M, record_floats] over the ranks that drew the rows, in the ranks'
        order.

        Args:
            place: [ranks, M]. count: [1] int64, number of valid lines. own: the records computed on this rank.
        """


class RowFormat(ABC):
    """Formats of rows and of their gradients.

    Attributes:
        record_floats: numbers of a row's record in peer memory, and of its gradient record.
    """

    record_floats: int

    @abstractmethod
    def wire(self, *, half: bool, slots: bool) -> RowWire:
        """Return the format of rows and gradients in collectives.

        Args:
            half: send as float16 where possible. slots: rows carry their line at their owner.
        """
