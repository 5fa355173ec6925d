"""Tiles of a view that a box overlaps: all tiles that show any of its points, and few others."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from ns_multigpu.cells.seen import MARGIN, NEAR, camera_position, tiles_seen
from ns_multigpu.core.types import TILE, View
from tests.strategies.scene import look_at, through_lenses

SIZE = 200, 140


def view_from(eye: list[float], target: list[float]) -> View:
    K = torch.tensor([[120.0, 0, 100], [0, 120, 70], [0, 0, 1]], dtype=torch.float64)
    return View(look_at(eye, target), K, *SIZE)


def box(low: list[float], high: list[float]) -> np.ndarray:
    return np.array([low, high])[None]


@pytest.mark.parametrize("seed", range(12))
def test_every_point_of_a_box_is_within_its_rectangle(seed: int) -> None:
    """Cameras in front of the box, next to it, and within it."""
    g = torch.Generator().manual_seed(seed)
    eye, target = (4 * torch.rand(2, 3, generator=g, dtype=torch.float64) - 2).tolist()
    view = view_from(eye, target)
    low = -torch.rand(3, generator=g, dtype=torch.float64)
    high = low + 0.1 + torch.rand(3, generator=g, dtype=torch.float64)
    (found,) = tiles_seen(box(low.tolist(), high.tolist()), view)
    points = low + (high - low) * torch.rand(40000, 3, generator=g, dtype=torch.float64)
    there = points @ view.viewmat[:3, :3].T + view.viewmat[:3, 3]
    there = there[there[:, 2] > NEAR]
    image = there @ view.K[:2].T / there[:, 2:]
    within = ((image >= 0) & (image < torch.tensor(SIZE))).all(1)
    if found is None:
        assert not within.any()
        return
    x0, y0, x1, y1 = found
    assert x0 % TILE == y0 % TILE == 0 and (x1 % TILE == 0 or x1 == SIZE[0]) and (y1 % TILE == 0 or y1 == SIZE[1])
    seen = image[within]
    assert bool(((seen >= torch.tensor([x0, y0])) & (seen < torch.tensor([x1, y1]))).all())
    if len(seen) > 500:  # no wider than the box's image, its margin and the rest of a tile
        margin = MARGIN + TILE + 6
        first, last = image.amin(0).clamp_min(0), torch.minimum(image.amax(0), torch.tensor(SIZE))
        assert x0 > first[0] - margin and y0 > first[1] - margin and x1 < last[0] + margin and y1 < last[1] + margin


def test_unseen_cells_are_excluded() -> None:
    view = view_from([0, 0, 0], [1, 0, 0])
    behind, outside = box([-3, -1, -1], [-2, 1, 1]), box([1, 40, 0], [2, 50, 1])
    empty, endless = box([1, 1, 1], [0, 0, 0]), box([-math.inf, 0, 0], [-5, 1, 1])
    found = tiles_seen(np.concatenate([behind, outside, empty, endless]), view)
    assert found == [None, None, None, (0, 0, *SIZE)]


def test_a_camera_within_a_box_sees_it_everywhere() -> None:
    inside = view_from([0.1, 0.2, 0.3], [1, 0.5, 0.2])
    assert tiles_seen(box([-1, -1, -1], [1, 1, 1]), inside) == [(0, 0, *SIZE)]
    on_its_face = view_from([1.0, 0.2, 0.3], [0, 0.5, 0.2])
    assert tiles_seen(box([-1, -1, -1], [1, 1, 1]), on_its_face) == [(0, 0, *SIZE)]


def test_camera_position_from_pose() -> None:
    view = view_from([0.5, -2.0, 3.0], [0, 0, 0])
    assert camera_position(view) == pytest.approx((0.5, -2.0, 3.0))
    assert camera_position(replace(view, viewmat=view.viewmat.float().requires_grad_())) == pytest.approx((0.5, -2, 3))


def test_a_view_with_a_lens_sees_each_cell_everywhere() -> None:
    """A rectangle of a pinhole camera would leave out what its lens shows."""
    (view,) = through_lenses([View(look_at([3.0, 0, 1], [0.0, 0, 0]), torch.eye(3), 64, 48)])
    assert tiles_seen(np.zeros((2, 2, 3)), view) == [(0, 0, 64, 48)] * 2
