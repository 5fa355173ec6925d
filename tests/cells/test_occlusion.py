"""Occluded parts of a cell are not drawn when a view is repeated, but still tested for visibility."""

from dataclasses import replace

import numpy as np
import torch

from cuda_ext.reference.fragments import NOWHERE
from ns_multigpu.cells.occlusion import NOTHING, Occlusion, around
from ns_multigpu.cells.tree import CellTree, Split
from ns_multigpu.core.types import View

VIEW = View(torch.eye(4), torch.eye(3), 100, 90, index=4)
SIGHT = [(0, 0, 100, 90), (16, 16, 64, 64), None]
TREE = CellTree((Split(0, 1.0, -1, 1), Split(1, 2.0, -2, -3)))


def boxes_message(*boxes: tuple[int, int, int, int] | None, flipped: int = 0) -> np.ndarray:
    rows = [[NOWHERE] * 4 + [flipped] if b is None else [-b[0], -b[1], b[2], b[3], flipped] for b in boxes]
    return np.array(rows)[None]


def test_occluded_cells_are_skipped() -> None:
    occlusion = Occlusion()
    assert occlusion.drawn(VIEW, SIGHT) == SIGHT, "nothing is known yet"
    # Of two ranks each knows of its own pixels.
    numbers = np.stack(
        [boxes_message((0, 0, 100, 40), None, None), boxes_message((3, 40, 90, 90), (20, 33, 40, 34), None)]
    )
    occlusion.learn([VIEW], numbers)
    assert occlusion.drawn(VIEW, SIGHT) == [(0, 0, 100, 90), (16, 32, 48, 48), None]
    assert occlusion.flips() == (0, 48 * 48 - 32 * 16) and occlusion.flips() == (0, 0)
    occlusion.learn([VIEW], boxes_message((0, 0, 100, 90), None, None, flipped=3)[None])
    assert occlusion.drawn(VIEW, SIGHT) == [SIGHT[0], None, None], "a cell without visible rows"
    occlusion.learn([VIEW], boxes_message((0, 0, 100, 90), (16, 16, 17, 17), None)[None])
    assert occlusion.drawn(VIEW, SIGHT)[1] == (16, 16, 32, 32), "it is seen again, and drawn again"
    assert occlusion.flips()[0] == 9


def test_cells_without_visibility_record_are_drawn() -> None:
    occlusion = Occlusion()
    occlusion.drawn(VIEW, SIGHT)
    occlusion.learn([VIEW], boxes_message((0, 0, 100, 90), (20, 33, 40, 34), None)[None])
    wider = [SIGHT[0], (0, 0, 96, 90), (0, 0, 16, 16)]
    assert (
        occlusion.drawn(replace(VIEW, index=5), SIGHT) == SIGHT
        and occlusion.drawn(replace(VIEW, width=99), SIGHT) == SIGHT
    )
    assert occlusion.drawn(replace(VIEW, index=-1), SIGHT) == SIGHT, "a view of a viewer"
    assert occlusion.drawn(VIEW, [SIGHT[0], (0, 16, 80, 64), None])[1] == (16, 32, 48, 48), "grown by a tile"
    occlusion.learn([VIEW], boxes_message((0, 0, 100, 90), (20, 33, 40, 34), None)[None])
    assert occlusion.drawn(VIEW, [SIGHT[0], (0, 0, 100, 90), None])[1] == (16, 32, 48, 48)
    assert occlusion.drawn(VIEW, SIGHT)[1] == (16, 32, 48, 48)
    assert occlusion.drawn(VIEW, wider)[1] == (16, 32, 48, 48)
    far = (64, 64, 96, 90)
    assert occlusion.drawn(VIEW, [SIGHT[0], SIGHT[1], far])[2] == far, "a cell that was not in sight"


def test_other_cells_are_not_hidden_by_what_these_did() -> None:
    occlusion = Occlusion()
    occlusion.keep(TREE)
    occlusion.drawn(VIEW, SIGHT)
    occlusion.learn([VIEW], boxes_message((0, 0, 100, 90), None, None)[None])
    rows = occlusion.state()
    again = Occlusion()
    again.load_state([[-4, 2, 0], [-3, 0, 100, 90], *rows, [-2, 3]])  # with rows of an option that is gone
    assert again.state() == rows and all(isinstance(n, int) for row in rows for n in row)
    again.keep(TREE)
    assert again.drawn(VIEW, SIGHT) == occlusion.drawn(VIEW, SIGHT) == [SIGHT[0], None, None]
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
