"""Cameras with lenses: the map against OpenCV's, gradients, and culling."""

import cv2
import numpy as np
import pytest
import torch
from torch import Tensor

from cuda_ext.ops.optim.lazy_adam import LazyAdam
from cuda_ext.ops.project.boxes import box_views
from cuda_ext.ops.project.lens import lens_intrinsics, panorama_intrinsics
from cuda_ext.reference.projection import lens_map, local_pinholes
from tests.cuda_ext.projections import check_gradients
from tests.cuda_ext.rims import box_of_each
from tests.cuda_ext.scenes import OPENCV, OPENCV_FISHEYE, lens_scene, one_point

F32, F64 = torch.float32, torch.float64


def seen_points(count: int = 60) -> Tensor:
    """Points in camera space, some near the axis."""
    g = torch.Generator().manual_seed(1)
    seen = torch.randn(count, 3, generator=g, dtype=F64) * torch.tensor([1.0, 0.8, 0.5], dtype=F64)
    seen[:, 2] = seen[:, 2].abs() + 1.5
    seen[: count // 4, :2] *= 0.01
    return seen


def rows_of(coefficients: tuple[float, ...], fisheye: bool, count: int) -> Tensor:
    K = torch.tensor([[50.0, 0.0, 40.0], [0.0, 50.0, 30.0], [0.0, 0.0, 1.0]], dtype=F64)
    return lens_intrinsics(K, (80, 60), coefficients, fisheye=fisheye)[3:].expand(count, 4, 3)


@pytest.mark.parametrize("fisheye", [False, True])
def test_the_map_is_opencvs(fisheye: bool) -> None:
    seen, zero = seen_points(), np.zeros(3)
    lenses = rows_of(OPENCV_FISHEYE if fisheye else OPENCV, fisheye, len(seen))
    k1, k2, k3, k4, k5, k6, p1, p2 = OPENCV
    if fisheye:
        wanted, _ = cv2.fisheye.projectPoints(seen[:, None].numpy(), zero, zero, np.eye(3), np.array(OPENCV_FISHEYE))
    else:
        wanted, _ = cv2.projectPoints(seen.numpy(), zero, zero, np.eye(3), np.array([k1, k2, p1, p2, k3, k4, k5, k6]))
    image, J, depth, drawn = lens_map(lenses, seen)
    assert (image - torch.from_numpy(wanted)[:, 0]).abs().max() < 1e-10 and drawn.sum() > 40
    assert (depth - (seen.norm(dim=-1) if fisheye else seen[:, 2])).abs().max() < 1e-12
    jacobian = torch.autograd.functional.jacobian(lambda x: lens_map(lenses, x)[0].sum(0), seen)
    assert (J - jacobian.transpose(0, 1)).abs().max() < 1e-9


def test_a_panorama_has_longitude_and_latitude() -> None:
    g = torch.Generator().manual_seed(1)
    around, up = (torch.rand(2, 40, generator=g, dtype=F64) - 0.5) * torch.tensor([[6.2], [3.0]], dtype=F64)
    distance = 0.5 + torch.rand(40, generator=g, dtype=F64)
    seen = distance[:, None] * torch.stack([up.cos() * around.sin(), up.sin(), up.cos() * around.cos()], -1)
    lenses = panorama_intrinsics(torch.eye(3, dtype=F64))[3:].expand(40, 4, 3)
    image, J, depth, drawn = lens_map(lenses, seen)
    assert (image - torch.stack([around, up], -1)).abs().max() < 1e-12 and (depth - distance).abs().max() < 1e-12
    jacobian = torch.autograd.functional.jacobian(lambda x: lens_map(lenses, x)[0].sum(0), seen)
    assert (J - jacobian.transpose(0, 1)).abs().max() < 1e-9 and drawn.all()
    poles = torch.tensor([[0.0, 1.0, 0.0], [0.0, -1.0, 0.009], [0.0, -1.0, 0.011], [0.0, 1.0, -0.011]], dtype=F64)
    assert lens_map(lenses[:4], poles)[3].tolist() == [False, False, True, True]


@pytest.mark.parametrize("fisheye", [None, False, True])
def test_a_local_pinhole_is_the_lens_to_first_order(fisheye: bool | None) -> None:
    seen = seen_points()
    K = panorama_intrinsics(torch.eye(3, dtype=F64)).expand(len(seen), 7, 3).clone()
    if fisheye is not None:
        K[:, 3:] = rows_of(OPENCV_FISHEYE if fisheye else OPENCV, fisheye, len(seen))
    mean, maps, may = local_pinholes(K, seen, 0.1, 10.0)
    arms = 1e-4 * torch.randn(len(seen), 3, generator=torch.Generator().manual_seed(2), dtype=F64)
    there = (maps @ (mean + arms)[..., None])[..., 0]
    image, _, depth, _ = lens_map(K[:, 3:], mean + arms)
    assert may.sum() > 40 and (there[:, :2] / there[:, 2:] - image).abs().max() < 1e-7
    assert (there[:, 2] - depth).abs().max() < 1e-7 and arms.abs().max() > 1e-4


@pytest.mark.parametrize("antialiased", [False, True])
def test_gradcheck(either: str, antialiased: bool) -> None:
    scene = lens_scene(points=14, views=3, seed=5, dtype=F64)
    scene.opacities = scene.opacities.clamp(0.2, 0.9)
    # The last point lies near the fisheye's axis, where the series serves.
    rotation, translation = scene.viewmats[1, :3, :3], scene.viewmats[1, :3, 3]
    scene.means[-1] = rotation.T @ (torch.tensor([0.02, -0.03, 2.0]) - translation)
    rows = scene.all_rows()
    drawn = (scene.project(*rows, antialiased=antialiased).radii[:, 0] > 0).view(3, 14)
    assert (drawn.sum(1) > 2).all() and drawn[1, -1]
    check_gradients(scene, rows, antialiased)


def test_a_lens_without_distortion_is_a_pinhole() -> None:
    scene = lens_scene(views=1, dtype=F64)
    pinhole = lens_scene(views=1, dtype=F64)
    scene.Ks[:, 4:] = 0
    pinhole.Ks = pinhole.Ks[:, :3].contiguous()
    found, wanted = (of.project(*of.all_rows()) for of in (scene, pinhole))
    inside = (wanted.means2d > 0).all(-1) & (wanted.radii > 0).all(-1)  # where a pinhole's Jacobian is not clamped
    inside &= (wanted.means2d < wanted.means2d.new_tensor(scene.sizes)).all(-1)
    assert inside.sum() > 30
    for got, want in zip(found, wanted, strict=True):
        assert (got[inside] - want[inside]).abs().max() < 1e-9


def test_next_to_a_pole_nothing_is_drawn(either: str) -> None:
    K = torch.tensor([[10.0, 0.0, 32.0], [0.0, 10.0, 16.0], [0.0, 0.0, 1.0]], dtype=F64)
    scene = one_point(means=[[0.0, 1.0, 0.0], [0.0, -1.0, 0.009], [0.0, -1.0, -0.011]])
    scene.quats, scene.scales = scene.quats.expand(3, 4).contiguous(), scene.scales.expand(3, 3).contiguous()
    scene.opacities, scene.Ks, scene.sizes = (
        scene.opacities.expand(3).contiguous(),
        panorama_intrinsics(K)[None],
        [64, 32],
    )
    assert (scene.project(*scene.all_rows()).radii[:, 0] > 0).tolist() == [False, False, True]
    assert 2 in scene.cull()[1].tolist()


def test_rays_that_fold_back_are_not_drawn() -> None:
    """Of 1 + k1 t the slope's image is longest at t = -1 / (3 k1)."""
    K = torch.tensor([[50.0, 0.0, 50.0], [0.0, 50.0, 50.0], [0.0, 0.0, 1.0]])
    lens = lens_intrinsics(K, (100, 100), (-0.3, *[0.0] * 7), fisheye=False)
    assert abs(float(lens[3, 2]) - 1 / 0.9) < 1e-2
    none = lens_intrinsics(K, (100, 100), [0.0] * 8, fisheye=False)
    assert abs(float(none[3, 2]) - 2 * 1.3**2) < 1e-2  # 1.3 times the corner's slope
    with pytest.raises(ValueError, match="folds back at its axis"):
        lens_intrinsics(K, (100, 100), (-1e9, 0.0, 0.0, 0.0), fisheye=True)
    with pytest.raises(ValueError, match="4 coefficients"):
        lens_intrinsics(K, (100, 100), [0.0] * 5, fisheye=True)


def test_culling_keeps_what_is_drawn(either: str) -> None:
    """`cull` keeps all rows that are drawn or counted, and boxes show where `cull` or a missed step keeps a point."""
    scene = lens_scene(4000, 4, dtype=F32)
    rows = scene.all_rows()
    radii = scene.project(*rows).radii[:, 0].view(4, -1)
    kept = torch.zeros(4, 4000, dtype=torch.bool)
    view_ids, point_ids = (of.long() for of in scene.cull())
    kept[view_ids, point_ids] = True
    assert kept[radii != 0].all() and 0.02 < kept.float().mean() < 0.8
    boxes = box_of_each(scene.means, scene.scales.amax(-1))
    found = box_views(boxes, scene.viewmats, scene.Ks, scene.sizes)
    assert found[kept].all() and found.float().mean() < 0.85
    table = LazyAdam.make(1, "cpu").table
    table[:, 0, 4] = 0.2
    moving = box_views(boxes, scene.viewmats, scene.Ks, scene.sizes, table=table)
    g = torch.Generator().manual_seed(3)
    scene.means = scene.means + 0.2 * (2 * torch.rand(4000, 3, generator=g) - 1)
    moved = scene.project(*rows).radii[:, 0].view(4, -1)
    assert moving[moved != 0].all() and not found[moved != 0].all() and not moving.all()
