"""Kernels of rows that are 2D Gaussians on the screen, for any primitive: exchange and rasterization."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

import cuda_ext
from cuda_ext.ops.exchange.row_exchange import RECORD_FLOATS, ReceivedRows, pack, unpack
from cuda_ext.ops.optim.fused import SplatRows
from ns_multigpu.core.kernels import Drawn, Kernels, Lists, Sinks
from ns_multigpu.core.types import TILE
from ns_multigpu.primitives.gaussians.row_wire import GaussianRowWire


class GaussianRowKernels(Kernels):
    """See `Kernels`; rows and records as in `cuda_ext.ops.optim.fused` and `cuda_ext.ops.exchange.row_exchange`.

    Attributes:
        absgrad: see `Gaussians`.
        depth: `draw` blends depths too, as a fourth number of the colour.
    """

    absgrad: bool
    depth: bool
    record_floats = RECORD_FLOATS

    def receive_local(self, rows: SplatRows, owners: Tensor, slots: Tensor) -> ReceivedRows:
        geometry = (rows.means2d, rows.conics, rows.opacities)
        return ReceivedRows(rows.view_ids, *geometry, rows.features, rows.depths, rows.radii, owners, slots)

    def pack(self, rows: SplatRows, place: Tensor, segments: Tensor, capacity: int) -> None:
        pack(rows, place, segments, capacity)

    def unpack(self, records: Tensor, counts: Tensor, views: int) -> ReceivedRows:
        return unpack(records, counts, views)

    def wire(self, *, half: bool, slots: bool) -> GaussianRowWire:
        return GaussianRowWire(half, slots, self.absgrad, self.depth)

    def intersect(self, received: ReceivedRows, patches: Sequence[int], capacity: int) -> Lists:
        return cuda_ext.intersect_capacity(
            received.means2d, received.conics, received.opacities, received.radii, received.depths, received.view_ids,
            patches, tile_size=TILE, capacity=capacity,
        )  # fmt: skip

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
