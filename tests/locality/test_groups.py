"""Groups, their boxes, and culling of boxes against culling of points."""

import pytest
import torch

from cuda_ext.ops.project.culling import cull
from ns_multigpu.locality.groups import LEAST, Groups, cull_groups, group_size, z_order
from tests.locality.towns import HEIGHT, WIDTH, cameras, town


@pytest.mark.parametrize(
    ("points", "size"), [(1, 1024), (10**6, 1024), (10**8, 2048), (5 * 10**8, 4096), (10**10, 4096)]
)
def test_groups_grow_with_the_model(points: int, size: int) -> None:
    assert group_size(points) == size


def test_neighbours_in_the_order_are_neighbours_in_space() -> None:
    means, scales, _ = town(4000)
    groups = Groups.of(means, scales, LEAST)
    assert sorted(groups.order.tolist()) == list(range(4000))
    assert groups.points.tolist() == [LEAST] * 125
    sides = (groups.upper - groups.lower)[:, :2]
    assert sides.median() < 30, "of a town of 100 m"
    strange = means.clone()
    strange[3] = float("nan")
    assert sorted(z_order(strange).tolist()) == list(range(4000))
    assert Groups.of(means[:70], scales[:70], LEAST).points.tolist() == [32, 32, 6]
    assert groups.of_points()[groups.order[40]] == 1


def test_a_box_of_a_group_is_never_rejected_where_a_point_of_it_is_kept() -> None:
    means, scales, opacities = town(6000)
    groups = Groups.of(means, scales, LEAST, margin=0.0)
    poses, Ks = cameras(60)
    sizes, rects = [WIDTH, HEIGHT] * 60, []
    for view in range(60):  # whole pictures, patches at their corners, and an empty one
        rects += [[0, 0, WIDTH, HEIGHT], [0, 0, 24, 16], [72, 48, WIDTH, HEIGHT], [5, 5, 5, 9]][view % 4]
    for near, far in ((0.01, 1e10), (4.0, 30.0)):
        view_ids, point_ids = cull(means, scales, opacities, poses, Ks, sizes, rects, near=near, far=far)
        kept = torch.zeros(60, len(groups), dtype=torch.bool)
        kept[cull_groups(groups, poses, Ks, sizes, rects, near=near, far=far)] = True
        assert len(point_ids) > 1000
        assert kept[view_ids.long(), groups.of_points()[point_ids.long()]].all()
        assert not kept[3::4].any(), "an empty rectangle shows nothing"
        assert kept.float().mean() < 0.5, "most groups are rejected"


@pytest.mark.parametrize(("across", "down"), [(22.0, 22.0), (14.0, 31.0), (31.0, 14.0)])
def test_not_even_where_a_group_is_one_place(across: float, down: float) -> None:
    """Boxes without extent, wide cameras, large splats: nothing to spare at the sides and the near plane."""
    places, scales, _ = town(3000, seed=3)
    means = (places - torch.tensor([50.0, 50.0, 6.0])).repeat_interleave(LEAST, 0) * torch.tensor([0.4, 0.4, 1.0])
    scales = (4 * scales).repeat_interleave(LEAST, 0)
    order = torch.arange(len(means))
    groups = Groups.of(means, scales, LEAST, margin=0.0, order=order)
    poses, Ks = cameras(40, seed=5)
    poses[:, :3, 3] *= 0.05
    Ks[:, 0, 0], Ks[:, 1, 1] = across, down
    sizes, rects = [WIDTH, HEIGHT] * 40, [0, 0, 24, HEIGHT, 60, 40, WIDTH, HEIGHT] * 20
    view_ids, point_ids = cull(means, scales, torch.ones(len(means)), poses, Ks, sizes, rects, near=0.2)
    kept = torch.zeros(40, len(groups), dtype=torch.bool)
    kept[cull_groups(groups, poses, Ks, sizes, rects, near=0.2)] = True
    needed = torch.zeros_like(kept)
    needed[view_ids.long(), point_ids.long() // LEAST] = True
    assert (kept | ~needed).all()
    most = 2.2 if across == down else 3.2  # the longer one counts for both axes
    assert kept.sum() < most * needed.sum(), "and not too much for nothing"


def test_nonfinite_point_does_not_cull_its_group() -> None:
    means, scales, opacities = town(6000)
    poses, Ks = cameras(20)
    sizes, rects = [WIDTH, HEIGHT] * 20, [0, 0, WIDTH, HEIGHT] * 20
    view_ids, point_ids = cull(means, scales, opacities, poses, Ks, sizes, rects)
    order = Groups.of(means, scales, LEAST).order
    means[order[100]], means[order[200], 1], scales[order[300]] = torch.nan, torch.inf, torch.nan
    means[order[640 : 640 + LEAST]] = torch.nan  # all of a group
    groups = Groups.of(means, scales, LEAST, order=order)
    kept = torch.zeros(20, len(groups), dtype=torch.bool)
    kept[cull_groups(groups, poses, Ks, sizes, rects)] = True
    there = means.isfinite().all(1)[point_ids.long()] & (point_ids != order[300])
    assert kept[view_ids.long(), groups.of_points()[point_ids.long()]][there].all() and there.sum() > 1000


def test_culled_pairs_come_by_view_then_group() -> None:
    means, scales, _ = town(6000)
    groups = Groups.of(means, scales, LEAST)
    poses, Ks = cameras(9)
    views, ids = cull_groups(groups, poses, Ks, [WIDTH, HEIGHT] * 9, [0, 0, WIDTH, HEIGHT] * 9)
    keys = views * len(groups) + ids
    assert (keys.diff() > 0).all()


def test_a_camera_inside_a_box_sees_it() -> None:
    """No corner of the box lies in its frustum: the paper's rule would lose it."""
    corners = torch.tensor([[x, y, z] for x in (-50.0, 50.0) for y in (-50.0, 50.0) for z in (-50.0, 50.0)])
    means = torch.cat([corners, torch.zeros(24, 3) + torch.tensor([0.0, 0.0, 1.0])])
    groups = Groups.of(means, torch.full((32, 3), 0.01), LEAST)
    K = torch.tensor([[[400.0, 0, 48], [0, 400.0, 32], [0, 0, 1]]])
    assert len(cull_groups(groups, torch.eye(4)[None], K, [WIDTH, HEIGHT], [0, 0, WIDTH, HEIGHT])[0]) == 1


def test_boxes_hold_under_small_motion_and_report_overflow() -> None:
    means, scales, _ = town(2000)
    groups = Groups.of(means, scales, LEAST, margin=0.1)
    assert groups.still_hold(means + 0.1, scales * 1.1).all()
    moved = means.clone()
    moved[groups.order[5]] += 40.0
    assert groups.still_hold(moved, scales).tolist() == [False] + [True] * (len(groups) - 1)
    assert groups.refitted(moved, scales).still_hold(moved, scales).all()
    assert not groups.still_hold(means, scales * 2).any()
    assert not Groups.of(means, scales, LEAST, margin=0.0).still_hold(means + 0.1, scales).any()


def test_errors_name_the_argument() -> None:
    means, scales, _ = town(100)
    for size in (0, LEAST - 1, 1 << 20):
        with pytest.raises(ValueError, match="1024 to 4096"):
            Groups.of(means, scales, size)
    with pytest.raises(ValueError, match="no points"):
        Groups.of(means[:0], scales[:0])
    with pytest.raises(ValueError, match="margin"):
        Groups.of(means, scales, margin=-1.0)
    with pytest.raises(ValueError, match="must be"):
        Groups.of(means, scales[:, :2])
