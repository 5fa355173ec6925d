"""Groups of neighbours, and their boxes."""

import pytest
import torch

from ns_multigpu.locality.groups import LEAST, Groups, cube_around, group_size, z_codes
from tests.locality.towns import town


@pytest.mark.parametrize(
    ("points", "size"), [(1, 1024), (10**6, 1024), (10**8, 2048), (5 * 10**8, 4096), (10**10, 4096)]
)
def test_groups_grow_with_the_model(points: int, size: int) -> None:
    assert group_size(points) == size


def test_neighbours_in_the_order_are_neighbours_in_space() -> None:
    means = town(4000)[0]
    groups = Groups.along(means, z_codes(means, *cube_around(means)).argsort(), LEAST)
    assert groups.points.tolist() == [LEAST] * 125
    assert (groups.upper - groups.lower)[:, :2].median() < 30, "of a town of 100 m"
    inside = means[groups.order].view(125, LEAST, 3)
    assert torch.equal(inside.amin(1), groups.lower) and torch.equal(inside.amax(1), groups.upper)
    assert Groups.along(means, torch.arange(70), LEAST).points.tolist() == [32, 32, 6]


def test_boxes_exclude_positions_that_are_not_finite() -> None:
    means, order = town(3 * LEAST)[0], torch.arange(3 * LEAST)
    expected = Groups.along(means, order, LEAST)
    means[3], means[LEAST : 2 * LEAST] = torch.nan, torch.inf
    groups = Groups.along(means, order, LEAST)
    assert bool(groups.lower.isfinite().all()) and (groups.lower[1] == 0).all() and (groups.upper[1] == 0).all()
    assert (groups.lower[0] >= expected.lower[0]).all() and torch.equal(groups.upper[2], expected.upper[2])
    assert len(z_codes(means, *cube_around(town(3 * LEAST)[0]))) == 3 * LEAST
