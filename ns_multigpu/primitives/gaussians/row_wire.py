"""Rows of 3D Gaussians on the wire."""

from dataclasses import dataclass

from torch import Tensor

from cuda_ext.ops.exchange.row_exchange import ReceivedRows
from cuda_ext.ops.exchange.row_wire import (
    collect_wire,
    gradient_words,
    keep_rows,
    pack_gradients,
    pack_wire,
    row_words,
    unpack_wire,
)
from cuda_ext.ops.optim.fused import SplatRows
from ns_multigpu.core.row_wire import RowWire, WireSegments


@dataclass(frozen=True)
class GaussianRowWire(RowWire):
    """See `cuda_ext.ops.exchange.row_wire`.

    Attributes:
        half, slots: see `Kernels.wire`. absgrad, depth: gradients have absolute ones, and one of the depth.
    """

    half: bool
    slots: bool
    absgrad: bool
    depth: bool = False

    @property
    def row_words(self) -> int:
        return row_words(half=self.half, slots=self.slots)

    @property
    def gradient_words(self) -> int:
        return gradient_words(half=self.half, absgrad=self.absgrad, depth=self.depth)

    def pack(self, rows: SplatRows, place: Tensor, wire: Tensor, to: WireSegments) -> None:
        where = (place, wire, to.starts, to.capacities, to.rank)
        pack_wire(rows, *where, half=self.half, slots=self.slots)

    def unpack(self, wire: Tensor, come: WireSegments, counts: Tensor, views: int) -> ReceivedRows:
        where = (wire, come.starts, come.capacities, counts, come.rank, views)
        return unpack_wire(*where, half=self.half, slots=self.slots)

    def keep(self, rows: SplatRows, place: Tensor, received: ReceivedRows, come: WireSegments, source: int) -> None:
        keep_rows(rows, place, received, come.line(source), come.capacities[source], slots=self.slots)

    def pack_gradients(self, records: Tensor, counts: Tensor, wire: Tensor, to: WireSegments) -> None:
        where = (records, counts, wire, to.starts, to.capacities, to.rank)
        pack_gradients(*where, half=self.half, absgrad=self.absgrad, depth=self.depth)

    def collect(self, place: Tensor, count: Tensor, wire: Tensor, come: WireSegments, own: Tensor) -> Tensor:
        where = (place, count, wire, come.starts, come.capacities, own, come.rank)
        return collect_wire(*where, half=self.half, absgrad=self.absgrad, depth=self.depth)
