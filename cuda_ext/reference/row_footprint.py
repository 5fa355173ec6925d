"""`footprint_counts` in torch's operators. See `cuda_ext.ops.exchange.row_footprint`."""

from collections.abc import Sequence

import torch
from torch import Tensor


@torch.no_grad()
def footprint_counts(view_ids: Tensor, count: Tensor, means2d: Tensor, radii: Tensor, patches: Sequence[int]) -> Tensor:
    """See `cuda_ext.ops.exchange.row_footprint.footprint_counts`."""
    alive = (torch.arange(len(view_ids), device=view_ids.device) < count) & (radii > 0).all(-1)
    low, high = means2d - radii, means2d + radii
    counts = [count.new_zeros(0)]
    for k in range(0, len(patches), 5):
        view, x0, y0, x1, y1 = patches[k : k + 5]
        corner, size = means2d.new_tensor([x0, y0]), means2d.new_tensor([x1 - x0, y1 - y0])
        none = torch.zeros_like(size)
        first = torch.ceil(low - corner - 0.5).clamp(none, size)
        end = torch.floor(high - corner + 0.5).clamp(none, size)
        counts.append(((first < end).all(-1) & (view_ids == view) & alive).sum(0, keepdim=True))
    return torch.cat(counts)
