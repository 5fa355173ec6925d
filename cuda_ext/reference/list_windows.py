"""`cuda_ext.clip_lists` in torch's operators."""

import torch
from torch import Tensor


def clip_lists(tile_offsets: Tensor, row_ids: Tensor, depths: Tensor, windows: Tensor) -> tuple[Tensor, Tensor]:
    """See `cuda_ext.ops.raster.list_windows.clip_lists`."""
    tiles, capacity = len(windows), len(row_ids)
    if tiles == 0 or capacity == 0 or len(depths) == 0:
        return torch.zeros_like(tile_offsets), torch.full_like(row_ids, -1)
    place = torch.arange(capacity, device=row_ids.device)
    tile = torch.searchsorted(tile_offsets, place.to(tile_offsets.dtype), right=True) - 1
    listed = tile < tiles
    low, high = windows.to(depths.dtype)[tile.clamp(0, tiles - 1)].unbind(1)
    depth = depths[row_ids.clamp_min(0).long()]
    kept = listed & (depth >= low) & (depth < high)
    before = torch.cat([kept.new_zeros(1, dtype=torch.int64), kept.cumsum(0)])
    # What is left out goes to a place behind the last, which is cut off.
    clipped = row_ids.new_full((capacity + 1,), -1).scatter(0, torch.where(kept, before[:-1], capacity), row_ids)[
        :capacity
    ]
    return before[tile_offsets.long()].to(tile_offsets.dtype), clipped
