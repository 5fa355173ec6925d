"""The operators of `cuda_ext.ops.sort.peer_sort` in torch's own, plainly: they read counts back to the host."""

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from cuda_ext.ops.raster.rasterization import intersect

OWNER_SHIFT = 28
"""A value of the keys of tiles is owner << 28 | row."""
MOST_ROWS = 1 << OWNER_SHIFT
MOST_OWNERS = 1 << (32 - OWNER_SHIFT)
LARGEST_KEY = 2**63 - 1
"""Key of the padding behind the last pair."""


class _CudaMemory:
    """Memory of a GPU owned by another allocator, in the form that torch.as_tensor takes without a copy."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {"shape": (size,), "typestr": "|u1", "data": (address, False), "version": 3}


def tensor_at(address: int, count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the `count` elements at an address as a tensor of [count], not copied. Nothing keeps the memory alive."""
    size = count * dtype.itemsize
    if size == 0:
        return torch.empty(0, dtype=dtype, device=device)
    if device.type == "cuda":
        memory: Any = _CudaMemory(address, size)
        return torch.as_tensor(memory, device=device).view(dtype)
    return torch.frombuffer((ctypes.c_char * size).from_address(address), dtype=dtype)


def sort_pairs(
    keys: Tensor, values: Tensor, count: Tensor, begin_bit: int, end_bit: int, out_keys: Tensor, out_values: Tensor
) -> None:
    """See `cuda_ext.sort_pairs`."""
    keys[int(count) :] = LARGEST_KEY
    digits = keys >> begin_bit
    if end_bit < 64:
        digits &= (1 << (end_bit - begin_bit)) - 1
    order = torch.sort(digits, stable=True).indices
    out_keys.copy_(keys[order])
    out_values.copy_(values[order])


def publish_count(count: Tensor, addresses: Sequence[int], limit: int) -> None:
    """See `cuda_ext.publish_count`."""
    for address in addresses:
        tensor_at(address, 1, torch.int64, count.device).copy_(count.clamp(max=limit))


def _run(
    keys_at: Sequence[int], values_at: Sequence[int], counts: list[int], first: int, end: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return the keys and values of the run on ranks [first, end), copied together."""
    length, ranks = sum(counts[first:end]), end - first
    part_sizes = [(j + 1) * length // ranks - j * length // ranks for j in range(ranks)]
    parts = list(zip(range(first, end), part_sizes, strict=True))
    keys = torch.cat([tensor_at(keys_at[rank], piece, torch.int64, device) for rank, piece in parts])
    return keys, torch.cat([tensor_at(values_at[rank], piece, torch.int32, device) for rank, piece in parts])


def merge_level(
    keys_at: Sequence[int], values_at: Sequence[int], counts: Tensor, first: int, middle: int, end: int, rank: int,
    out_keys: Tensor, out_values: Tensor,
) -> Tensor:  # fmt: skip
    """See `cuda_ext.merge_level`."""
    all_counts: list[int] = counts.tolist()
    runs = [_run(keys_at, values_at, all_counts, *ranks, out_keys.device) for ranks in ((first, middle), (middle, end))]
    keys, values = (torch.cat(parts) for parts in zip(*runs, strict=True))
    keys, order = torch.sort(keys, stable=True)
    start, stop = ((rank - first + k) * len(keys) // (end - first) for k in range(2))
    stop = min(stop, start + len(out_keys))
    out_keys[: stop - start] = keys[start:stop]
    out_values[: stop - start] = values[order[start:stop]]
    return counts.new_full((1,), stop - start)


def intersect_keys(
    means2d: Tensor, conics: Tensor, row_opacities: Tensor, radii: Tensor, depths: Tensor, view_ids: Tensor,
    sizes: Sequence[int], tile_size: int, owner: int, capacity: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """See `cuda_ext.intersect_keys`."""
    views = enumerate(zip(sizes[::2], sizes[1::2], strict=True))
    patches = [n for view, (width, height) in views for n in (view, 0, 0, width, height)]
    offsets, rows = intersect(means2d, conics, row_opacities, radii, depths, view_ids, patches, tile_size)
    tiles = torch.repeat_interleave(torch.arange(len(offsets) - 1, device=rows.device), offsets.diff().long())
    bits = depths.view(torch.int32).long() & 0xFFFFFFFF
    bits = torch.where(bits >= 2**31, 2**32 - 1 - bits, bits + 2**31)  # in the depths' order, and never below 0
    order = torch.sort(rows, stable=True).indices  # by row, then by depth: so by depth, ties by row, then by tile
    order = order[torch.sort(bits[rows[order].long()], stable=True).indices]
    rows, tiles = rows[order].long(), tiles[order]
    keys = means2d.new_full((capacity,), LARGEST_KEY, dtype=torch.int64)
    values = means2d.new_full((capacity,), -1, dtype=torch.int32)
    keys[: len(rows)] = (tiles << 32 | bits[rows])[:capacity]
    whole = owner << OWNER_SHIFT | rows
    values[: len(rows)] = torch.where(whole >= 2**31, whole - 2**32, whole).int()[:capacity]
    return keys, values, torch.full((1,), len(rows), device=means2d.device)


def band_lists(
    keys_at: Sequence[int], values_at: Sequence[int], counts: Tensor, bands: Sequence[int], where: Tensor, segment: int,
    capacity: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """See `cuda_ext.band_lists`."""
    keys, values = _run(keys_at, values_at, counts.tolist(), 0, len(keys_at), counts.device)
    lengths, parts = [where.new_zeros(1)], [values[:0]]
    for first, end in zip(bands[::2], bands[1::2], strict=True):
        tiles = torch.arange(first, end + 1, device=keys.device)
        places = torch.searchsorted(keys, tiles << 32)
        lengths.append(places.diff().to(where.dtype))
        start, stop = int(places[0]), int(places[-1])
        parts.append(values[start:stop])
    listed = torch.cat(parts).long() & 0xFFFFFFFF
    owners = (listed >> OWNER_SHIFT).clamp(max=where.shape[0] - 1)
    rows = (listed & (MOST_ROWS - 1)).clamp(max=where.shape[1] - 1)
    lines = owners * segment + where[owners, rows].clamp(0, segment - 1)
    row_ids = where.new_full((capacity,), -1)
    row_ids[: len(lines)] = lines[:capacity].int()
    offsets = torch.cat(lengths).cumsum(0).clamp(max=capacity).int()
    return offsets, row_ids, torch.full((1,), len(lines), device=where.device)
