"""Views that do not conflict come into one step; each epoch has each view once."""

import random

import numpy as np
import pytest
import torch

from ns_multigpu.cells.balancing import loads_of, order_balanced
from ns_multigpu.core.assign.view_sequence import ViewSequence
from ns_multigpu.core.types import View
from tests.strategies.scene import look_at

SIDES = np.array([[9, 0], [9, 0], [0, 9], [9, 0], [0, 9], [0, 9]])


def most(order: list[int], loads: np.ndarray, size: int) -> list[int]:
    return [int(loads[order[k : k + size]].sum(0).max()) for k in range(0, len(order), size)]


def test_disjoint_views_are_grouped() -> None:
    assert most(list(range(6)), SIDES, 2) == [18, 9, 18]
    found = order_balanced(range(6), SIDES, 2)
    assert found == [0, 2, 1, 4, 3, 5] and most(found, SIDES, 2) == [9, 9, 9]
    assert order_balanced(range(6), SIDES, 2, lead=1) == [0, 1, 2, 3, 4, 5], "the first is alone, and so is the last"
    assert order_balanced([2, 0, 5, 3], SIDES, 2) == [0, 2, 3, 5], "by the cell that a view shows most of"
    assert order_balanced(range(6), SIDES, 1) == list(range(6)) and order_balanced([], SIDES, 3) == []
    with pytest.raises(ValueError, match="at least 1"):
        order_balanced(range(6), SIDES, 0)


@pytest.mark.parametrize("size", [2, 3, 4, 7])
def test_steps_are_more_level_and_whole(size: int) -> None:
    random_ = np.random.default_rng(1)
    loads = random_.integers(0, 100, (300, 4)) * (random_.random((300, 4)) < 0.4)
    order = random_.permutation(300).tolist()
    found = order_balanced(order, loads, size, lead=1)
    assert sorted(found) == list(range(300)) and found[0] == order[0]
    assert np.mean(most(found[1:], loads, size)) < 0.9 * np.mean(most(order[1:], loads, size))


def test_view_sees_visible_share_of_two_boxes() -> None:
    K = torch.tensor([[50.0, 0, 32], [0, 50, 32], [0, 0, 1]])
    views = [View(look_at([0, 0, 0], target), K, 64, 64) for target in ([1.0, 0, 0], [-1.0, 0, 0])]
    boxes = np.array([[[2.0, -9, -9], [3.0, 9, 9]], [[-3.0, -0.1, -0.1], [-2.0, 0.1, 0.1]]])
    assert loads_of(boxes, views).tolist() == [[64 * 64, 0], [0, 32 * 32]]


def test_a_sequence_is_arranged_epoch_by_epoch() -> None:
    plain, other = ViewSequence(5, 7), ViewSequence(5, 7)
    begun: list[int] = []

    def turned(order: list[int], begins: int) -> list[int]:
        begun.append(begins)
        return order[::-1]

    other.arrange = turned
    for position in random.Random(2).sample(range(40), 40):
        epoch, place = divmod(position, 5)
        assert other.at(position) == plain.at(5 * epoch + 4 - place)
    assert set(begun) == {0, 5, 10, 15, 20, 25, 30, 35}
