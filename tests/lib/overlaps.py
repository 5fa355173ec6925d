"""Rule of exchanged rows, stated apart from the operators: which rows overlap a pixel centre of some patches."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ns_multigpu.core.types import Patch, Splats, View


def overlaps(splats: Splats, views: Sequence[View], patches: Sequence[Patch]) -> Tensor:
    """Return the rows with a pixel centre of the patches, halo included, within their `radii`: [M] bool."""
    means, radii = splats.rows["means2d"].detach(), splats.rows["radii"]
    found = torch.zeros(len(splats), dtype=torch.bool, device=means.device)
    for patch in patches:
        x0, y0, x1, y1 = patch.rendered(views[patch.view])
        corner, size = means.new_tensor([x0, y0]), means.new_tensor([x1 - x0, y1 - y0])
        zero = torch.zeros_like(size)
        first = torch.ceil(means - radii - corner - 0.5).clamp(zero, size)
        end = torch.floor(means + radii - corner + 0.5).clamp(zero, size)
        found |= (first < end).all(-1) & (splats.hits.view_ids == patch.view)
    return found & (radii > 0).all(-1)
