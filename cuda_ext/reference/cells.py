"""`cell_windows` and `cells_reached` in torch's operators. See `cuda_ext.ops.exchange.cells`."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

TILE = 16


class _Rays(NamedTuple):
    """Of views: where their cameras are, [V, 3], and what a ray goes along the world's axes for each unit of depth: at
    pixel (0, 0), and more for each pixel to the right and down, [V, 3] each. float64."""

    start: Tensor
    corner: Tensor
    right: Tensor
    down: Tensor


def _rays(viewmats: Tensor, Ks: Tensor) -> _Rays:
    viewmats, Ks = viewmats.double(), Ks.double()
    x, y, z = viewmats[:, :3, :3].unbind(1)  # rows are the camera's axes
    right, down = x / Ks[:, 0, 0, None], y / Ks[:, 1, 1, None]
    corner = z - Ks[:, 0, 2, None] * right - Ks[:, 1, 2, None] * down
    moved = [axis * viewmats[:, k, 3, None] for k, axis in enumerate((x, y, z))]
    return _Rays(-(moved[0] + moved[1] + moved[2]), corner, right, down)


@torch.no_grad()
def cell_windows(
    viewmats: Tensor, Ks: Tensor, axes: Sequence[int], planes: Sequence[float], paths: Sequence[int],
    order: Sequence[int], upward: Sequence[int], drawn: Sequence[int], patches: Sequence[int],
) -> Tensor:  # fmt: skip
    """See `cuda_ext.ops.exchange.cells.cell_windows`."""
    device, splits = viewmats.device, len(axes)
    cells = len(order) // len(viewmats)
    depth = len(paths) // cells
    rays = _rays(viewmats, Ks)
    found = [torch.zeros(0, 2, dtype=torch.float64, device=device)]
    for k in range(0, len(patches), 6):
        view, own, *seen = patches[k : k + 6]
        x, y = (torch.arange(a, b, TILE, dtype=torch.float64, device=device) + TILE / 2
                for a, b in ((seen[0], seen[2]), (seen[1], seen[3])))  # fmt: skip
        rises = upward[view * splits : (view + 1) * splits]
        stretches: list[tuple[Tensor, Tensor]] = []
        for cell in order[view * cells : (view + 1) * cells]:
            enters = torch.zeros(len(y), len(x), dtype=torch.float64, device=device)
            leaves = torch.full_like(enters, torch.inf)
            for code in paths[cell * depth : (cell + 1) * depth]:
                if code < 0:
                    break
                split, above = code // 2, code % 2
                axis, up = axes[split], rises[split] != 0
                ahead = rays.corner[view, axis] + rays.right[view, axis] * x
                ahead = ahead[None, :] + (rays.down[view, axis] * y)[:, None]
                crosses = ahead > 0 if up else ahead < 0
                at = torch.where(crosses, (planes[split] - rays.start[view, axis]) / ahead, torch.inf)
                at = torch.minimum(torch.maximum(at, enters), leaves)
                enters, leaves = (enters, at) if up != (above == 1) else (at, leaves)
            stretches.append((enters, leaves))
        rectangles = [
            [drawn[i + 2 : i + 6] for i in range(0, len(drawn), 6) if drawn[i] == view and drawn[i + 1] == place]
            for place in range(cells)
        ]
        found.append(_widened(stretches, own, rectangles, seen).view(-1, 2))
    return torch.cat(found)


def _widened(
    stretches: Sequence[tuple[Tensor, Tensor]], own: int, drawn: Sequence[Sequence[Sequence[int]]], seen: Sequence[int]
) -> Tensor:
    """Return [h, w, 2] a cell's stretch with its share of those of cells that do not draw the tile.

    Args:
        stretches: of all cells, front to back. own: which of them.
        drawn: where each is drawn. seen: where this one is.
    """
    enters, leaves = stretches[own]
    before, behind = torch.full_like(enters, -torch.inf), torch.full_like(enters, torch.inf)
    known_before, known_behind = (torch.zeros_like(enters, dtype=torch.bool) for _ in range(2))
    for k, rectangles in enumerate(drawn):
        if k == own:
            continue
        here = torch.zeros_like(known_before)
        for x0, y0, x1, y1 in rectangles:
            left, top = max(x0 - seen[0], 0) // TILE, max(y0 - seen[1], 0) // TILE
            right, bottom = -(-max(x1 - seen[0], 0) // TILE), -(-max(y1 - seen[1], 0) // TILE)
            here[top:bottom, left:right] = True
        if k < own:  # the last of these is the nearest
            before = torch.where(here, stretches[k][1], before)
            known_before |= here
        else:
            new = here & ~known_behind
            behind = torch.where(new, stretches[k][0], behind)
            known_behind |= here
    first = torch.where(known_before, _middle(before, enters), -torch.inf)
    last = torch.where(known_behind, _middle(leaves, behind), torch.inf)
    return torch.stack([first, last], -1)


def _middle(a: Tensor, b: Tensor) -> Tensor:
    return torch.where(a == b, a, (a + b) / 2)


@torch.no_grad()
def cells_reached(
    view_ids: Tensor, means2d: Tensor, radii: Tensor, depths: Tensor, viewmats: Tensor, Ks: Tensor,
    boxes: Sequence[float],
) -> Tensor:  # fmt: skip
    """See `cuda_ext.ops.exchange.cells.cells_reached`."""
    rays, place = _rays(viewmats, Ks), view_ids.long().clamp(0, len(viewmats) - 1)
    # A box around the middles of the tiles that the row's box overlaps: most rows overlap one or two.
    first, last = (((means2d.double() + side * radii) / TILE).floor() * TILE + TILE / 2 for side in (-1, 1))
    centre, half = (first + last) / 2, (last - first) / 2
    right, down = rays.right[place], rays.down[place]
    along = rays.corner[place] + right * centre[:, :1] + down * centre[:, 1:]
    width = right.abs() * half[:, :1] + down.abs() * half[:, 1:]
    depth = depths.double()[:, None]
    middle, width = rays.start[place] + depth * along, depth * width
    width = width * (1 + 1e-6) + 1e-9 * middle.abs()  # depths are rounded
    low, high = middle - width, middle + width
    found = torch.ones(len(boxes) // 6, len(depths), dtype=torch.bool, device=depths.device)
    for cell, inside in enumerate(found):
        for axis in range(3):
            lower, upper = boxes[6 * cell + axis], boxes[6 * cell + 3 + axis]
            if lower > -torch.inf:
                inside &= high[:, axis] >= lower
            if upper < torch.inf:
                inside &= low[:, axis] <= upper
    return found
