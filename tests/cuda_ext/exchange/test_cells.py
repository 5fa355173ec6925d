"""Cells in views: GPU and CPU results are equal bit for bit; and routes of rows that overlap a cell."""

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from cuda_ext import cell_windows, cells_reached, clip_lists, intersect_capacity, use_reference
from ns_multigpu.cells.boundary import _boxes, _planes
from ns_multigpu.cells.tree import CellTree
from ns_multigpu.core.dist.world import World
from ns_multigpu.core.types import View
from tests.cuda_ext.exchange.test_row_exchange import Rows, make_rows
from tests.cuda_ext.graphs import check_replays
from tests.cuda_ext.routing import route
from tests.cuda_ext.splats import make_splats
from tests.lib.ranks import DEVICES
from tests.strategies.scene import make_points, make_views

OPS = torch.ops.ns_multigpu
VIEWS = 3


class Scene(NamedTuple):
    """Cells, and views of them."""

    tree: CellTree
    viewmats: Tensor
    Ks: Tensor

    def windows(self, drawn: list[int], patches: list[int], device: str = "cpu") -> Tensor:
        return cell_windows(*self.arguments(drawn, patches, device))

    def arguments(self, drawn: list[int], patches: list[int], device: str = "cpu") -> Any:
        known = _planes(self.tree)
        orders = [self.tree.order(tuple((-v[:3, :3].T @ v[:3, 3]).tolist())) for v in self.viewmats]
        places = [{cell: k for k, cell in enumerate(order)} for order in orders]
        upward = [int(place[a] < place[b]) for place in places for a, b in known.first_cells]
        cameras = self.viewmats.to(device), self.Ks.to(device)
        order = [cell for of_view in orders for cell in of_view]
        return *cameras, known.axes, known.at, known.paths, order, upward, drawn, patches


def scene_of(cells: int) -> Scene:
    views: list[View] = make_views(VIEWS, torch.float32)
    means = make_points(400, torch.float32).params["means"]
    tree = CellTree.of_work(means, torch.ones(len(means), dtype=torch.int64), cells, World.single())
    return Scene(tree, torch.stack([v.viewmat for v in views]), torch.stack([v.K for v in views]))


def rectangles(cells: int, many: bool) -> list[int]:
    """Of each view and cell where it is drawn, some nowhere; in whole tiles of an image of 300 x 200."""
    g = torch.Generator().manual_seed(cells)
    numbers: list[int] = []
    for view in range(VIEWS):
        for place in range(cells):
            for _ in range(1 + many * 2):
                x0, y0, w, h = (int(n) for n in torch.randint(0, 9, (4,), generator=g))
                if w and h:
                    numbers += [view, place, 16 * x0, 16 * y0, min(300, 16 * (x0 + w)), min(200, 16 * (y0 + h))]
    return numbers


def rows_of(real: int, padding: int) -> tuple[Rows, Tensor]:
    rows = make_rows(real, padding, VIEWS)
    return rows, 1 + 3 * torch.rand(len(rows), generator=torch.Generator().manual_seed(3))


def test_route_takes_rows_that_overlap_a_cell() -> None:
    """As if the rows that are in no cell of a patch were not there."""
    rows, _ = rows_of(700, 40)
    g = torch.Generator().manual_seed(1)
    reached = torch.rand(3, len(rows), generator=g) < 0.5
    patches, cells = [0, 0, 0, 0, 50, 70, 1, 0, 0, 0, 50, 30, 1, 0, 0, 30, 50, 70, 1, 1, 0, 0, 50, 70], [2, 0, 1, 1]
    where = rows.view_ids, rows.count, rows.means2d
    place, counts = route(*where, rows.radii, patches, 2, reached, cells)
    for rank in range(2):
        goes = torch.zeros(len(rows), dtype=torch.bool)
        for k, cell in enumerate(cells):
            if patches[6 * k] == rank:
                radii = torch.where(reached[cell][:, None], rows.radii, 0)
                goes |= route(*where, radii, [0, *patches[6 * k + 1 : 6 * k + 6]], 1)[0][0] >= 0
        assert 20 < int(counts[rank]) == int(goes.sum())
        assert torch.equal(place[rank], torch.where(goes, goes.cumsum(0) - 1, -1).int())
    with pytest.raises(ValueError, match="cells must be one of 0 to 2 for each of 4 patches"):
        route(*where, rows.radii, patches, 2, reached, [0, 1, 2, 3])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("real", "padding"), [(1, 0), (20_000, 70), (0, 9)])
