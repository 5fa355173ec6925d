"""Owners of the rows of a step's views."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from ns_multigpu.cells.sharing import CellPixels, share_rows
from ns_multigpu.cells.tree import CellTree, Split
from ns_multigpu.core.exchange.fragments import find_fragments
from ns_multigpu.core.step.step_settings import with_halos
from ns_multigpu.core.types import View
from tests.strategies.scene import look_at


def test_one_view_is_cut_evenly() -> None:
    assert share_rows([8], [{0: 9, 1: 9, 2: 9, 3: 9}], 4) == [[(0, 2)], [(2, 4)], [(4, 6)], [(6, 8)]]
    assert share_rows([5], [{1: 9, 2: 9}], 3) == [[None], [(0, 2)], [(2, 5)]], "by those alone that see it"
    assert share_rows([2], [{}], 3) == [[(0, 1)], [(1, 2)], [None]], "an invisible view"


def test_views_are_not_split_if_balance_is_equal() -> None:
    both = {0: 9, 1: 9}
    assert share_rows([6, 6], [both, both], 2) == [[(0, 6), None], [None, (0, 6)]]
    assert share_rows([6, 6], [{0: 9, 1: 1}, {0: 9}], 2) == [[None, (0, 6)], [(0, 6), None]], "few come first"


def test_rank_that_draws_most_of_a_view_owns_it() -> None:
    assert share_rows([6, 6], [{0: 2, 1: 9}, {0: 9, 1: 2}], 2) == [[None, (0, 6)], [(0, 6), None]]


@pytest.mark.parametrize("ranks", [1, 3, 4])
def test_every_row_has_an_owner(ranks: int) -> None:
    rows = [5, 1, 7, 3]
    seen = [{r: 5 + r for r in range(ranks) if (view + r) % 3} for view in range(4)]
    spans = share_rows(rows, seen, ranks)
    for view, count in enumerate(rows):
        parts = sorted(span for of in spans if (span := of[view]) is not None)
        assert [row for a, b in parts for row in range(a, b)] == list(range(count))
        assert not seen[view] or all(r in seen[view] for r in range(ranks) if spans[r][view] is not None)


def _sees(index: int = 0, height: float = 0.0) -> View:
    K = torch.tensor([[60.0, 0, 48], [0, 60, 32], [0, 0, 1]])
    return View(look_at([3.0, 0.1, height], [0, 0, 0]).float(), K, 96, 64, index=index)


def _two_cells() -> Any:
    """A space of two cells, in front of and behind the plane x = 0."""
    tree = CellTree((Split(0, 0.0, -1, -2),))
    boxes = np.array([[[-1.0, -0.5, -0.5], [0, 0.5, 0.5]], [[0, -0.5, -0.5], [1.0, 0.5, 0.5]]])
    return SimpleNamespace(boxes=boxes, tree=tree, cells=2, rank_of=lambda cell: cell)


def test_kept_rectangles_follow_camera_boxes_and_tree() -> None:
    space = _two_cells()
    views = CellPixels(space)
    first = views.assign([_sees()], 2)
    assert views.assign([_sees()], 2) == first and len(views._sights) == 1
    moved = views.assign([_sees(height=2.0)], 2)
    assert moved != first and moved == CellPixels(space).assign([_sees(height=2.0)], 2), "a pose may be trained"
    assert views.assign([_sees()], 2) == first
    space.boxes = space.boxes * 0.5
    smaller = views.assign([_sees()], 2)
    assert smaller != first and smaller == CellPixels(space).assign([_sees()], 2)
    space.tree = CellTree((Split(0, 0.0, -2, -1),))
    assert views.assign([_sees()], 2).order != smaller.order
    views.assign([_sees(index=-1)], 2)
    assert len(views._sights) == 1, "cameras of a viewer are not kept"


def test_plans_recur_where_links_are_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole views, so that a plan follows from the order of cells: a graph holds it, and the planes."""
    space, batch = _two_cells(), [_sees(0), _sees(1)]
    views = CellPixels(space)
    assert not views.recurs and views.assign_alike(batch, 2) == views.assign(batch, 2)
    views.fast_links = True
    moved = [_sees(2, 0.7), _sees(3, -0.4)]
    one, other = views.assign_alike(batch, 2), views.assign_alike(moved, 2)
    assert views.recurs and one == other and views.assign(batch, 2) != views.assign(moved, 2)
    drawn = {(p.view, p.cell, p.x0, p.y0, p.x1, p.y1) for patches in one.drawn for p in patches}
    assert drawn == {(view, cell, 0, 0, 96, 64) for view in range(2) for cell in range(2)}
    views.figures()
    assert views.assign_alike(batch, 2) == one and views.figures()["pixels_in_sight"] == 1.0
    space.tree = CellTree((Split(0, 0.1, -1, -2),))
    assert views.assign_alike(batch, 2) != one, "the plane has moved"
    assert views.most_exchanged(2, 96, 64, 2) == 2 * 2 * 96 * 64, "of both cells"
    monkeypatch.setattr("ns_multigpu.cells.sharing.MOST_WHOLE", 2 * 96 * 64 - 1)
    assert views.most_exchanged(2, 96, 64, 2) == 0
    assert views.assign_alike(batch, 2) == views.assign(batch, 2), "views are too large"
    occluded = CellPixels(space, hide=True)
    occluded.fast_links = True
    assert not occluded.recurs, "occluded rectangles differ"


@pytest.mark.parametrize("rank", [0, 1])
def test_fragments_of_one_rank_are_those_of_all(rank: int) -> None:
    batch = [_sees(0), _sees(1, 1.0)]
    plan = with_halos(CellPixels(_two_cells()).assign(batch, 2), batch)
    everyones = find_fragments(plan, batch)
    mine = [piece for piece in everyones if rank in (piece.target[0], (piece.source or (-1,))[0])]
    assert len(mine) > 0 and find_fragments(plan, batch, rank) == mine
