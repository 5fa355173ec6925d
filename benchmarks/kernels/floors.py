"""Lower bounds of the times of a step's stages on an H200, from counts of a scene.

A stage must move certain bytes, at 4.3 TB/s. Rasterization must also execute some 16 instructions for every pair of
splat and pixel in the forward pass and 45 in the backward pass, at 33 T lane-instructions/s (132 multiprocessors of 128
lanes at 1.98 GHz). Bytes are those of this project's own data: 59 parameters a Gaussian with two moments each, a
48-byte splat, a 64-byte record of gradients, 4 bytes an intersection. A floor is the larger of the two times.

A pair counts if its splat overlaps the pixel's 8x8 block (alpha 1/255 at the closest point of the block) and is not
deeper than the last splat blended in the block. Any rasterizer that skips 8x8 blocks evaluates these pairs.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from cuda_ext.ops.optim.fused import SplatRows

BYTES_PER_MS = 4.3e9
INSTRUCTIONS_PER_MS = 33e9
GROUP = 128
"""Points that are culled together."""
BLOCK, TILE = 8, 16
"""Sides in pixels."""

_FORWARD_INSTRUCTIONS, _BACKWARD_INSTRUCTIONS = 16, 45
_INTERSECTIONS_AT_ONCE = 1 << 21


@dataclass(frozen=True)
class Counts:
    """Of one view of a scene.

    Attributes:
        points: N. candidates: those in groups of 128 of which any is kept by culling. kept: rows after culling.
        visible: V, rows that are drawn. intersections: I, of splats and tiles.
        blended: I', those no deeper than the last splat that was blended in their tile.
        pairs: of splats and pixels, see above. pixels: P.
    """

    points: int
    candidates: int
    kept: int
    visible: int
    intersections: int
    blended: int
    pairs: int
    pixels: int


def count(points: int, rows: SplatRows, tile_offsets: Tensor, row_ids: Tensor, last: Tensor, size: list[int]) -> Counts:
    """Count the points, rows and intersections that a rendering of one whole view needed.

    Args:
        points: N.
        rows, tile_offsets, row_ids, last: of `splat_forward`, `intersect_capacity` and `rasterize` (tiles of 16).
        size: width and height.
    """
    kept = int(rows.count)
    groups = torch.zeros(-(-points // GROUP), dtype=torch.bool, device=last.device)
    groups[(rows.point_ids[:kept] // GROUP).long()] = True
    deepest = _deepest(last, size)
    first = tile_offsets[:-1].long()
    blended = (deepest.amax(dim=1) - first + 1).clamp(min=0).sum()
    return Counts(
        points=points,
        candidates=min(int(groups.sum()) * GROUP, points),
        kept=kept,
        visible=int((rows.radii > 0).all(dim=-1).sum()),
        intersections=int(tile_offsets[-1]),
        blended=int(blended),
        pairs=_pairs(rows, tile_offsets.long(), row_ids, deepest, size),
        pixels=last.numel(),
    )


def _deepest(last: Tensor, size: list[int]) -> Tensor:
    """Return [T, 4], the position in row_ids of the last splat blended in each tile's four blocks; -1 for none."""
    width, height = size
    across, down = -(-width // TILE), -(-height // TILE)
    image = last.new_full((down * TILE, across * TILE), -1)
    image[:height, :width] = last.view(height, width)
    blocks = image.view(down, 2, BLOCK, across, 2, BLOCK).amax(dim=(2, 5))
    return blocks.permute(0, 2, 1, 3).reshape(down * across, 4).long()


def _pairs(rows: SplatRows, offsets: Tensor, row_ids: Tensor, deepest: Tensor, size: list[int]) -> int:
    width, height = size
    across, total = -(-width // TILE), int(offsets[-1])
    pairs = torch.zeros((), dtype=torch.int64, device=offsets.device)
    for start in range(0, total, _INTERSECTIONS_AT_ONCE):
        place = torch.arange(start, min(start + _INTERSECTIONS_AT_ONCE, total), device=offsets.device)
        tile = torch.searchsorted(offsets, place, right=True) - 1
        row = row_ids[place].long()
        mean, conic, opacity = rows.means2d[row], rows.conics[row], rows.opacities[row]
        for block in range(4):
            x = tile % across * TILE + block % 2 * BLOCK
            y = tile // across * TILE + block // 2 * BLOCK
            wide, tall = (width - x).clamp(0, BLOCK), (height - y).clamp(0, BLOCK)
            box = (x + 0.5, x + wide - 0.5, y + 0.5, y + tall - 0.5)
            met = (place <= deepest[tile, block]) & (_least_sigma(mean, conic, box) <= (255 * opacity).log())
            pairs += (met * wide * tall).sum()
    return int(pairs)


def _least_sigma(mean: Tensor, conic: Tensor, box: tuple[Tensor, Tensor, Tensor, Tensor]) -> Tensor:
    """Return the least of the Gaussians' exponents [M] over boxes of pixel centres (x_lo, x_hi, y_lo, y_hi).

    It lies on one of the two sides that face the mean, or is zero inside.
    """
    a, b, c = conic.unbind(dim=-1)
    left, right, top, bottom = (edge - mean[:, axis] for edge, axis in zip(box, (0, 0, 1, 1), strict=True))
    zero = torch.zeros_like(a)
    near_x, near_y = zero.clamp(left, right), zero.clamp(top, bottom)
    along_y, along_x = (-b / c * near_x).clamp(top, bottom), (-b / a * near_y).clamp(left, right)

    def sigma(x: Tensor, y: Tensor) -> Tensor:
        return 0.5 * (a * x * x + c * y * y) + b * x * y

    return torch.minimum(sigma(near_x, along_y), sigma(along_x, near_y))


def floors(counts: Counts) -> dict[str, float]:
    """Return the lower bounds, in milliseconds, of each part of a step and of several together."""
    n = counts
    splats = 48 * n.visible + 4 * n.blended

    def bytes_ms(count: float) -> float:
        return count / BYTES_PER_MS

    def pairs_ms(instructions: int) -> float:
        return instructions * n.pairs / INSTRUCTIONS_PER_MS

    parts = {
        "splat_forward": bytes_ms(32 * n.points / GROUP + 44 * n.candidates + 248 * n.visible),
        "intersect": bytes_ms(124 * n.visible + 34 * n.intersections),
        "rasterize": max(bytes_ms(splats + 20 * n.pixels), pairs_ms(_FORWARD_INSTRUCTIONS)),
        "loss": bytes_ms(27 * n.pixels),
        "backward": max(bytes_ms(splats + 32 * n.pixels + 144 * n.visible), pairs_ms(_BACKWARD_INSTRUCTIONS)),
        "update": bytes_ms(48 * n.visible + 1416 * n.points),
        "adam": bytes_ms(4 * 59 * 7 * n.points),
    }
    forward = sum(parts[p] for p in ("splat_forward", "intersect", "rasterize"))
    step = forward + sum(parts[p] for p in ("loss", "backward", "update"))
    return {**parts, "forward": forward, "forward and backward": forward + parts["backward"], "step": step}
