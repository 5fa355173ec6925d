"""The picture of a partition: colours at known places, outliers, and models with nearly nothing in them."""

import numpy as np
import pytest
from numpy.typing import NDArray

from ns_multigpu.plugin.render.palette import machine_color, rank_colors
from ns_multigpu.plugin.render.partition_picture import PictureContent, draw, window

RANDOM = np.random.default_rng(4)
WEST, EAST = (-10.0, 0.0), (10.0, 4.0)
"""Centres of two clusters along x and z."""


def cluster(at: tuple[float, float], count: int = 4000) -> NDArray[np.float64]:
    """Points around a place; they extend along x and z, and hardly along y."""
    return RANDOM.uniform(-1, 1, (count, 3)) * [3.0, 0.1, 3.0] + np.array([at[0], 7.0, at[1]])


def two(far: float = 0.0, view_owners: tuple[int, ...] = (0, 1)) -> PictureContent:
    """Return clusters of machine 0's second rank and machine 1's first, with a camera next to each, and three far
    points."""
    positions = np.concatenate([cluster(WEST), cluster(EAST), np.full((3, 3), far)])
    owners = np.repeat([1, 2, 3], [4000, 4000, 3])
    cameras = np.array([[-10.0, 9.0, 4.5], [10.0, 9.0, -0.5]])
    return PictureContent(positions, owners, [0, 4000, 4000, 3], cameras, np.array(view_owners, dtype=np.int64), 2)


def color_at(seen: PictureContent, place: tuple[float, float]) -> tuple[float, ...]:
    x, y = window(seen).pixels(np.array([place]))[0]
    pixel = draw(seen).getpixel((int(x), int(y)))
    assert isinstance(pixel, tuple)
    return tuple(value / 255 for value in pixel)


@pytest.mark.parametrize("far", [0.0, 1e9])
def test_points_have_their_ranks_colours_and_cameras_their_machines(far: float) -> None:
    """Also where a few points are far away: clusters stay as large as they were."""
    seen, colors = two(far), rank_colors(2, 2)
    assert seen.axes == (0, 2)
    assert color_at(seen, WEST) == pytest.approx(colors[1], abs=0.003)
    assert color_at(seen, EAST) == pytest.approx(colors[2], abs=0.003)
    assert color_at(seen, (0.0, 2.0)) == (1.0, 1.0, 1.0), "nothing is between them"
    for x, z, machine in ((-10.0, 4.5, 0), (10.0, -0.5, 1)):
        assert color_at(seen, (x, z)) == pytest.approx(machine_color(machine), abs=0.003)
    picture = draw(seen)
    assert picture.size == (1000, 800)
    x, _ = window(seen).pixels(np.array([WEST, EAST])).T
    assert x[1] - x[0] > 350, "the clusters fill the picture"


def test_cameras_far_from_the_points_do_not_shrink_the_picture() -> None:
    near = two()
    far = PictureContent(near.positions, near.owners, near.points, near.cameras * [1.0, 1.0, 1e6], near.view_owners, 2)
    assert window(far).scale > window(near).scale / 3


def test_views_without_a_home_have_no_machines_colour() -> None:
    assert color_at(two(view_owners=()), (-10.0, 4.5)) == pytest.approx((250 / 255,) * 3)


@pytest.mark.filterwarnings("error")  # of numbers that are none, too
@pytest.mark.parametrize("machines", [1, 2, 3])
def test_nearly_nothing(machines: int) -> None:
    """One point, none, no views, no finite number: a picture all the same, with a legend."""
    none, ranks = np.zeros((0, 3)), [1] + [0] * (6 // machines * machines - 1)
    nan, one = np.full((2, 3), np.nan), np.array([[3.0, 4.0, 5.0]])
    for positions in (none, one, nan, np.concatenate([nan, one]), np.full((3, 3), np.inf), np.repeat(one, 9, 0)):
        for cameras in (none, one, nan):
            owners = np.zeros(len(positions), dtype=np.int64)
            view_owners = np.zeros(len(cameras), dtype=np.int64)
            picture = draw(PictureContent(positions, owners, ranks, cameras, view_owners, machines))
            assert np.asarray(picture)[:, 764:].std() > 1, "the legend is there"


def test_many_ranks_fit_the_legend() -> None:
    seen = PictureContent(cluster(WEST, 64), np.arange(64), [1] * 64, np.zeros((0, 3)), np.zeros(0, dtype=np.int64), 16)
    assert (np.asarray(draw(seen))[-20:, 764:] == 255).all()


def test_mismatched_inputs_are_refused() -> None:
    seen = two()
    with pytest.raises(ValueError, match="positions"):
        PictureContent(seen.positions[:5], seen.owners, seen.points, seen.cameras, seen.view_owners, 2)
    with pytest.raises(ValueError, match="1 view owners for 2 views"):
        PictureContent(seen.positions, seen.owners, seen.points, seen.cameras, seen.view_owners[:1], 2)
    with pytest.raises(ValueError, match="4 ranks on 3 machines"):
        PictureContent(seen.positions, seen.owners, seen.points, seen.cameras, seen.view_owners, 3)


@pytest.mark.parametrize(("machines", "per_machine"), [(1, 8), (2, 4), (4, 4), (8, 4), (32, 1)])
def test_no_two_ranks_share_a_colour(machines: int, per_machine: int) -> None:
    colors = np.array(rank_colors(machines, per_machine))
    assert colors.shape == (machines * per_machine, 3) and colors.min() > 0 and colors.max() < 1
    apart = np.abs(colors[:, None] - colors[None]).max(-1) + 9 * np.eye(len(colors))
    assert apart.min() > 0.02
