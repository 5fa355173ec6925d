"""Rows of a primitive on the wire."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from cuda_ext.ops.exchange.row_layout import RowLayout
from cuda_ext.ops.exchange.row_wire import (
    collect_wire,
    gradient_words,
    keep_rows,
    pack_gradients,
    pack_wire,
    row_words,
    unpack_wire,
)
from ns_multigpu.core.row_wire import RowWire, WireSegments


@dataclass(frozen=True)
class LayoutWire(RowWire):
    """See `cuda_ext.ops.exchange.row_wire`.

    Attributes:
        layout: of the rows. half, slots: see `Kernels.wire`. returned: places of the gradients in their records.
    """

    layout: RowLayout
    half: bool
    slots: bool
    returned: Sequence[int]

    @property
    def row_words(self) -> int:
        return row_words(half=self.half, slots=self.slots, layout=self.layout)

    @property
    def gradient_words(self) -> int:
        return gradient_words(self.returned, half=self.half)

    def pack(self, rows: Any, place: Tensor, wire: Tensor, to: WireSegments) -> None:
        where = (place, wire, to.starts, to.capacities, to.rank)
        pack_wire(rows, *where, half=self.half, slots=self.slots, layout=self.layout)

    def unpack(self, wire: Tensor, come: WireSegments, counts: Tensor, views: int) -> Any:
        where = (wire, come.starts, come.capacities, counts, come.rank, views)
        return unpack_wire(*where, half=self.half, slots=self.slots, layout=self.layout)

    def keep(self, rows: Any, place: Tensor, received: Any, come: WireSegments, source: int) -> None:
        where = (come.line(source), come.capacities[source])
        keep_rows(rows, place, received, *where, slots=self.slots, layout=self.layout)

    def pack_gradients(self, records: Tensor, counts: Tensor, wire: Tensor, to: WireSegments) -> None:
        where = (records, counts, wire, to.starts, to.capacities, to.rank)
        pack_gradients(*where, half=self.half, returned=self.returned)

    def collect(self, place: Tensor, count: Tensor, wire: Tensor, come: WireSegments, own: Tensor) -> Tensor:
        where = (place, count, wire, come.starts, come.capacities, own, come.rank)
        return collect_wire(*where, half=self.half, returned=self.returned)
