"""Exchange of a primitive's rows, and rasterization of rows that are 2D Gaussians on the screen."""

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

import cuda_ext
from cuda_ext.ops.exchange.row_exchange import GRADIENT_FLOATS, pack, unpack
from cuda_ext.ops.exchange.row_layout import GAUSSIAN_ROWS, ReceivedRows, RowLayout
from cuda_ext.ops.exchange.row_wire import gaussian_gradients
from ns_multigpu.core.kernels import Drawn, Kernels, Lists, Received, Rows, Sinks
from ns_multigpu.core.types import TILE
from ns_multigpu.primitives.row_wire import LayoutWire


class RowKernels(Kernels):
    """See `Kernels`.

    Attributes:
        layout: of the rows.
        returned_places: places of the returned gradients in their records.
    """

    layout: ClassVar[RowLayout]

    @property
    def record_floats(self) -> int:
        return self.layout.record_floats

    @property
    def gradient_floats(self) -> int:
        return self.layout.numbers

    @property
    def returned_places(self) -> Sequence[int]:
        return range(self.layout.numbers)

    def receive_local(self, rows: Rows, owners: Tensor, slots: Tensor) -> Received:
        return self.layout.receive(self.layout.columns_of(rows), rows.radii, rows.view_ids, owners, slots)

    def pack(self, rows: Rows, place: Tensor, segments: Tensor, capacity: int) -> None:
        pack(rows, place, segments, capacity, self.layout)

    def unpack(self, records: Tensor, counts: Tensor, views: int) -> Received:
        return unpack(records, counts, views, self.layout)

    def wire(self, *, half: bool, slots: bool) -> LayoutWire:
        return LayoutWire(self.layout, half, slots, self.returned_places)

    def intersect(self, received: Received, patches: Sequence[int], capacity: int) -> Lists:
        return cuda_ext.intersect_capacity(
            received.means2d, received.conics, received.opacities, received.radii, received.depths, received.view_ids,
            patches, tile_size=TILE, capacity=capacity,
        )  # fmt: skip


class GaussianRowKernels(RowKernels):
    """Kernels of such rows, for any primitive; see `cuda_ext.ops.optim.fused` and `cuda_ext.ops.exchange.row_exchange`.

    Attributes:
        absgrad: see `Gaussians`.
        depth: `draw` blends depths too, as a fourth number of the colour.
    """

    absgrad: bool
    depth: bool
    layout = GAUSSIAN_ROWS

    @property
    def gradient_floats(self) -> int:
        return GRADIENT_FLOATS

    @property
    def returned_places(self) -> Sequence[int]:
        return gaussian_gradients(absgrad=self.absgrad, depth=self.depth)

    def draw(self, received: ReceivedRows, lists: Lists, patches: Sequence[int], mark_stops: bool = False) -> Drawn:
        tile_offsets, row_ids, _ = lists
        features = torch.cat([received.features, received.depths[:, None]], -1) if self.depth else received.features
        inputs: Any = (
            received.means2d, received.conics, received.opacities, features, tile_offsets, row_ids, patches, TILE
        )  # fmt: skip
        color, alpha, last, state = torch.ops.ns_multigpu.rasterize(*inputs, None, mark_stops)
        return Drawn(color, alpha, last, (inputs, state))

    def draw_back(self, drawn: Drawn, v_color: Tensor, v_alpha: Tensor, sinks: Sinks) -> None:
        inputs, state = drawn.rest
        torch.ops.ns_multigpu.rasterize_backward_into(
            *inputs, drawn.alpha, drawn.last, state, drawn.color, v_color, v_alpha, self.absgrad,
            sinks.addresses, sinks.owners, sinks.slots, sinks.system_scope,
        )  # fmt: skip
