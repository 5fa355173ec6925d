"""Which parts of layers travel as splats: what is fewer bytes by what is known, the same after a resume."""

from typing import Any

import numpy as np
import pytest
import torch

from ns_multigpu.cells.exchange import GRADIENT_BYTES, PIXEL_BYTES, PLAIN, ROW_BYTES, WAYS, Exchange, Kind
from ns_multigpu.cells.tree import CellTree, Split
from ns_multigpu.core.trials import Trials
from ns_multigpu.core.types import Patch, View

WIDTH, HEIGHT = 320, 160
ROWS = HEIGHT // 16
WHOLE = (0, 0, WIDTH, HEIGHT)
SPANS: Any = [[(0, 5)], [(5, 10)]]
"""Two ranks own half a view each."""
TREE = CellTree((Split(0, 0.0, -1, -2),))


def view_of(index: int = 3) -> View:
    return View(torch.eye(4), torch.eye(3), WIDTH, HEIGHT, index)


def counts(first: int, second: int, of_rank: tuple[int, int] = (0, 1)) -> list[int]:
    """Two cells, one a rank: of one so many splats in each row of tiles, one high; of the other so many."""
    table = np.zeros((2, 2 * ROWS), dtype=int)
    table[of_rank[0]], table[of_rank[1]] = first, second
    return table.reshape(-1).tolist()


def exchange_of(kind: Kind = "mixed", half: bool = False) -> Exchange:
    exchange = Exchange(kind, [0, 1], half=half)
    exchange.keep(TREE)
    return exchange


def others(drawn: list[list[Patch]]) -> list[tuple[int, int]]:
    """(rank, cell) of layers that are drawn by others than their cell's rank, cell k's being rank k."""
    return [(rank, p.cell) for rank, of in enumerate(drawn) for p in of if p.cell != rank]


