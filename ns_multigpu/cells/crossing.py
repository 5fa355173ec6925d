# torch annotates only part of itself:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
"""Which depths of a tile are a cell's, and which splats reach it.

A splat counts as flat: it lies where its mean does along the view's axis, as blending by depth has it. Planes cut the
ray through a tile's middle into the cells' stretches, and all of the tile goes by these. So a splat at a plane is in
one cell in one tile and in the other in the next, and within a tile all are in order of depth.

Where a cell does not draw a tile, because nothing of it is in sight there, its stretch goes half to the cell before it
and half to that behind it, of those that draw the tile.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from ns_multigpu.cells.placing import ByCells
from ns_multigpu.cells.tree import CellTree
from ns_multigpu.core.crossing import Crossing
from ns_multigpu.core.plan import Plan
from ns_multigpu.core.types import TILE, View, stack_intrinsics, stack_viewmats

Rectangle = tuple[int, int, int, int]


class _Rays(NamedTuple):
    """Of views: where their cameras are, [V, 3], and what a ray goes along the world's axes for each unit of depth: at
    pixel (0, 0), and more for each pixel to the right and down, [V, 3] each. float64."""

    start: Tensor
    corner: Tensor
    right: Tensor
    down: Tensor


class CellsInViews(Crossing):
    """The cells of a placement. See `Crossing`."""

    def __init__(self, space: ByCells) -> None:
        self._space = space

    def windows(self, plan: Plan, views: Sequence[View], rank: int) -> Tensor:
        tree, device = self._space.tree, views[0].viewmat.device
        found = [torch.zeros(0, 2, dtype=torch.float64, device=device)]
        rays = _rays(views)
        drawn: dict[tuple[int, int], list[Rectangle]] = {}
        for patch in [p for patches in plan.drawn for p in patches] + list(plan.hidden):
            drawn.setdefault((patch.view, patch.cell), []).append(patch.rendered(views[patch.view]))
        for patch in plan.drawn[rank]:
            seen, order = patch.rendered(views[patch.view]), plan.order[patch.view]
            if seen[0] % TILE or seen[1] % TILE:
                raise ValueError(f"{patch}: where splats are in several cells patches begin with whole tiles.")
            x, y = (torch.arange(a, b, TILE, dtype=torch.float64, device=device) + TILE / 2
                    for a, b in ((seen[0], seen[2]), (seen[1], seen[3])))  # fmt: skip
            if tree is None or tree.cells == 1:
                stretch = _everything(len(y), len(x), device)
            else:
                bounds = _stretches(tree, rays, patch.view, order, x, y)
                others = [drawn.get((patch.view, cell), []) for cell in order]
                stretch = _widened(bounds, order.index(patch.cell), others, seen)
            found.append(stretch.view(-1, 2))
        return torch.cat(found)

    def reach(
        self, view_ids: Tensor, means2d: Tensor, radii: Tensor, depths: Tensor, views: Sequence[View], ranks: int
    ) -> Tensor:
        tree = self._space.tree
        if tree is None or tree.cells == 1:
            return torch.ones(ranks, len(depths), dtype=torch.bool, device=depths.device)
        rays, place = _rays(views), view_ids.long()
        # A box around the middles of the tiles that the row's box reaches: most rows reach one or two.
        first, last = (((means2d.double() + side * radii) / TILE).floor() * TILE + TILE / 2 for side in (-1, 1))
        centre, half = (first + last) / 2, (last - first) / 2
        right, down = rays.right[place], rays.down[place]
        along = rays.corner[place] + right * centre[:, :1] + down * centre[:, 1:]
        width = right.abs() * half[:, :1] + down.abs() * half[:, 1:]
        depth = depths.double()[:, None]
        middle, width = rays.start[place] + depth * along, depth * width
        width = width * (1 + 1e-6) + 1e-9 * middle.abs()  # depths are rounded
        low, high = middle - width, middle + width
        found = torch.zeros(ranks, len(depths), dtype=torch.bool, device=depths.device)
        for cell, box in enumerate(_boxes(tree)):
            inside = torch.ones_like(found[0])
            for axis in range(3):
                if box[0][axis] > -torch.inf:
                    inside &= high[:, axis] >= box[0][axis]
                if box[1][axis] < torch.inf:
                    inside &= low[:, axis] <= box[1][axis]
            found[self._space.rank_of(cell)] |= inside
        return found


@lru_cache(maxsize=4)
def _boxes(tree: CellTree) -> list[list[list[float]]]:
    return tree.boxes().tolist()


def _rays(views: Sequence[View]) -> _Rays:
    viewmats, Ks = stack_viewmats(views).detach().double(), stack_intrinsics(views).detach().double()
    axes = viewmats[:, :3, :3]  # rows are the camera's axes
    right = axes[:, 0] / Ks[:, 0, 0, None]
    down = axes[:, 1] / Ks[:, 1, 1, None]
    corner = axes[:, 2] - Ks[:, 0, 2, None] * right - Ks[:, 1, 2, None] * down
    start = -(axes * viewmats[:, :3, 3, None]).sum(1)
    return _Rays(start, corner, right, down)


def _everything(lines: int, columns: int, device: torch.device) -> Tensor:
    window = torch.empty(lines, columns, 2, dtype=torch.float64, device=device)
    window[..., 0], window[..., 1] = -torch.inf, torch.inf
    return window


def _stretches(
    tree: CellTree, rays: _Rays, view: int, order: tuple[int, ...], x: Tensor, y: Tensor
) -> list[tuple[Tensor, Tensor]]:
    """Where the rays through tiles' middles, at columns x [w] and lines y [h], enter and leave each cell: pairs of
    [h, w], in the view's order of cells. Each enters where the one before is left; stretches may be empty."""
    place = {cell: k for k, cell in enumerate(order)}
    found: dict[int, tuple[Tensor, Tensor]] = {}
    nothing = torch.zeros(len(y), len(x), dtype=torch.float64, device=x.device)

    def first_cell(node: int) -> int:
        while node >= 0:
            node = tree.splits[node].below
        return -1 - node

    waiting = [(0, nothing, nothing + torch.inf)]
    while waiting:
        node, enters, leaves = waiting.pop()
        if node < 0:
            found[-1 - node] = enters, leaves
            continue
        split = tree.splits[node]
        k = split.axis
        ahead = (rays.corner[view, k] + rays.right[view, k] * x)[None, :] + (rays.down[view, k] * y)[:, None]
        # Parts of a tree follow one another in the order: one cell of each tells which comes first.
        upward = place[first_cell(split.below)] < place[first_cell(split.above)]
        crosses = ahead > 0 if upward else ahead < 0
        at = torch.where(crosses, (split.plane - rays.start[view, k]) / ahead, torch.inf)
        at = torch.minimum(torch.maximum(at, enters), leaves)
        near, far = (split.below, split.above) if upward else (split.above, split.below)
        waiting += [(near, enters, at), (far, at, leaves)]
    return [found[cell] for cell in order]


def _widened(
    stretches: Sequence[tuple[Tensor, Tensor]], own: int, drawn: Sequence[Sequence[Rectangle]], seen: Rectangle
) -> Tensor:
    """[h, w, 2] a cell's stretch with its share of those of cells that do not draw the tile.

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
