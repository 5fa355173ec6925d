"""What becomes of rows that travel in several records, and of which a box alone says where they are."""

from collections.abc import Sequence

from torch import Tensor

import cuda_ext
from ns_multigpu.core.kernels import Arrived, Lists, Rows
from ns_multigpu.core.types import TILE
from ns_multigpu.primitives.composed_kernels import ComposedKernels
from ns_multigpu.primitives.record_parts import PartsWire, RecordParts


class PartKernels(ComposedKernels):
    """See `Kernels`; how points become rows, and how these are drawn, is left to say.

    Attributes:
        title: what messages call the points.
        layout: of their rows.
    """

    halves = False
    title: str
    layout: RecordParts

    def stay(self, rows: Rows, owners: Tensor, slots: Tensor) -> Arrived:
        return self.layout.stay(rows, owners, slots)

    def pack(self, rows: Rows, place: Tensor, segments: Tensor, capacity: int, first: int, end: int) -> None:
        self.layout.pack(rows, place, segments, capacity, first, end)

    def unpack(self, records: Tensor, counts: Tensor, views: int) -> Arrived:
        return self.layout.unpack(records, counts, views)

    def collect(self, place: Tensor, count: Tensor, sources: Tensor, capacity: int) -> Tensor:
        return self.layout.collect(place, count, sources, capacity)

    def wire(self, *, half: bool, slots: bool) -> PartsWire:
        if half:
            raise ValueError(f"Rows of {self.title} cross the wire whole: leave half out.")
        return PartsWire(self.layout, slots)

    def intersect(self, arrived: Arrived, patches: Sequence[int], capacity: int) -> Lists:
        return cuda_ext.intersect_capacity(
            arrived.means2d, boundless(arrived.depths), arrived.opacities, arrived.radii, arrived.depths,
            arrived.view_ids, patches, tile_size=TILE, capacity=capacity,
        )  # fmt: skip


def boundless(like: Tensor) -> Tensor:
    """Conics [M, 3] without a bound, in the place of those of rows [M]: a row's box alone says where it is."""
    return like.new_zeros(len(like), 3)
