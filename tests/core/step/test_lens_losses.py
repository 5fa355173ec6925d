"""Losses of depth and of normals through lenses: rays and keypoints where OpenCV has them, and planes without loss."""

from dataclasses import replace
from typing import Any

import cv2
import numpy as np
import pytest
import torch

from cuda_ext.ops.project.lens import lens_intrinsics, panorama_intrinsics
from ns_multigpu.core.image_points import pixel_rays
from ns_multigpu.core.observations import Observations
from ns_multigpu.core.step.depth_loss import depth_loss, keypoints
from ns_multigpu.core.step.normal_map_loss import normal_map_loss, normals_of_depth
from ns_multigpu.core.types import Patch, Pixels, Points, View
from ns_multigpu.primitives.gaussians.functions import Gaussians
from ns_multigpu.primitives.surfels.functions import Surfels
from tests.strategies.scene import look_at

KINDS = ["perspective", "fisheye", "panorama"]
BENT = (-0.2, 0.05, -0.01, 0.02, 0.0, 0.01, 8e-3, -6e-3)
CURVED = (0.05, -0.02, 3e-3, -1e-3)
WIDTH, HEIGHT = 48, 36
FACING = torch.nn.functional.normalize(torch.tensor([0.2, -1.0, -0.3]).double(), dim=0)
"""The normal, in camera axes, of a plane under the camera, at a distance of 1.2."""


def make_view(kind: str, dtype: torch.dtype = torch.float64) -> View:
    focal = {"perspective": 36.0, "fisheye": 16.0, "panorama": WIDTH / 6.0}[kind]
    K = torch.tensor([[focal, 0, 23.1], [0, focal * 1.1, 18.6], [0, 0, 1]], dtype=torch.float64)
    if kind == "panorama":
        K[1, 1] = HEIGHT / 3.0
        K = panorama_intrinsics(K)
    else:
        fisheye = kind == "fisheye"
        K = lens_intrinsics(K, (WIDTH, HEIGHT), CURVED if fisheye else BENT, fisheye=fisheye)
    return View(look_at([2.0, 1.0, 0.5], [0.0, 0.0, 0.0]).to(dtype), K.to(dtype), WIDTH, HEIGHT)


def rays_of(view: View) -> torch.Tensor:
    x, y = (torch.arange(count, dtype=view.K.dtype) + 0.5 for count in (WIDTH, HEIGHT))
    return pixel_rays(view.K, x, y)


def image_of(kind: str, view: View, seen: Any) -> Any:
    """Return the pixels [n, 2] of points in camera space [n, 3]: OpenCV's, or by the formulas of angles."""
    (fx, _, cx), (_, fy, cy), _ = view.K[:3].tolist()
    if kind == "perspective":
        matrix, numbers = view.K[:3].double().numpy(), np.array(BENT)[[0, 1, 6, 7, 2, 3, 4, 5]]
        return cv2.projectPoints(np.asarray(seen), np.zeros(3), np.zeros(3), matrix, numbers)[0][:, 0]
    x, y, z = np.asarray(seen).T
    if kind == "panorama":
        return np.stack([fx * np.arctan2(x, z) + cx, fy * np.arcsin(y / np.linalg.norm(seen, axis=1)) + cy], 1)
    angle = np.arccos(z / np.linalg.norm(seen, axis=1))
    bent = angle * (1 + sum(k * angle ** (2 * i + 2) for i, k in enumerate(CURVED)))
    return np.stack([fx * bent * x / np.hypot(x, y) + cx, fy * bent * y / np.hypot(x, y) + cy], 1)


def depths_of(kind: str, seen: Any) -> Any:
    """Return the depths [n] that are drawn of points in camera space [n, 3]."""
    return seen[:, 2] if kind == "perspective" else np.linalg.norm(np.asarray(seen), axis=1)


def plane_of(view: View) -> torch.Tensor:
    """Return the depth [h, w, 1] of the plane, 0 where rays do not meet it within a distance of 20."""
    against = rays_of(view) @ FACING.to(view.K.dtype)
    return torch.where(against < -0.06, -1.2 / against, 0.0)[..., None]


def inner(mask: torch.Tensor) -> torch.Tensor:
    """Return which pixels [h, w] have neighbours, and all of the mask."""
    around = torch.nn.functional.pad(mask[None].double(), (1, 1, 1, 1))
    return -torch.nn.functional.max_pool2d(-around, 3, stride=1)[0] > 0


