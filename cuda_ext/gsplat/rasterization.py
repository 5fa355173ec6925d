"""`intersect` and `rasterize` on CUDA through gsplat 1.4.0's kernels, until our own take their place.

gsplat renders whole images; a patch is handed over as an image of its own, with the means shifted by the patch's
origin. Ids stay those of our rows throughout, since gsplat only ever indexes its inputs with them. gsplat's square
around a splat, as wide as the larger side of our box, holds our whole support, so the alpha rule alone decides. Ties in
depth keep the order of rows (its radix sort is stable). The sums of its backward are atomic: not the same bits on every
run. Both directions read a few counts back to the host when several patches have pixels, `intersect` always does.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.library import Library

from cuda_ext.dispatch.gsplat_kernels import gsplat_kernels, in_gsplat_mode
from cuda_ext.gsplat.projection import check_float32
from cuda_ext.reference.rasterization import PatchRectangle, at_capacity, split_patches

# The channel counts that gsplat 1.4.0 compiles; others are filled up with zeros.
_CHANNELS = (1, 2, 3, 4, 5, 8, 9, 16, 17, 32, 33, 64, 65, 128, 129, 256, 257, 512, 513)


@in_gsplat_mode
def _register(library: Library) -> None:
    """Register these functions for the CUDA dispatch key."""
    library.impl("intersect", _intersect, "CUDA")
    library.impl("intersect_capacity", _intersect_capacity, "CUDA")
    library.impl("rasterize", _rasterize, "CUDA")
    library.impl("rasterize_backward", _rasterize_backward, "CUDA")


def _tiles(patch: PatchRectangle, tile_size: int) -> tuple[int, int]:
    """Return the numbers of tiles across and down; both 0 for an empty patch."""
    across, down = -(-(patch.x1 - patch.x0) // tile_size), -(-(patch.y1 - patch.y0) // tile_size)
    return (across, down) if across * down else (0, 0)


def _shifted(means2d: Tensor, patch: PatchRectangle) -> Tensor:
    """Return means [1,M,2] relative to the patch's corner, for gsplat's single image."""
    return (means2d - means2d.new_tensor([patch.x0, patch.y0]))[None].contiguous()


def _intersect(
    means2d: Tensor, conics: Tensor, row_opacities: Tensor, radii: Tensor, depths: Tensor, view_ids: Tensor,
    patches: Sequence[int], tile_size: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    check_float32(means2d)
    offsets, ids, count = [], [], 0
    alive = (radii > 0).all(dim=1)
    for patch in split_patches(patches):
        across, down = _tiles(patch, tile_size)
        if across == 0:
            continue
        if means2d.shape[0] == 0:
            offsets.append(torch.full((across * down,), count, dtype=torch.int32, device=means2d.device))
            continue
        square = torch.where(alive & (view_ids == patch.view), radii.amax(dim=1), 0).int()
        _, keys, rows = gsplat_kernels().isect_tiles(
            _shifted(means2d, patch), square[None].contiguous(), depths[None].contiguous(), None, None,
            1, tile_size, across, down, True, True,
        )  # fmt: skip
        encoded = gsplat_kernels().isect_offset_encode(keys.contiguous(), 1, across, down)
        offsets.append(encoded.flatten() + count)
        ids.append(rows)
        count += rows.shape[0]
    if count >= 2**31:
        raise RuntimeError("intersect: over 2^31 - 1 intersections of splats and tiles; render fewer patches at once.")
    offsets.append(torch.full((1,), count, dtype=torch.int32, device=means2d.device))
    return torch.cat(offsets), torch.cat(ids) if ids else view_ids.new_zeros(0)


def _intersect_capacity(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    *inputs, capacity = arguments
    return at_capacity(*_intersect(*inputs), capacity)


class _Slice:
    """Inputs of gsplat for one patch: its image, its tiles' lists, and where its pixels lie among all."""

    def __init__(
        self, patch: PatchRectangle, tile_size: int, offsets: Tensor, row_ids: Tensor, base: int, pixel: int
    ) -> None:
        across, down = _tiles(patch, tile_size)
        self.patch = patch
        self.width, self.height = patch.x1 - patch.x0, patch.y1 - patch.y0
        self.offsets = (offsets - base).view(1, down, across).contiguous()
        self.row_ids = row_ids
        self.base = base  # gsplat counts `last` from the patch's first intersection, we from the first of all
        self.pixels = slice(pixel, pixel + self.width * self.height)

    def image(self, tensor: Tensor) -> Tensor:
        """Return [1,h,w,...], gsplat's layout, of this patch's part of a tensor [S,...]."""
        return tensor[self.pixels].view(1, self.height, self.width, *tensor.shape[1:]).contiguous()


