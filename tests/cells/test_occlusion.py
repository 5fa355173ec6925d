"""Parts of a cell that contribute nothing are not drawn when a view is repeated, and are still tested for light."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from cuda_ext.reference.fragments import NOWHERE
from ns_multigpu.cells.occlusion import COMPLETE, Occlusion, around
from ns_multigpu.cells.tree import CellTree, Split
from ns_multigpu.core.assign.image_part import Rectangle, area
from ns_multigpu.core.exchange.fragments import BANDS
from ns_multigpu.core.types import View

VIEW = View(torch.eye(4), torch.eye(3), 100, 90, index=4)
SIGHT = [(0, 0, 100, 90), (16, 16, 64, 64), None]
TREE = CellTree((Split(0, 1.0, -1, 1), Split(1, 2.0, -2, -3)))


WHOLE = (0, 0, 100, 90)


def boxes_message(*cells: Sequence[Rectangle], lit: int = 0) -> np.ndarray:
    """Return what a rank learns of a view whose cells have visible pixels in these rectangles."""
    numbers = np.full((len(cells), BANDS, 5), NOWHERE)
    numbers[..., 4] = 0
    numbers[:, 0, 4] = lit
    for boxes, rectangles in zip(numbers, cells, strict=True):
        for x0, y0, x1, y1 in rectangles:
            for band in range(y0 // 16, -(-y1 // 16)):  # of 90 rows each band is a row of tiles
                box = [-x0, -max(y0, 16 * band), x1, min(y1, 16 * band + 16)]
                boxes[band, :4] = np.maximum(boxes[band, :4], box)
    return numbers[None]


def test_cells_are_drawn_where_they_contributed() -> None:
    occlusion = Occlusion()
    assert occlusion.drawn(VIEW, SIGHT) == [[SIGHT[0]], [SIGHT[1]], []], "nothing is known yet"
    # Of two ranks each knows of its own pixels.
    numbers = np.stack(
        [boxes_message([(0, 0, 100, 40)], [], []), boxes_message([(3, 40, 90, 90)], [(36, 49, 40, 50)], [])]
    )
    occlusion.learn([VIEW], numbers)
    assert occlusion.drawn(VIEW, SIGHT) == [[(0, 0, 100, 90)], [(16, 32, 64, 64)], []], "with a tile around it"
    assert occlusion.flips() == (0, 48 * 48 - 48 * 32) and occlusion.flips() == (0, 0)
    occlusion.learn([VIEW], boxes_message([WHOLE], [], [])[None])
    assert occlusion.drawn(VIEW, SIGHT) == [[SIGHT[0]], [], []], "a cell without visible pixels"


def test_a_cell_seen_in_two_corners_is_drawn_in_both() -> None:
    occlusion, view = Occlusion(), replace(VIEW, width=320, height=240)
    wide = (0, 0, 320, 240)
    occlusion.drawn(view, [wide])
    corners = (0, 0, 30, 20), (300, 200, 320, 240)
    occlusion.learn([view], boxes_message(corners)[None])
    found = occlusion.drawn(view, [wide])[0]
    assert found == [(0, 0, 48, 48), (272, 176, 320, 240)]
    assert occlusion.flips() == (0, 320 * 240 - sum(map(area, found)))
    slanted = (0, 0, 16, 16), (64, 32, 80, 48)
    occlusion.learn([view], boxes_message(slanted)[None])
    assert occlusion.drawn(view, [wide])[0] == [(0, 0, 32, 16), (0, 16, 96, 32), (48, 32, 96, 64)], "rows of tiles"


def lit(occlusion: Occlusion, count: int) -> list[Rectangle]:
    """Return what is drawn of the second cell after so many of its undrawn pixels received light."""
    view = replace(VIEW, index=1)
    occlusion.learn([view], boxes_message([WHOLE], [(17, 17, 18, 18)], [], lit=count)[None])
    return occlusion.drawn(view, SIGHT)[1]


def test_a_cell_that_becomes_visible_is_drawn_in_the_next_step() -> None:
    occlusion, small = Occlusion(), [(16, 16, 48, 48)]
    occlusion.drawn(replace(VIEW, index=1), SIGHT)
    assert lit(occlusion, 0) == small
    assert lit(occlusion, 700) == lit(occlusion, 710) == small, "they were in the light before: the cell is empty there"
    assert occlusion.flips() == (10, 3 * (48 * 48 - 32 * 32))
    assert lit(occlusion, 720) == [SIGHT[1]] and occlusion.flips() == (20, 0)
    assert lit(occlusion, 0) == small
    assert lit(occlusion, 900) == small, "all that is known of light is of drawings since then"


def test_a_view_is_drawn_completely_at_times() -> None:
    occlusion, seen, small = Occlusion(), [], [(16, 16, 48, 48)]
    message = boxes_message([WHOLE], [(17, 17, 18, 18)], [])[None]
    for _ in range(2 * COMPLETE):
        seen.append(occlusion.drawn(VIEW, SIGHT)[1])
        occlusion.learn([VIEW], message)
    assert [k for k, one in enumerate(seen) if one != small] == [0, 4, 12], "of view 4"
    other = replace(VIEW, index=5)
    occlusion.drawn(other, SIGHT)
    occlusion.learn([other], message)
    assert [occlusion.drawn(other, SIGHT)[1] == small for _ in range(3)] == [True, True, False]


def test_cells_without_visibility_record_are_drawn() -> None:
    occlusion, all_ = Occlusion(), [[one] if one else [] for one in SIGHT]
    occlusion.drawn(VIEW, SIGHT)
    message = boxes_message([WHOLE], [(36, 49, 40, 50)], [])[None]
    occlusion.learn([VIEW], message)
    assert occlusion.drawn(replace(VIEW, index=5), SIGHT) == all_
    assert occlusion.drawn(replace(VIEW, width=99), SIGHT) == all_
    assert occlusion.drawn(replace(VIEW, index=-1), SIGHT) == all_, "a view of a viewer"
    assert occlusion.drawn(VIEW, [SIGHT[0], (0, 16, 80, 64), None])[1] == [(16, 32, 64, 64)], "grown by a tile"
    assert occlusion.drawn(VIEW, [SIGHT[0], WHOLE, None])[1] == [(16, 32, 64, 80)]
    far = (64, 64, 96, 90)
    occlusion.drawn(VIEW, [SIGHT[0], (0, 0, 16, 16), None])
    occlusion.learn([VIEW], message)
    assert occlusion.drawn(VIEW, [SIGHT[0], far, None])[1] == [far], "a cell that was in another part"


def test_other_cells_are_not_hidden_by_what_these_did() -> None:
    occlusion = Occlusion()
    occlusion.keep(TREE)
    occlusion.drawn(VIEW, SIGHT)
    occlusion.learn([VIEW], boxes_message([WHOLE], [], [])[None])
    rows = occlusion.state()
    again = Occlusion()
    older = [[-4, 2, 0], [-3, 0, 100, 90], [4, 100, 90, 0, 0, 0, 100, 90], [4, 100, 90, 0, 0, 0, 9, 9, 0, 0, 9, 9]]
    again.load_state([*older, *rows, [-2, 3]])
    assert again.state() == rows and all(isinstance(n, int) for row in rows for n in row)
    again.keep(TREE)
    assert again.drawn(VIEW, SIGHT) == occlusion.drawn(VIEW, SIGHT) == [[SIGHT[0]], [], []]
    assert again.state() == occlusion.state()
    again.keep(CellTree((Split(0, 1.5, -1, 1), *TREE.splits[1:])))
    all_ = [[one] if one else [] for one in SIGHT]
    assert again.drawn(VIEW, SIGHT) == all_
    again.learn([VIEW], boxes_message([WHOLE], [])[None])  # of so many cells as there are not any more
    assert again.drawn(VIEW, SIGHT) == all_


def test_rectangles_around_rectangles() -> None:
    assert around(None, []) == around((0, 0, 5, 5), [(0, 0, 5, 5)]) == []
    assert around((0, 0, 5, 5), []) == [(0, 0, 5, 5)] and around((0, 0, 9, 8), [(0, 0, 9, 5)]) == [(0, 5, 9, 8)]
    inner = [(2, 1, 5, 3), (0, 3, 4, 4), (3, 6, 9, 7)]
    covered = np.zeros((8, 9), dtype=int)
    for x0, y0, x1, y1 in [*inner, *around((0, 0, 9, 8), inner)]:
        covered[y0:y1, x0:x1] += 1
    assert (covered == 1).all()
