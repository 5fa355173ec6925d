"""Reference in torch's operators of `cuda_ext.ops.exchange.row_exchange`.

Addresses are those of memory of this process: where they lie on a GPU, only our kernels can follow them.
"""

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor


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
    columns: Sequence[Tensor], radii: Tensor, view_ids: Tensor, place: Tensor, destinations: Tensor, capacity: int
) -> None:
    """See `cuda_ext.ops.exchange.row_exchange.pack`."""
    slots = torch.arange(len(view_ids), dtype=torch.int32)
    records = torch.cat([*words_of(columns), radii, view_ids[:, None], slots[:, None]], dim=1)
    records = torch.nn.functional.pad(records, (0, record_floats(records.shape[1]) - records.shape[1]))
    for lines, address in zip(place, destinations.tolist(), strict=True):
        rows = ((lines >= 0) & (lines < capacity)).nonzero().squeeze(-1)
        if len(rows) > 0:
            there = _records_at(address, capacity, records.shape[1]).view(torch.int32)
            there[lines[rows].long()] = records[rows]


@torch.no_grad()
def unpack(
    records: Tensor, counts: Tensor, views: int, widths: Sequence[int]
) -> tuple[list[Tensor], Tensor, Tensor, Tensor, Tensor]:
    """See `cuda_ext.ops.exchange.row_exchange.unpack`."""
    ranks, capacity, end = *records.shape[:2], sum(widths)
    lines = torch.arange(capacity, device=records.device)
    real = (lines < counts[:, None]).reshape(-1, 1)
    integers = torch.where(real, records.flatten(0, 1).view(torch.int32), 0)
    view_ids = torch.where(real[:, 0], integers[:, end + 2], views - 1).int()
    owners = torch.arange(ranks, dtype=torch.int32, device=records.device).repeat_interleave(capacity)
    return (
        columns_of_words(integers[:, :end], widths), integers[:, end : end + 2].clone(), view_ids, owners,
        integers[:, end + 3].clone(),
    )  # fmt: skip


def record_floats(numbers: int) -> int:
    """Return the floats of a record of so many numbers: a power of two."""
    return 1 << (numbers - 1).bit_length()


def words_of(columns: Sequence[Tensor]) -> list[Tensor]:
    """Return float columns [M, width] or [M] as words [M, width] int32."""
    return [(column if column.dim() == 2 else column[:, None]).contiguous().view(torch.int32) for column in columns]


def columns_of_words(words: Tensor, widths: Sequence[int]) -> list[Tensor]:
    """Return columns [M, width], or [M] where it is 1, of words [M, all widths] int32; each with memory of its own."""
    parts = [part.clone(memory_format=torch.contiguous_format) for part in words.split(list(widths), dim=1)]
    return [(part if part.shape[1] > 1 else part[:, 0]).view(torch.float32) for part in parts]


@torch.no_grad()
def add_records(records: Tensor, sinks: Tensor, owners: Tensor, slots: Tensor, system_scope: bool) -> None:
    """See `cuda_ext.ops.exchange.row_exchange.add_records`."""
    named = (records != 0).any(-1)
    for owner, address in enumerate(sinks.tolist()):
        rows = (named & (owners == owner)).nonzero().squeeze(-1)
        if len(rows) > 0:
            there = slots[rows].long()
            _records_at(address, int(there.max()) + 1, records.shape[1]).index_add_(0, there, records[rows])


def _records_at(address: int, capacity: int, floats: int) -> Tensor:
    """Return the records [capacity, floats] that lie at an address of this process's own memory; nothing keeps them
    alive."""
    memory = (ctypes.c_float * (capacity * floats)).from_address(address)
    return torch.frombuffer(memory, dtype=torch.float32).view(capacity, floats)