def _slices(patches: Sequence[int], tile_size: int, tile_offsets: Tensor, row_ids: Tensor) -> list[_Slice]:
    """Return the patches that have pixels. Waits for the device when there are several, for their counts of
    intersections."""
    cut = split_patches(patches)
    tiles = [across * down for across, down in (_tiles(patch, tile_size) for patch in cut)]
    starts = [sum(tiles[:k]) for k in range(len(cut) + 1)]
    if sum(count > 0 for count in tiles) > 1:
        bases = tile_offsets[torch.tensor(starts, device=tile_offsets.device)].tolist()
    else:
        bases = [0 if start == 0 else row_ids.shape[0] for start in starts]
    slices, pixel = [], 0
    for k, patch in enumerate(cut):
        if tiles[k]:
            part = tile_offsets[starts[k] : starts[k + 1]]
            rows = row_ids[bases[k] : bases[k + 1]].contiguous()
            slices.append(_Slice(patch, tile_size, part, rows, bases[k], pixel))
        pixel += (patch.x1 - patch.x0) * (patch.y1 - patch.y0)
    return slices


def _padded(tensor: Tensor) -> Tensor:
    """Pad channels (the last dimension) with zeros to a number that gsplat supports."""
    channels = tensor.shape[-1]
    known = next((count for count in _CHANNELS if count >= channels), None)
    if known is None:
        raise ValueError(f"rasterize: gsplat blends at most {_CHANNELS[-1]} channels at once, got {channels}.")
    return tensor if known == channels else torch.nn.functional.pad(tensor, (0, known - channels))


def _rasterize(
    means2d: Tensor, conics: Tensor, row_opacities: Tensor, features: Tensor, tile_offsets: Tensor, row_ids: Tensor,
    patches: Sequence[int], tile_size: int, absgrad_probe: Tensor | None, mark_stops: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    del absgrad_probe, mark_stops  # for autograd alone; gsplat does not return where it stopped
    check_float32(means2d)
    pixels = sum((patch.x1 - patch.x0) * (patch.y1 - patch.y0) for patch in split_patches(patches))
    out = features.new_zeros(pixels, features.shape[1])
    alpha = features.new_zeros(pixels)
    last = torch.full((pixels,), -1, dtype=torch.int32, device=features.device)
    state = features.new_empty(0)  # the backward pass through gsplat needs nothing more
    if row_ids.shape[0] == 0:
        return out, alpha, last, state
    colors = _padded(features)[None].contiguous()
    for part in _slices(patches, tile_size, tile_offsets, row_ids):
        image, image_alpha, ends = gsplat_kernels().rasterize_to_pixels_fwd(
            _shifted(means2d, part.patch), conics[None].contiguous(), colors, row_opacities[None].contiguous(),
            None, None, part.width, part.height, tile_size, part.offsets, part.row_ids,
        )  # fmt: skip
        out[part.pixels] = image.flatten(0, 2)[:, : features.shape[1]]
        alpha[part.pixels] = image_alpha.flatten()
        # gsplat says 0 both for the first splat and for none; only in the latter case is alpha 0.
        last[part.pixels] = torch.where(image_alpha.flatten() > 0, ends.flatten() + part.base, -1)
    return out, alpha, last, state


def _rasterize_backward(
    means2d: Tensor, conics: Tensor, row_opacities: Tensor, features: Tensor, tile_offsets: Tensor, row_ids: Tensor,
    patches: Sequence[int], tile_size: int, alpha: Tensor, last: Tensor, state: Tensor, out: Tensor, v_out: Tensor,
    v_alpha: Tensor, absgrad: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    del state, out
    check_float32(means2d)
    v_means2d, v_conics = torch.zeros_like(means2d), torch.zeros_like(conics)
    v_opacities, v_features = torch.zeros_like(row_opacities), torch.zeros_like(features)
    v_abs = torch.zeros_like(means2d) if absgrad else means2d.new_zeros(0, 2)
    if row_ids.shape[0] == 0:
        return v_means2d, v_conics, v_opacities, v_features, v_abs
    colors, v_colors = _padded(features)[None].contiguous(), _padded(v_out)
    for part in _slices(patches, tile_size, tile_offsets, row_ids):
        part_abs, part_means2d, part_conics, part_colors, part_opacities = gsplat_kernels().rasterize_to_pixels_bwd(
            _shifted(means2d, part.patch), conics[None].contiguous(), colors, row_opacities[None].contiguous(),
            None, None, part.width, part.height, tile_size, part.offsets, part.row_ids,
            part.image(alpha[:, None]), (part.image(last) - part.base).clamp(min=0), part.image(v_colors),
            part.image(v_alpha[:, None]), absgrad,
        )  # fmt: skip
        v_means2d += part_means2d[0]
        v_conics += part_conics[0]
        v_opacities += part_opacities[0]
        v_features += part_colors[0, :, : features.shape[1]]
        if absgrad:
            v_abs += part_abs[0]
    return v_means2d, v_conics, v_opacities, v_features, v_abs