def pixels_of(view: View, depth: torch.Tensor) -> Pixels:
    full = torch.ones_like(depth)
    return Pixels(Patch.whole(0, view), full.expand(-1, -1, 3), full, depth)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", KINDS)
def test_rays_are_those_whose_image_is_the_pixel(kind: str, dtype: torch.dtype) -> None:
    view = make_view(kind, dtype)
    rays = rays_of(view)
    y, x = np.mgrid[:HEIGHT, :WIDTH] + 0.5
    kept = rays.any(-1).numpy()
    assert kept.mean() > 0.98
    seen = rays.double().numpy()[kept]
    np.testing.assert_allclose(depths_of(kind, seen), 1.0, atol=1e-6 if dtype == torch.float32 else 1e-14)
    off = np.abs(image_of(kind, view, seen) - np.stack([x, y], -1)[kept])
    assert off.max() < (1e-4 if dtype == torch.float32 else 1e-6)
    if kind == "fisheye":
        assert seen[:, 2].min() < -0.1, "rays beyond 90 degrees"


def test_pixels_that_the_lens_does_not_draw_have_no_rays_and_no_normals_around() -> None:
    K = torch.tensor([[20.0, 0, 24], [0, 20.0, 18], [0, 0, 1]]).double()
    lens = lens_intrinsics(K, (WIDTH, HEIGHT), (-0.3, *[0.0] * 7), fisheye=False)  # folds back at a radius of 0.703
    view = replace(make_view("perspective"), K=lens)
    y, x = torch.meshgrid(torch.arange(HEIGHT) + 0.5, torch.arange(WIDTH) + 0.5, indexing="ij")
    radius = ((x - 24) / 20).hypot((y - 18) / 20)
    rays = rays_of(view)
    fold = float(lens[3, 1].tan())
    assert bool(rays[radius < 0.69].any(-1).all()) and not bool(rays[radius > 0.71].any())
    assert float(rays[..., :2].norm(dim=-1).max()) < fold == pytest.approx(1.054, abs=1e-3)
    depth = (
        2 + 0.1 * torch.rand(HEIGHT, WIDTH, 1, generator=torch.Generator().manual_seed(1)).double()
    ).requires_grad_()
    normals = normals_of_depth(depth, view, (0, 0))
    known = torch.nn.functional.pad(rays.any(-1), (1, 1, 1, 1))
    around = known[1:-1, 2:] & known[1:-1, :-2] & known[2:, 1:-1] & known[:-2, 1:-1]
    assert torch.equal(normals.any(-1), around) and 300 < int(around.sum()) < int(known.sum()) - 50
    assert bool(torch.autograd.grad(normals.sum(), depth)[0].isfinite().all())


@pytest.mark.parametrize("kind", KINDS)
def test_keypoints_are_where_opencv_has_them_at_the_depth_that_is_drawn(kind: str) -> None:
    view, g = make_view(kind), torch.Generator().manual_seed(3)
    seen = torch.randn(400, 3, generator=g).double()
    if kind == "perspective":
        seen[::2, 2].abs_().add_(0.8)
    points = (seen - view.viewmat[:3, 3]) @ view.viewmat[:3, :3]
    view = replace(view, observations=Observations(points, torch.arange(400, dtype=torch.int32), 1.0))
    places, depths, inside = keypoints(view)
    angles = torch.atan2(seen[:, :2].norm(dim=-1), seen[:, 2])
    expected, ahead = image_of(kind, view, seen.numpy()), (angles <= view.K[3, 1]).numpy()
    if kind == "panorama":
        ahead = (seen[:, ::2].norm(dim=-1) >= 0.01 * seen.norm(dim=-1)).numpy()
    wanted = ahead & (expected >= 0).all(1) & (expected < [WIDTH, HEIGHT]).all(1)
    assert np.array_equal(inside.numpy(), wanted) and 80 < wanted.sum() < 400
    np.testing.assert_allclose(places[inside], expected[wanted], atol=1e-9)
    np.testing.assert_allclose(depths[inside], depths_of(kind, seen.numpy())[wanted], atol=1e-12)
    if kind != "perspective":
        assert int((inside & (seen[:, 2] < 0)).sum()) > 4, "behind the camera"


