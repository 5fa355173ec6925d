"""Depth windows of cells in tiles, and the splats that touch them.

A splat's depth is that of its mean along the view's axis, as in blending. Planes cut the ray through a tile's centre
into one interval for each cell, which holds for the entire tile. So a splat at a plane is in one cell in one tile and
in the other cell in the next. Within a tile all splats are in order of depth.

A cell does not draw tiles in which nothing of it is visible. The interval there goes half to the previous and half to
the next of the cells that draw the tile.

With a lens, rays are those of the matrix alone. They share the camera's centre with the lens's rays, so the order of
cells is right for these, too. All cells draw all of such a view, so each splat is still in one window of a tile. Only
more splats are sent: those for which the two rays are in different cells.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from cuda_ext.ops.exchange.cells import cell_windows, cells_reached
from ns_multigpu.cells.placing import ByCells
from ns_multigpu.cells.tree import CellTree
from ns_multigpu.core.assign.image_part import Rectangle, around_both
from ns_multigpu.core.assign.plan import Plan
from ns_multigpu.core.exchange.boundary_rows import CellRegions
from ns_multigpu.core.types import TILE, View, stack_intrinsics, stack_viewmats


class CellsInViews(CellRegions):
    """The cells of a placement. See `CellRegions`."""

    def __init__(self, space: ByCells) -> None:
        self._space = space

    def windows(self, plan: Plan, views: Sequence[View], rank: int) -> Tensor:
        tree, own = self._space.tree, plan.drawn[rank]
        seen = [patch.rendered(views[patch.view]) for patch in own]
        for patch, (x0, y0, _, _) in zip(own, seen, strict=True):
            if x0 % TILE or y0 % TILE:
                raise ValueError(f"{patch}: where splats are in several cells patches begin with whole tiles.")
        if tree is None or tree.cells == 1:
            tiles = sum(-(-(x1 - x0) // TILE) * -(-(y1 - y0) // TILE) for x0, y0, x1, y1 in seen)
            ends = [views[0].viewmat.new_full((tiles, 1), end, dtype=torch.float64) for end in (-torch.inf, torch.inf)]
            return torch.cat(ends, 1)
        known = _planes(tree)
        places = [{cell: k for k, cell in enumerate(order)} for order in plan.order]
        sight: dict[tuple[int, int], Rectangle] = {}  # drawn and hidden patches of a cell fill a rectangle
        for patch in [*(p for patches in plan.drawn for p in patches), *plan.hidden]:
            key, new = (patch.view, places[patch.view][patch.cell]), patch.rendered(views[patch.view])
            sight[key] = around_both(sight.get(key, new), new)
        drawn = [n for key, rectangle in sight.items() for n in (*key, *rectangle)]
        patches = [
            n
            for patch, rectangle in zip(own, seen, strict=True)
            for n in (patch.view, places[patch.view][patch.cell], *rectangle)
        ]
        upward = [int(place[below] < place[above]) for place in places for below, above in known.first_cells]
        order = [cell for of_view in plan.order for cell in of_view]
        cameras = stack_viewmats(views), _matrices(views)
        return cell_windows(*cameras, known.axes, known.at, known.paths, order, upward, drawn, patches)

    def overlaps_cells(
        self, view_ids: Tensor, means2d: Tensor, radii: Tensor, depths: Tensor, views: Sequence[View]
    ) -> Tensor:
        tree = self._space.tree
        if tree is None or tree.cells == 1:
            return torch.ones(self._space.cells, len(depths), dtype=torch.bool, device=depths.device)
        viewmats, Ks = (of.to(means2d) for of in (stack_viewmats(views), _matrices(views)))  # may be the host's
        return cells_reached(view_ids, means2d, radii, depths, viewmats, Ks, _boxes(tree))


def _matrices(views: Sequence[View]) -> Tensor:
    """Return the views' intrinsics without lenses, [V, 3, 3]."""
    return stack_intrinsics(views)[:, :3].contiguous()


class _Planes(NamedTuple):
    """A tree's planes as `cell_windows` takes them; and of each a cell below it, and one above it."""

    axes: list[int]
    at: list[float]
    paths: list[int]
    first_cells: list[tuple[int, int]]


@lru_cache(maxsize=4)
def _boxes(tree: CellTree) -> list[float]:
    return tree.boxes().view(-1).tolist()


@lru_cache(maxsize=4)
def _planes(tree: CellTree) -> _Planes:
    paths: dict[int, list[int]] = {}

    def walk(node: int, path: list[int]) -> int:
        """Record the paths of a subtree's cells; return one of these cells."""
        if node < 0:
            paths[-1 - node] = path
            return -1 - node
        below = walk(tree.splits[node].below, [*path, 2 * node])
        first_cells[node] = below, walk(tree.splits[node].above, [*path, 2 * node + 1])
        return below

    first_cells = [(0, 0)] * len(tree.splits)
    walk(0, [])
    depth = max(len(path) for path in paths.values())
    flat = [n for cell in range(tree.cells) for n in (paths[cell] + [-1] * depth)[:depth]]
    return _Planes([s.axis for s in tree.splits], [s.plane for s in tree.splits], flat, first_cells)
