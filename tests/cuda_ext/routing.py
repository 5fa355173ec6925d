"""All rows routed at once."""

from collections.abc import Sequence

import torch
from torch import Tensor

from cuda_ext import route_lines


def route(
    view_ids: Tensor, count: Tensor, means2d: Tensor, radii: Tensor, patches: list[int], ranks: int,
    reached: Tensor | None = None, cells: Sequence[int] = (),
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the place [ranks, M] of each row and the counts [ranks] that `route_lines` writes."""
    place = torch.full((ranks, len(view_ids)), 77, dtype=torch.int32, device=view_ids.device)
    counts = torch.full((ranks,), 99, device=view_ids.device)
    route_lines(view_ids, count, means2d, radii, patches, place, counts, reached, cells)
    return place, counts