@pytest.mark.parametrize("kind", KINDS)
def test_a_plane_has_its_normal_and_a_loss_of_zero(kind: str) -> None:
    view = make_view(kind)
    depth, rays = plane_of(view), rays_of(view)
    there = inner(depth[..., 0] > 0)
    found = normals_of_depth(depth, view, (0, 0)) @ view.viewmat[:3, :3].T
    assert int(there.sum()) > 400
    torch.testing.assert_close(found[there], FACING.expand(int(there.sum()), 3), rtol=0, atol=1e-9)
    seen = (rays * depth)[there]
    ids = torch.arange(len(seen), dtype=torch.int32)
    points = (seen - view.viewmat[:3, 3]) @ view.viewmat[:3, :3]
    view = replace(
        view, observations=Observations(points, ids, 2.5),
        normals=Observations(rays[there], ids, 1.0, FACING.expand(len(seen), 3)),
    )  # fmt: skip
    assert abs(float(normal_map_loss(pixels_of(view, depth), view))) < 1e-9
    assert float(depth_loss(pixels_of(view, depth), view)) < 1e-9
    true = depths_of(kind, seen.numpy())
    off = float(depth_loss(pixels_of(view, 1.25 * depth), view))
    assert off == pytest.approx(2.5 * 0.2 * float((1 / true).mean()), rel=1e-9)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients(kind: str) -> None:
    view, g = make_view(kind), torch.Generator().manual_seed(5)
    seen = rays_of(view).reshape(-1, 3)[::7] * 1.5
    normals = torch.nn.functional.normalize(torch.randn(len(seen), 3, generator=g).double(), dim=1)
    ids = torch.arange(len(seen), dtype=torch.int32)
    points = (seen - view.viewmat[:3, 3]) @ view.viewmat[:3, :3]
    view = replace(view, observations=Observations(points, ids, 2.5), normals=Observations(seen, ids, 1.0, normals))
    depth = (1 + torch.rand(HEIGHT, WIDTH, 1, generator=g, dtype=torch.float64)).requires_grad_()
    for loss in (depth_loss, normal_map_loss):
        assert torch.autograd.gradcheck(lambda d, f=loss: f(pixels_of(view, d), view), depth, fast_mode=True)
    found = [
        torch.autograd.grad(loss(pixels_of(view, depth), view), depth)[0] for loss in (depth_loss, normal_map_loss)
    ]
    assert all(bool(one.any()) for one in found)


@pytest.mark.parametrize("primitive", ["3dgs", "2dgs"])
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_a_drawn_plane_fits_its_points_and_normals(kind: str, primitive: str) -> None:
    """Splats on the plane: drawn depths are of the kind, and drawn normals in the axes, that the losses take."""
    view = make_view(kind, torch.float32)
    depth, rays = plane_of(view), rays_of(view)
    near = ((depth > 0) & (depth < 6))[..., 0]
    seen, R = (rays * depth)[near], view.viewmat[:3, :3]
    points, normal = (seen - view.viewmat[:3, 3]) @ R, FACING.float() @ R
    count, axis = len(seen), torch.linalg.cross(torch.tensor([0.0, 0.0, 1.0]), normal)
    turn = torch.cat([1 + normal[2:], axis])
    size = 0.6 / view.K[0, 0] * seen.norm(dim=1, keepdim=True)
    flat = [size, size] if primitive == "2dgs" else [size, size, 0.02 * size]
    params = {
        "means": points, "quats": turn.expand(count, 4).contiguous(), "scales": torch.cat(flat, 1).log(),
        "opacities": torch.full((count, 1), 3.0), "features_dc": torch.zeros(count, 3),
        "features_rest": torch.zeros(count, 15, 3),
    }  # fmt: skip
    kinds: dict[str, Any] = {"3dgs": Gaussians(depth=True), "2dgs": Surfels(depth=True, channels=("normals",))}
    drawn = kinds[primitive]
    splats = drawn.splat(Points(params), drawn.cull(Points(params), [view], [0]), [view])
    (pixels,) = drawn.render(splats, [Patch.whole(0, view)], [view])
    kept = inner(inner(near) & (depth[..., 0] < 3))[near]
    ids = torch.arange(count, dtype=torch.int32)[kept]
    view = replace(
        view, observations=Observations(points, ids, 1.0),
        normals=Observations(rays[near], ids, 1.0, FACING.float().expand(count, 3).contiguous()),
    )  # fmt: skip
    assert len(ids) > 150
    mean = float((1 / depth[near][kept]).mean())
    assert float(depth_loss(pixels, view)) < 0.1 * mean
    assert float(normal_map_loss(pixels, view)) < 0.08
    away = replace(view.normals, normals=-view.normals.normals)  # type: ignore[type-var,union-attr]
    assert float(normal_map_loss(pixels, replace(view, normals=away))) > 1.7
