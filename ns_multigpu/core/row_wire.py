"""What of a row, and of its gradients, goes on the wire between ranks that do not reach each other's memory."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

STAYS = -1
"""The start of a segment that is not in the buffer."""


@dataclass(frozen=True)
class WireSegments:
    """Where the rows of each pair with this rank lie in a buffer of words of 4 bytes: columns of `capacity` words.

    Attributes:
        starts: [ranks] the first word of each; `STAYS` where rows do not leave this rank.
        capacities: [ranks] rows that each has room for.
        rank: this one. Its own segment never leaves.
    """

    starts: Sequence[int]
    capacities: Sequence[int]
    rank: int

    def line(self, source: int) -> int:
        """The first line of a segment among the rows of all."""
        return sum(self.capacities[:source])


class RowWire(ABC):
    """A primitive's rows and gradients as they cross the wire; each is `words` columns of a segment.

    The rows and gradients of a rank's own segment lose nothing, whatever the others do.

    Attributes:
        row_words: of a row. gradient_words: of its gradients; at most as many, because they return through the same
            memory.
    """

    row_words: int
    gradient_words: int

    @abstractmethod
    def pack(self, rows: Any, place: Tensor, wire: Tensor, to: WireSegments, first: int, end: int) -> None:
        """Writes lines first to end of the rows to where `place` [ranks, M] says; see `Kernels.pack`.

        Args:
            wire: [words] int32.
        """

    @abstractmethod
    def unpack(self, wire: Tensor, come: WireSegments, counts: Tensor, views: int) -> Any:
        """The rows that arrived, source by source, of which `counts` [ranks] are there: `Arrived`. Where a segment
        stays, `keep` puts them.

        Raises:
            ValueError: there are more views than a row can tell apart.
        """

    @abstractmethod
    def keep(self, rows: Any, place: Tensor, arrived: Any, come: WireSegments, source: int) -> None:
        """Puts this rank's rows where `place` [M] says among those of a source that arrived."""

    @abstractmethod
    def pack_gradients(self, records: Tensor, counts: Tensor, wire: Tensor, to: WireSegments) -> None:
        """Writes the gradient records [lines, record_floats] of what arrived to the segments of those they came from.

        Lines are those of `unpack`, of which `counts` [ranks] are rows. The rank's own are left out.
        """

    @abstractmethod
    def collect(self, place: Tensor, count: Tensor, wire: Tensor, come: WireSegments, own: Tensor) -> Tensor:
        """Sums of gradients as records [M, record_floats] over the ranks that drew the rows, in the ranks' order.

        Args:
            place: [ranks, M]. count: [1] int64, lines that are rows. own: the records that were made on this rank.
        """