@pytest.mark.parametrize("cells", [2, 7])
def test_reference_returns_cells_that_rows_overlap(cells: int, real: int, padding: int, dtype: torch.dtype) -> None:
    scene, (rows, depths) = scene_of(cells), rows_of(real, padding)
    floats = [one.to(dtype) for one in (rows.means2d, depths, scene.viewmats, scene.Ks)]
    if real > 1:
        floats[1][5] = torch.nan
        floats[0][6, 1] = torch.nan
    given: Any = rows.view_ids, floats[0], rows.radii, *floats[1:], _boxes(scene.tree)
    with use_reference():
        expected = cells_reached(*given)
    found = cells_reached(*given)
    assert torch.equal(found, expected)
    assert real < 100 or (0.05 < found[:, :real].float().mean() < 0.95 and not found[:, 5:7].all(0).any())


@pytest.mark.gpu
@pytest.mark.parametrize("cells", [2, 5, 33])
@pytest.mark.parametrize("many", [False, True])
def test_windows_on_a_gpu(cells: int, many: bool) -> None:
    """33 cells of 3 views need more than one launch."""
    scene, drawn = scene_of(cells), rectangles(cells, many)
    expected = scene.windows(drawn, drawn)
    # Few cells may lie behind each other whole, so that no tile has a bound between.
    assert expected.isfinite().any() == (many or cells == 33) and expected.isinf().any()
    given = scene.arguments(drawn, drawn, "cuda")  # copies are no part of a graph
    assert torch.equal(cell_windows(*given).cpu(), expected)
    if cells < 9:
        check_replays(lambda: [cell_windows(*given)])


@pytest.mark.gpu
@pytest.mark.parametrize(("real", "padding"), [(1, 0), (3000, 70), (0, 9), (200_000, 1)])
@pytest.mark.parametrize("cells", [2, 7])
def test_rows_on_a_gpu(cells: int, real: int, padding: int) -> None:
    """Rows on a GPU overlap the same cells and are sent to the same ranks."""
    scene, (rows, depths), there = scene_of(cells), rows_of(real, padding), rows_of(real, padding)[0].to("cuda")
    boxes = _boxes(scene.tree)
    expected = cells_reached(rows.view_ids, rows.means2d, rows.radii, depths, scene.viewmats, scene.Ks, boxes)
    found = cells_reached(
        there.view_ids, there.means2d, there.radii, depths.cuda(), scene.viewmats.cuda(), scene.Ks.cuda(), boxes
    )
    assert torch.equal(found.cpu(), expected) and (real < 100 or 0.05 < expected.float().mean() < 0.95)
    patches = [n for v in range(VIEWS) for r in range(2) for n in (r, v, 0, 30 * r, 50, 30 + 40 * r)]
    chosen = [k % cells for k in range(len(patches) // 6)]
    routes = [route(one.view_ids, one.count, one.means2d, one.radii, patches, 2, overlaps, chosen)
              for one, overlaps in ((rows, expected), (there, found))]  # fmt: skip
    assert all(torch.equal(a, b.cpu()) for a, b in zip(*routes, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("capacity", [40_000, 700])
def test_clipped_lists_on_a_gpu(capacity: int) -> None:
    splats = make_splats(3000, 160, 90, views=2)
    given = (splats.means2d, splats.conics, splats.row_opacities, splats.radii, splats.depths, splats.view_ids)
    given = tuple(one.float() if one.is_floating_point() else one for one in given)
    offsets, ids, _ = intersect_capacity(*given, splats.patches, 16, capacity)
    g = torch.Generator().manual_seed(1)
    windows = torch.sort(1 + 2 * torch.rand(len(offsets) - 1, 2, generator=g), 1).values
    windows[3], windows[5] = torch.tensor([2.0, 1.0]), torch.tensor([-torch.inf, torch.inf])
    arguments = (offsets, ids, given[4], windows)
    there = tuple(one.cuda() for one in arguments)
    expected = clip_lists(*arguments)
    assert int(expected[0][-1]) > 100
    assert all(torch.equal(a.cpu(), b) for a, b in zip(clip_lists(*there), expected, strict=True))
    check_replays(lambda: clip_lists(*there))
    none = (offsets[:1], ids[:0], given[4], windows[:0])
    assert [len(one) for one in clip_lists(*(one.cuda() for one in none))] == [1, 0]


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("device", DEVICES)
def test_opcheck(device: str) -> None:
    scene, (rows, depths) = scene_of(3), rows_of(30, 5)
    rows, depths, drawn = rows.to(device), depths.to(device), rectangles(3, False)
    where, cameras = (rows.view_ids, rows.means2d, rows.radii), (scene.viewmats.to(device), scene.Ks.to(device))
    offsets, ids = (torch.tensor(one, dtype=torch.int32, device=device) for one in ([0, 2, 3], [2, 0, 1, -1]))
    windows = torch.tensor([[0.0, 2.0], [1.0, 5.0]], device=device)
    for op, arguments in (
        (OPS.cell_windows, scene.arguments(drawn, drawn, device)),
        (OPS.cells_reached, (*where, depths, *cameras, _boxes(scene.tree))),
        (OPS.clip_lists, (offsets, ids, depths, windows)),
    ):
        torch.library.opcheck(op.default, arguments, test_utils="test_schema")