def test_fewer_bytes_win() -> None:
    exchange, view = exchange_of(), view_of()
    exchange.learn([view], counts(10, 2000))
    drawn, room = exchange.divide([view], [[WHOLE, WHOLE]], SPANS)
    assert others(drawn) == [(1, 0)], "10 splats a row of tiles are fewer bytes than pixels; 2000 are not"
    # The owner of the lower half needs a row of tiles more, for its loss; and there is some room to spare.
    assert room == ((0, 60 + 60 // 8 + 64), (0, 0))
    assert drawn[1][0] == Patch(0, 0, 64, WIDTH, HEIGHT, cell=0)
    assert [(p.y0, p.y1) for p in drawn[0]] == [(0, 96)], "what others draw is not drawn at home"
    assert [(p.y0, p.y1) for p in drawn[1][1:]] == [(0, HEIGHT)], "what others get as pixels is"
    figures = exchange.figures()
    pixels = PIXEL_BYTES * WIDTH * (80 + 90)
    assert figures["mb_as_pixels"] == pytest.approx(pixels / 1e6), "the halo goes there alone"
    assert figures["mb_as_splats"] == pytest.approx((ROW_BYTES + GRADIENT_BYTES) * 131 / 1e6)
    assert figures["layers_as_splats"] == 0.5 and exchange.figures() == {}


def test_splats_over_several_rows_of_tiles() -> None:
    """A band has those that begin before its end, less those that end before it."""
    exchange, table = exchange_of("splats"), np.zeros((2, 2, ROWS), dtype=int)
    table[0, 0, 0], table[0, 1, ROWS - 1] = 300, 300  # over the whole view
    table[0, 0, 1], table[0, 1, 2] = 40, 40  # before the second band, and beyond its halo
    exchange.learn([view_of()], table.reshape(-1).tolist())
    _, room = exchange.divide([view_of()], [[WHOLE, None]], SPANS)
    assert room[0][1] == 300 + 300 // 8 + 64


@pytest.mark.parametrize("half", [False, True])
def test_the_border_between_the_two(half: bool) -> None:
    pixels = PIXEL_BYTES * WIDTH * (80 + 90) // (2 if half else 1)
    few = int((pixels / (ROW_BYTES + GRADIENT_BYTES) - 64) / 1.125 / 6)
    for rows, by_splats in ((few - 1, True), (few + 2, False)):
        exchange = exchange_of(half=half)
        exchange.learn([view_of()], counts(rows, 10**6))
        assert bool(others(exchange.divide([view_of()], [[WHOLE, WHOLE]], SPANS)[0])) == by_splats


def test_what_is_not_known() -> None:
    exchange, view = exchange_of(), view_of()
    drawn, room = exchange.divide([view], [[WHOLE, WHOLE]], SPANS)
    assert others(drawn) == [] and room == ((0, 0), (0, 0)), "of nothing pixels are sure"
    exchange.learn([view_of(7)], counts(10, 2000))
    drawn, room = exchange.divide([view], [[WHOLE, None]], SPANS)
    assert others(drawn) == [(1, 0)] and room[0][1] == 2 * 70 + 64, "as in other views, with twice the room"
    nobody = exchange.divide([view_of(-1)], [[WHOLE, WHOLE]], SPANS)
    assert others(nobody[0]) == [], "a picture goes as pixels"
    splats = exchange_of("splats")
    drawn, room = splats.divide([view], [[WHOLE, WHOLE]], SPANS)
    assert others(drawn) == [(0, 1), (1, 0)] and room == (), "nobody can say how many"
    drawn, room = splats.divide([view], [[None, None]], SPANS)
    assert others(drawn) == [] and room == ((0, 0), (0, 0))


def test_layers_grow() -> None:
    """Splats that became more from one visit to the next are taken to become more still."""
    exchange, view = exchange_of("splats"), view_of()
    rooms: list[int] = []
    for number in (100, 150, 150):
        exchange.learn([view], counts(number, 0))
        rooms.append(exchange.divide([view], [[WHOLE, None]], SPANS)[1][0][1])
    assert rooms[0] == 600 + 75 + 64 and rooms[1] > 1.5 * 600 * 1.125 + 64 > rooms[0]
    assert rooms[1] > rooms[2] > 900 * 1.125 + 64


def test_a_resumed_run_knows_the_same() -> None:
    exchange, again = exchange_of(), exchange_of()
    for index, numbers in ((3, (10, 1000)), (4, (900, 20)), (3, (14, 1100))):
        exchange.learn([view_of(index)], counts(*numbers))
    rows = exchange.knowledge()
    assert all(Exchange.owns(row) for row in rows) and not Exchange.owns([-1, 5])
    again.learn_again([[-1, 7], *rows])
    assert again.knowledge() == rows
    for index in (3, 4, 5):
        asked = [view_of(index)], [[WHOLE, WHOLE]], SPANS
        assert again.divide(*asked) == exchange.divide(*asked)
    again.keep(TREE)
    assert again.knowledge() == rows
    again.keep(CellTree((Split(1, 0.0, -1, -2),)))
    assert len(again.knowledge()) == 1, "of other cells nothing is known"
    assert others(again.divide([view_of()], [[WHOLE, WHOLE]], SPANS)[0]) == []


def test_ranks_with_more_cells_than_others() -> None:
    """What is told is rank after rank, of each as many cells as any has."""
    exchange = Exchange("mixed", [0, 0, 1])
    views = [view_of(1), view_of(2)]
    table = np.zeros((2, 2, 2, 2 * ROWS), dtype=int)  # rank, view, its k-th cell
    table[0, 0, 1], table[1, 1, 0] = 10, 11
    exchange.learn(views, table.reshape(-1).tolist())
    found = {(row[1], row[4]): row[5 : 5 + ROWS + 1][-1] for row in exchange.knowledge()[1:]}
    assert found == {(1, 1): 10 * ROWS, (2, 2): 11 * ROWS}


def test_a_source_without_splats_has_room_for_a_few() -> None:
    """With ghosts a rank may have splats in another's cell. One that comes there must not cost the step."""
    exchange, view = Exchange("splats", [0, 1], ghosts=True), view_of()
    exchange.keep(TREE)
    table = np.zeros((2, 2, 2 * ROWS), dtype=int)  # rank, cell
    table[0, 0], table[1, 1] = 10, 5
    exchange.learn([view], table.reshape(-1).tolist())
    drawn, room = exchange.divide([view], [[WHOLE, WHOLE]], SPANS)
    assert others(drawn) == [(0, 1), (1, 0)]
    # Each draws half a view, and a row of tiles more, of the other's cell, and of its own, where the other has none.
    assert room == ((0, 60 + 60 // 8 + 64 + 16), (30 + 30 // 8 + 64 + 16, 0))


def test_the_way_that_time_chose() -> None:
    trials = Trials(WAYS, 2, PLAIN)
    exchange = Exchange("mixed", [0, 1], trials=trials)
    exchange.keep(TREE)
    exchange.learn([view_of()], counts(10, 2000))
    for way, sent in (("mixed", [(1, 0)]), ("splats", [(0, 1), (1, 0)]), ("pixels", []), ("mixed", [(1, 0)])):
        trials.way = way
        assert others(exchange.divide([view_of()], [[WHOLE, WHOLE]], SPANS)[0]) == sent, way


def test_counts_grow_with_the_model_while_nobody_counts() -> None:
    """Where pixels were chosen, what is known is as old as the last trial. Where they were not, it is not."""
    for chosen, rows in (("pixels", 180), ("mixed", 60)):
        trials = Trials(WAYS, 2, PLAIN)
        exchange = Exchange("mixed", [0, 1], trials=trials)
        exchange.keep(TREE)
        exchange.learn([view_of()], counts(10, 2000))
        trials.chosen, trials.growth, trials.number = chosen, 3.0, 1
        for _ in range(2):  # once, not each time
            _, room = exchange.divide([view_of()], [[WHOLE, WHOLE]], SPANS)
            assert room[0][1] == rows + rows // 8 + 64, chosen
