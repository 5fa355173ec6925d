"""Steps of views that have like work."""

import random

import pytest
import torch

from ns_multigpu.core.assign import balanced_views
from ns_multigpu.core.assign.balanced_views import WINDOW, alike, points_seen, works
from ns_multigpu.core.types import View


def steps_of(order: list[int], size: int, lead: int = 0) -> list[list[int]]:
    return [order[k : k + size] for k in range(lead, len(order) - size + 1, size)]


@pytest.mark.parametrize("size", [1, 2, 3, 8])
@pytest.mark.parametrize("count", [1, 7, 40, 301])
def test_every_view_occurs_once_per_epoch(count: int, size: int) -> None:
    order = random.Random(0).sample(range(count), count)
    work = [random.Random(view).randrange(9) for view in range(count)]
    for lead in range(size):
        assert sorted(alike(order, work, size, lead)) == list(range(count))


def test_order_of_other_epochs_is_unchanged() -> None:
    order = random.Random(1).sample(range(30), 30)
    found = alike(order, list(range(30)), 4, lead=3)
    assert found[:3] == order[:3] and found[27:] == order[27:] and found[3:27] != order[3:27]
    assert alike(order[:2], list(range(30)), 4, lead=3) == order[:2], "the step is longer than the epoch"


def test_views_of_a_step_have_like_work_and_a_step_waits_less() -> None:
    """Of two kinds of views, one with three times the work: hardly a step has both."""
    order = random.Random(2).sample(range(200), 200)
    work = [3 if view < 80 else 1 for view in range(200)]

    def mixed(order: list[int]) -> int:
        return sum(len({work[view] for view in step}) > 1 for step in steps_of(order, 2))

    assert mixed(order) > 30
    assert mixed(alike(order, work, 2)) <= -(-200 // (2 * WINDOW)), "one for each window"


def test_order_of_steps_is_the_drawn_one() -> None:
    """Not from the lightest to the heaviest."""
    order = random.Random(3).sample(range(2 * WINDOW), 2 * WINDOW)
    found = steps_of(alike(order, list(range(2 * WINDOW)), 2), 2)
    places = [min(order.index(view) for view in step) for step in found]
    assert places == sorted(places) and all(abs(a - b) == 1 for a, b in found)
    assert [min(step) for step in found] != sorted(min(step) for step in found)


def test_views_are_exchanged_within_a_window_only() -> None:
    order = list(range(4 * WINDOW))
    found = alike(order, [view % 7 for view in order], 2)
    assert set(found[: 2 * WINDOW]) == set(range(2 * WINDOW)) and found != order


def test_a_step_of_no_views_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        alike([0], [1], 0)


def view(z: float, width: int = 20, height: int = 10) -> View:
    """From `z` along +z; half of a unit to each side is seen at a distance of 1."""
    viewmat = torch.eye(4)
    viewmat[2, 3] = -z
    K = torch.tensor([[width, 0, width / 2], [0, width, height / 2], [0, 0, 1.0]])
    return View(viewmat, K, width, height)


def test_points_in_the_image_count(monkeypatch: pytest.MonkeyPatch) -> None:
    points = torch.tensor([[0.0, 0, 1], [0.4, 0, 1], [0.6, 0, 1], [0, 0.2, 1], [0, 0.3, 1], [0, -0.3, 1], [0, 0, -1]])
    assert points_seen(points, [view(0), view(-9), view(2), view(0, height=20)]) == [3, 7, 0, 5]
    monkeypatch.setattr(balanced_views, "MOST_LOOKS", 8)
    monkeypatch.setattr(balanced_views, "LEAST_POINTS", 1)
    assert points_seen(points[:1].expand(1000, 3), [view(0), view(2)]) == [4, 0], "some stand for all"
    assert points_seen(points[:0], [view(0)]) == [0]


def test_work_is_by_points_and_by_pixels() -> None:
    points = torch.tensor([[0.0, 0, 1], [0.1, 0, 1], [0, 0, -1]])
    views = [view(0), view(-9), view(2), view(0, width=40, height=20)]
    assert points_seen(points, views) == [2, 3, 0, 2]
    pixels = 200 * (3 + 4) / 4
    assert works(points, views) == pytest.approx(
        [2 / 1.75 + 200 / pixels, 3 / 1.75 + 200 / pixels, 200 / pixels, 2 / 1.75 + 800 / pixels]
    )
    assert sum(works(points, views)) == pytest.approx(2 * 4)
    assert works(points[:0], views[:2]) == [1, 1], "no view shows anything"
