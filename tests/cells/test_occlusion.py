"""Parts of a cell that contribute nothing are not drawn when a view is repeated, and are still tested for light."""

from dataclasses import replace

import numpy as np
import torch

from cuda_ext.reference.fragments import NOWHERE
from ns_multigpu.cells.occlusion import COMPLETE, NOTHING, Occlusion, around
from ns_multigpu.cells.tree import CellTree, Split
from ns_multigpu.core.assign.image_part import Rectangle
from ns_multigpu.core.types import View

VIEW = View(torch.eye(4), torch.eye(3), 100, 90, index=4)
SIGHT = [(0, 0, 100, 90), (16, 16, 64, 64), None]
TREE = CellTree((Split(0, 1.0, -1, 1), Split(1, 2.0, -2, -3)))


def boxes_message(*boxes: tuple[int, int, int, int] | None, flipped: int = 0) -> np.ndarray:
    rows = [[NOWHERE] * 4 + [flipped] if b is None else [-b[0], -b[1], b[2], b[3], flipped] for b in boxes]
    return np.array(rows)[None]


def test_cells_are_drawn_where_they_contributed() -> None:
    occlusion = Occlusion()
    assert occlusion.drawn(VIEW, SIGHT) == SIGHT, "nothing is known yet"
    # Of two ranks each knows of its own pixels.
    numbers = np.stack(
        [boxes_message((0, 0, 100, 40), None, None), boxes_message((3, 40, 90, 90), (36, 49, 40, 50), None)]
    )
    occlusion.learn([VIEW], numbers)
    assert occlusion.drawn(VIEW, SIGHT) == [(0, 0, 100, 90), (16, 32, 64, 64), None], "with a tile around it"
    assert occlusion.flips() == (0, 48 * 48 - 48 * 32) and occlusion.flips() == (0, 0)
    occlusion.learn([VIEW], boxes_message((0, 0, 100, 90), None, None)[None])
    assert occlusion.drawn(VIEW, SIGHT) == [SIGHT[0], None, None], "a cell without visible pixels"


def lit(occlusion: Occlusion, count: int) -> Rectangle | None:
    """Return what is drawn of the second cell after so many of its undrawn pixels received light."""
    view = replace(VIEW, index=1)
    occlusion.learn([view], boxes_message((0, 0, 100, 90), (17, 17, 18, 18), None, flipped=count)[None])
    return occlusion.drawn(view, SIGHT)[1]


def test_a_cell_that_becomes_visible_is_drawn_in_the_next_step() -> None:
    occlusion, small = Occlusion(), (16, 16, 48, 48)
    occlusion.drawn(replace(VIEW, index=1), SIGHT)
    assert lit(occlusion, 0) == small
    assert lit(occlusion, 700) == lit(occlusion, 710) == small, "they were in the light before: the cell is empty there"
    assert occlusion.flips() == (10, 3 * (48 * 48 - 32 * 32))
    assert lit(occlusion, 720) == SIGHT[1] and occlusion.flips() == (20, 0)
    assert lit(occlusion, 0) == small


def test_a_view_is_drawn_completely_at_times() -> None:
    occlusion, seen = Occlusion(), []
    for _ in range(2 * COMPLETE):
        seen.append(occlusion.drawn(VIEW, SIGHT)[1])
        occlusion.learn([VIEW], boxes_message((0, 0, 100, 90), (17, 17, 18, 18), None)[None])
    small = (16, 16, 48, 48)
    assert [k for k, one in enumerate(seen) if one != small] == [0, 4, 12], "of view 4"
    other = replace(VIEW, index=5)
    occlusion.drawn(other, SIGHT)
    occlusion.learn([other], boxes_message((0, 0, 100, 90), (17, 17, 18, 18), None)[None])
    assert [occlusion.drawn(other, SIGHT)[1] == small for _ in range(3)] == [True, True, False]


def test_cells_without_visibility_record_are_drawn() -> None:
    occlusion = Occlusion()
    occlusion.drawn(VIEW, SIGHT)
    box = boxes_message((0, 0, 100, 90), (36, 49, 40, 50), None)[None]
    occlusion.learn([VIEW], box)
    assert (
        occlusion.drawn(replace(VIEW, index=5), SIGHT) == SIGHT
        and occlusion.drawn(replace(VIEW, width=99), SIGHT) == SIGHT
    )
    assert occlusion.drawn(replace(VIEW, index=-1), SIGHT) == SIGHT, "a view of a viewer"
    assert occlusion.drawn(VIEW, [SIGHT[0], (0, 16, 80, 64), None])[1] == (16, 32, 64, 64), "grown by a tile"
    assert occlusion.drawn(VIEW, [SIGHT[0], (0, 0, 100, 90), None])[1] == (16, 32, 64, 80)
    far = (64, 64, 96, 90)
    occlusion.drawn(VIEW, [SIGHT[0], (0, 0, 16, 16), None])
    occlusion.learn([VIEW], box)
    assert occlusion.drawn(VIEW, [SIGHT[0], far, None])[1] == far, "a cell that was elsewhere"


def test_other_cells_are_not_hidden_by_what_these_did() -> None:
    occlusion = Occlusion()
    occlusion.keep(TREE)
    occlusion.drawn(VIEW, SIGHT)
    occlusion.learn([VIEW], boxes_message((0, 0, 100, 90), None, None)[None])
    rows = occlusion.state()
    again = Occlusion()
    older = [[-4, 2, 0], [-3, 0, 100, 90], [4, 100, 90, 0, 0, 0, 100, 90], [4, 100, 90, 0, 0, 0, 9, 9, 0, 0, 9, 9]]
    again.load_state([*older, *rows, [-2, 3]])
    assert again.state() == rows and all(isinstance(n, int) for row in rows for n in row)
    again.keep(TREE)
    assert again.drawn(VIEW, SIGHT) == occlusion.drawn(VIEW, SIGHT) == [SIGHT[0], None, None]
    assert again.state() == occlusion.state()
    again.keep(CellTree((Split(0, 1.5, -1, 1), *TREE.splits[1:])))
    assert again.drawn(VIEW, SIGHT) == SIGHT
    again.learn([VIEW], boxes_message((0, 0, 100, 90), None)[None])  # of so many cells as there are not any more
    assert again.drawn(VIEW, SIGHT) == SIGHT


def test_rectangles_around_a_rectangle() -> None:
    assert around(None, None) == around((0, 0, 5, 5), (0, 0, 5, 5)) == []
    assert around((0, 0, 5, 5), None) == [(0, 0, 5, 5)]
    found = around((0, 0, 9, 8), (2, 3, 5, 6))
    covered = np.zeros((8, 9), dtype=int)
    covered[3:6, 2:5] += 1
    for x0, y0, x1, y1 in found:
        covered[y0:y1, x0:x1] += 1
    assert (covered == 1).all() and around((0, 0, 9, 8), (0, 0, 9, 5)) == [(0, 5, 9, 8)]
    assert NOTHING == (0, 0, 0, 0)
