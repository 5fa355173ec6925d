"""Reference in torch's operators of `cuda_ext.ops.exchange.row_exchange`.

Addresses are those of memory of this process: where they lie on a GPU, only our kernels can follow them.
"""

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

RECORD_FLOATS = 16
"""Numbers of 4 bytes in a record."""
GRADIENT_FLOATS = 12
"""Numbers of a gradient's record that are gradients: its first."""


@torch.no_grad()
def route_lines(
    view_ids: Tensor, count: Tensor, means2d: Tensor, radii: Tensor, patches: Sequence[int], ranks: int,
    place: Tensor, counts: Tensor, in_cells: Tensor | None = None, cells: Sequence[int] = (),
) -> None:  # fmt: skip
    """See `cuda_ext.ops.exchange.row_exchange.route_lines`."""
    alive = (torch.arange(len(view_ids), device=view_ids.device) < count) & (radii > 0).all(-1)
    goes = torch.zeros((ranks, len(view_ids)), dtype=torch.bool, device=view_ids.device)
    for k in range(0, len(patches), 6):
        rank, view, x0, y0, x1, y1 = patches[k : k + 6]
        corner, size = means2d.new_tensor([x0, y0]), means2d.new_tensor([x1 - x0, y1 - y0])
        none = torch.zeros_like(size)
        low = torch.ceil(means2d - radii - corner - 0.5).clamp(none, size)
        high = torch.floor(means2d + radii - corner + 0.5).clamp(none, size)
        touch = (low < high).all(-1) & (view_ids == view) & alive
        goes[rank] |= touch if in_cells is None else touch & in_cells[cells[k // 6]]
    place.copy_(torch.where(goes, goes.cumsum(1) - 1, -1))
    counts.copy_(goes.sum(1))


@torch.no_grad()
def pack(
    view_ids: Tensor, means2d: Tensor, conics: Tensor, opacities: Tensor, features: Tensor, depths: Tensor,
    radii: Tensor, place: Tensor, destinations: Tensor, capacity: int,
) -> None:  # fmt: skip
    """See `cuda_ext.ops.exchange.row_exchange.pack`."""
    slots = torch.arange(len(view_ids), dtype=torch.int32)
    floats = torch.cat([means2d, conics, opacities[:, None], features, depths[:, None]], dim=1)
    integers = torch.cat([radii, view_ids[:, None], slots[:, None], torch.zeros_like(radii)], dim=1)
    records = torch.cat([floats.view(torch.int32), integers], dim=1)
    for lines, address in zip(place, destinations.tolist(), strict=True):
        rows = ((lines >= 0) & (lines < capacity)).nonzero().squeeze(-1)
        if len(rows) > 0:
            _records_at(address, capacity).view(torch.int32)[lines[rows].long()] = records[rows]


@torch.no_grad()
def unpack(records: Tensor, counts: Tensor, views: int) -> tuple[Tensor, ...]:
    """See `cuda_ext.ops.exchange.row_exchange.unpack`."""
    ranks, capacity = records.shape[:2]
    lines = torch.arange(capacity, device=records.device)
    real = (lines < counts[:, None]).reshape(-1, 1)
    integers = torch.where(real, records.reshape(-1, RECORD_FLOATS).view(torch.int32), 0)
    floats = integers.view(torch.float32)
    view_ids = torch.where(real[:, 0], integers[:, 12], views - 1).int()
    owners = torch.arange(ranks, dtype=torch.int32, device=records.device).repeat_interleave(capacity)
    means2d, conics, opacities, features, depths = floats[:, :10].split([2, 3, 1, 3, 1], dim=1)
    parts = (means2d, conics, opacities[:, 0], features, depths[:, 0], integers[:, 10:12])
    alone = [part.clone(memory_format=torch.contiguous_format) for part in (*parts, integers[:, 13])]
    return (view_ids, *alone[:-1], owners, alone[-1])


@torch.no_grad()
def collect(place: Tensor, count: Tensor, sources: Tensor, capacity: int) -> Tensor:
    """See `cuda_ext.ops.exchange.row_exchange.collect`."""
    records = torch.zeros((place.shape[1], RECORD_FLOATS))
    real = torch.arange(place.shape[1]) < count
    for lines, address in zip(place, sources.tolist(), strict=True):
        rows = (real & (lines >= 0) & (lines < capacity)).nonzero().squeeze(-1)
        if len(rows) > 0:
            records[rows] += _records_at(address, capacity)[lines[rows].long()]
    return records


@torch.no_grad()
def add_records(records: Tensor, sinks: Tensor, owners: Tensor, slots: Tensor, system_scope: bool) -> None:
    """See `cuda_ext.ops.exchange.row_exchange.add_records`."""
    named = (records != 0).any(-1)
    for owner, address in enumerate(sinks.tolist()):
        rows = (named & (owners == owner)).nonzero().squeeze(-1)
        if len(rows) > 0:
            there = slots[rows].long()
            _records_at(address, int(there.max()) + 1, records.shape[1]).index_add_(0, there, records[rows])


def _records_at(address: int, capacity: int, floats: int = RECORD_FLOATS) -> Tensor:
    """Return the records [capacity, floats] that lie at an address of this process's own memory; nothing keeps them
    alive."""
    memory = (ctypes.c_float * (capacity * floats)).from_address(address)
    return torch.frombuffer(memory, dtype=torch.float32).view(capacity, floats)
