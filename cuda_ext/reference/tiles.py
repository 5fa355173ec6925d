"""Compositing of the tiles of patches, one after the other, for the references of several primitives."""

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from cuda_ext.reference.rasterization import split_patches, tiles_of

Composited = tuple[Tensor, Tensor, Tensor, Tensor]


def composite_tiles(
    table: Tensor, tile_offsets: Tensor, row_ids: Tensor, patches: Sequence[int], tile_size: int, extra: int,
    composite: Callable[[Tensor, Tensor], Composited],
) -> Composited:  # fmt: skip
    """Return colours [P, 3], `extra` further numbers, signed alpha [P] and the last entry [P] int32 of all pixels.

    Args:
        table: [M, n] rows. tile_offsets, row_ids, patches, tile_size: see `cuda_ext.rasterize`.
        extra: how many; of one the output is [P].
        composite: makes the four of p pixels from their rows, nearest first, and their centres [p, 2].
    """
    device, offsets = table.device, tile_offsets.tolist()
    lengths = [end - start for start, end in pairwise(offsets)]
    listed = table[row_ids[: offsets[-1]].long()].split(lengths)
    shapes: tuple[tuple[int, ...], ...] = ((3,), () if extra == 1 else (extra,), ())
    parts = [[table.new_zeros(0, *shape) for shape in shapes]]
    ends, pixels = (
        [torch.zeros(0, dtype=torch.int32, device=device)],
        [torch.zeros(0, dtype=torch.int64, device=device)],
    )
    first_pixel, t = 0, 0
    for patch in split_patches(patches):
        width = patch.x1 - patch.x0
        for x0, y0, x1, y1 in tiles_of(patch, tile_size):
            lines, columns = torch.arange(y0, y1, device=device), torch.arange(x0, x1, device=device)
            y, x = torch.meshgrid(lines, columns, indexing="ij")
            pixels.append((first_pixel + (y - patch.y0) * width + x - patch.x0).flatten())
            if lengths[t] > 0:
                centres = torch.stack([x.flatten(), y.flatten()], dim=1).to(table) + 0.5
                *found, last = composite(listed[t], centres)
                parts.append(found)
                ends.append(torch.where(last >= 0, last + offsets[t], last).int())
            else:
                parts.append([table.new_zeros(x.numel(), *shape) for shape in shapes])
                ends.append(torch.full((x.numel(),), -1, dtype=torch.int32, device=device))
            t += 1
        first_pixel += width * (patch.y1 - patch.y0)
    order = torch.argsort(torch.cat(pixels))
    nothing = table[:0].sum()  # keeps the outputs differentiable where no splat touches any pixel
    color, more, alpha = (torch.cat(part)[order] + nothing for part in zip(*parts, strict=True))
    return color, more, alpha, torch.cat(ends)[order]
