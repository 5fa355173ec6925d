"""Pure-torch tile intersection and compositing: the plain statement of what the native operators compute.

Differentiable by autograd alone, on any device and float type. Meant for tests and for machines without a compiler:
tens of times slower than the native operators.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

ALPHA_MIN = 1.0 / 255.0
ALPHA_MAX = 0.999
TRANSMITTANCE_MIN = 1e-4

# Above this many (pixel, splat) pairs the tiles are computed a second time in backward instead of being remembered:
# about 60 bytes a pair, so 4 GB.
_REMEMBERED_PAIRS = 2**26


class PatchRectangle(NamedTuple):
    view: int
    x0: int
    y0: int
    x1: int
    y1: int


def split_patches(patches: Sequence[int]) -> list[PatchRectangle]:
    """Return the operators' flat list, five integers a patch."""
    return [PatchRectangle(*patches[k : k + 5]) for k in range(0, len(patches), 5)]


def tiles_of(patch: PatchRectangle, tile_size: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield rectangles (x0, y0, x1, y1) of the patch's tiles, row by row, in pixels of the view."""
    if patch.x1 > patch.x0:
        for y in range(patch.y0, patch.y1, tile_size):
            for x in range(patch.x0, patch.x1, tile_size):
                yield x, y, min(x + tile_size, patch.x1), min(y + tile_size, patch.y1)


def _box(means2d: Tensor, radii: Tensor, patch: PatchRectangle, tile_size: int) -> tuple[Tensor, Tensor]:
    """Return the first and end tile [M,2] (x, y) of each row's box: a pixel centre is within radii of the mean."""
    origin = means2d.new_tensor([patch.x0, patch.y0])
    size = means2d.new_tensor([patch.x1 - patch.x0, patch.y1 - patch.y0])
    extent = radii.to(means2d.dtype)
    zero = torch.zeros_like(size)
    first = torch.ceil(means2d - extent - origin - 0.5).clamp(zero, size).long()
    end = torch.floor(means2d + extent - origin + 0.5).clamp(zero, size).long()
    hit = (end > first).all(dim=1, keepdim=True) & (radii > 0).all(dim=1, keepdim=True)
    none = torch.zeros_like(first)
    return torch.where(hit, first // tile_size, none), torch.where(hit, (end - 1) // tile_size + 1, none)


@torch.no_grad()
def intersect(
    means2d: Tensor,
    conics: Tensor,
    row_opacities: Tensor,
    radii: Tensor,
    depths: Tensor,
    view_ids: Tensor,
    patches: Sequence[int],
    tile_size: int,
) -> tuple[Tensor, Tensor]:
    """Compute `cuda_ext.intersect` by the rows' boxes alone, so lists may be longer than the native operator's."""
    del conics, row_opacities
    counts, ids = [means2d.new_zeros(1, dtype=torch.int64)], [means2d.new_zeros(0, dtype=torch.int32)]
    by_depth = torch.sort(depths, stable=True).indices
    for patch in split_patches(patches):
        columns = -(-(patch.x1 - patch.x0) // tile_size)
        tiles = columns * -(-(patch.y1 - patch.y0) // tile_size)
        if tiles == 0:
            continue
        rows = by_depth[view_ids[by_depth] == patch.view]
        first, end = _box(means2d[rows], radii[rows], patch, tile_size)
        span = end - first
        hits = span.prod(dim=1)
        entry = torch.repeat_interleave(torch.arange(len(rows), device=rows.device), hits)
        nth = torch.arange(len(entry), device=rows.device) - (hits.cumsum(0) - hits)[entry]
        tile = (first[entry, 1] + nth // span[entry, 0]) * columns + first[entry, 0] + nth % span[entry, 0]
        ids.append(rows[entry[torch.sort(tile, stable=True).indices]].int())
        counts.append(torch.bincount(tile, minlength=tiles))
    return torch.cat(counts).cumsum(0).int(), torch.cat(ids)


def at_capacity(tile_offsets: Tensor, row_ids: Tensor, capacity: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the lists of `intersect` in the form of `intersect_capacity`: cut off, or filled up with -1, at
    `capacity`."""
    listed = row_ids.shape[0]
    padded = row_ids.new_full((capacity,), -1)
    padded[:listed] = row_ids[:capacity]
    return tile_offsets.clamp(max=capacity), padded, torch.full((1,), listed, device=row_ids.device)


def intersect_capacity(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `cuda_ext.intersect_capacity` from the arguments of `intersect` and the capacity."""
    *inputs, capacity = arguments
    return at_capacity(*intersect(*inputs), capacity)


class _SpreadWithAbsSum(torch.autograd.Function):
    """Gives every pixel its own copy of a splat's offset; backward also hands the sum of |gradient| to the probe."""

    @staticmethod
    def forward(ctx: Any, offsets: Tensor, probe: Tensor) -> Tensor:
        return offsets.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        return grads[0], grads[0].abs().sum(dim=0)


def _composite(
    splats: Tensor, probe: Tensor | None, centres: Tensor, mark_stops: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return colours [p,D], alpha [p] and the last contributing splat's index [p] of p pixels under n sorted splats.

    splats [n, 6+D] = (mean x, mean y, a, b, c, opacity, features); probe [n,2]; centres [p,2].
    """
    offsets = splats[None, :, :2] - centres[:, None, :]
    if probe is not None:
        offsets = _SpreadWithAbsSum.apply(offsets, probe)
    dx, dy = offsets.unbind(dim=-1)
    a, b, c, opacity = splats[:, 2:6].unbind(dim=1)
    sigma = 0.5 * (a * dx * dx + c * dy * dy) + b * dx * dy
    alpha = (opacity * torch.exp(-sigma.clamp(min=0))).clamp(max=ALPHA_MAX)
    alpha = torch.where((sigma >= 0) & (alpha >= ALPHA_MIN), alpha, torch.zeros_like(alpha))
    after = torch.cumprod(1 - alpha, dim=1)
    before = torch.cat([torch.ones_like(after[:, :1]), after[:, :-1]], dim=1)
    weights = torch.where(after > TRANSMITTANCE_MIN, before * alpha, torch.zeros_like(alpha))
    index = torch.arange(len(splats), device=splats.device).expand_as(weights)
    last = torch.where(weights > 0, index, -1).amax(dim=1)
    covered = weights.sum(dim=1)
    if mark_stops:
        covered = torch.where((after <= TRANSMITTANCE_MIN).any(dim=1), -covered, covered)
    return weights @ splats[:, 6:], covered, last


def rasterize(
    means2d: Tensor,
    conics: Tensor,
    row_opacities: Tensor,
    features: Tensor,
    tile_offsets: Tensor,
    row_ids: Tensor,
    patches: Sequence[int],
    tile_size: int,
    absgrad_probe: Tensor | None = None,
    mark_stops: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `cuda_ext.rasterize`, one tile after the other."""
    device, channels = means2d.device, features.shape[1]
    offsets = tile_offsets.tolist()
    lengths = [end - start for start, end in pairwise(offsets)]
    rows = row_ids[: offsets[-1]].long()  # behind these there may be padding
    table = torch.cat([means2d, conics, row_opacities[:, None], features], dim=1)
    nothing = table[:0].sum()  # keeps the outputs differentiable where no splat touches any pixel
    if absgrad_probe is not None:
        nothing = nothing + absgrad_probe[:0].sum()
    splats = table[rows].split(lengths)
    probes = [None] * len(lengths) if absgrad_probe is None else absgrad_probe[rows].split(lengths)
    composite: Callable[..., Any] = _composite
    if len(rows) * tile_size**2 > _REMEMBERED_PAIRS and torch.is_grad_enabled():
        again = partial(checkpoint, _composite, use_reentrant=False, preserve_rng_state=False)
        composite = cast(Callable[..., Any], again)

    outs, alphas, lasts, pixels = [], [], [], []
    first_pixel, t = 0, 0
    for patch in split_patches(patches):
        width = patch.x1 - patch.x0
        for x0, y0, x1, y1 in tiles_of(patch, tile_size):
            y, x = torch.meshgrid(
                torch.arange(y0, y1, device=device), torch.arange(x0, x1, device=device), indexing="ij"
            )
            pixels.append((first_pixel + (y - patch.y0) * width + x - patch.x0).flatten())
            if lengths[t] > 0:
                centres = torch.stack([x.flatten(), y.flatten()], dim=1).to(means2d) + 0.5
                out, alpha, last = composite(splats[t], probes[t], centres, mark_stops)
                last = torch.where(last >= 0, last + offsets[t], last)
            else:
                out, alpha = means2d.new_zeros(x.numel(), channels), means2d.new_zeros(x.numel())
                last = torch.full((x.numel(),), -1, device=device)
            outs.append(out)
            alphas.append(alpha)
            lasts.append(last.int())
            t += 1
        first_pixel += width * (patch.y1 - patch.y0)
    if not pixels:
        out, alpha = features.new_zeros(0, channels), features.new_zeros(0)
        return out + nothing, alpha + nothing, torch.zeros(0, dtype=torch.int32, device=device)
    order = torch.argsort(torch.cat(pixels))
    return torch.cat(outs)[order] + nothing, torch.cat(alphas)[order] + nothing, torch.cat(lasts)[order]
