"""A small scene that exercises what can differ between ranks: views of different sizes, one that sees nothing."""

import math
from dataclasses import replace
from typing import Any

import torch

from cuda_ext.ops.project.lens import lens_intrinsics, panorama_intrinsics
from ns_multigpu.core.observations import Observations
from ns_multigpu.core.types import Points, View


def look_at(eye: list[float], target: list[float]) -> torch.Tensor:
    """Return [4, 4] world-to-camera, OpenCV axes, the world's z up."""
    position, goal = torch.tensor(eye, dtype=torch.float64), torch.tensor(target, dtype=torch.float64)
    forward = torch.nn.functional.normalize(goal - position, dim=0)
    right = torch.nn.functional.normalize(torch.linalg.cross(forward, torch.tensor([0.0, 0, 1]).double()), dim=0)
    down = torch.linalg.cross(forward, right)
    rotation = torch.stack([right, down, forward])
    matrix = torch.eye(4, dtype=torch.float64)
    matrix[:3, :3], matrix[:3, 3] = rotation, -rotation @ position
    return matrix


def make_views(
    count: int, dtype: torch.dtype, device: torch.device | str = "cpu", size: tuple[int, int] | None = None
) -> list[View]:
    """Views around the scene, each of another size unless one is given, and of another time; the last looks away."""
    views = []
    for i in range(count):
        width, height = size or (40 + 13 * i, 35 + 7 * (i % 3))
        angle = 2 * math.pi * i / max(count, 1)
        eye = [3 * math.cos(angle), 3 * math.sin(angle), 0.8 + 0.1 * i]
        away = i == count - 1 and count > 1
        matrix = look_at(eye, [3 * v for v in eye] if away else [0.0, 0.0, 0.0])
        focal = 45.0 + 3 * i
        K = torch.tensor([[focal, 0, width / 2], [0, focal * 1.05, height / 2 + 1], [0, 0, 1]], dtype=dtype)
        views.append(View(matrix.to(device, dtype), K.to(device), width, height, index=i, time=(0.4 * i) % 1))
    return views


def through_lenses(views: list[View]) -> list[View]:
    """Return the views through a perspective lens, a fisheye, and as a panorama in turn."""
    result: list[View] = []
    for i, view in enumerate(views):
        K, size = view.K.cpu(), (view.width, view.height)
        if i % 3 == 2:
            around = [[size[0] / 6, 0.0, size[0] / 2], [0.0, size[1] / 3, size[1] / 2], [0.0, 0.0, 1.0]]
            K = panorama_intrinsics(K.new_tensor(around))
        else:
            coefficients = (0.05, -0.02, 3e-3, -1e-3) if i % 3 else (-0.2, 0.05, -0.01, 0.02, 0.01, 0.01, 3e-3, -2e-3)
            K = lens_intrinsics(K, size, coefficients, fisheye=i % 3 == 1)
        result.append(replace(view, K=K.to(view.K)))
    return result


def make_observations(views: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> Observations:
    """Return each view's observations of 200 points in a box of side 6 around the scene. Some points are behind a view,
    or outside of its image. The second view observes nothing, and none exceeds the capacity."""
    g = torch.Generator().manual_seed(4)
    points = torch.rand(200, 3, generator=g, dtype=torch.float64) * 6 - 3
    points[::2] /= 3
    ids = torch.full((views, 140), -1, dtype=torch.int32)
    for i in range(views):
        count = 0 if i == 1 else 60 + 70 * i // views
        ids[i, :count] = torch.randperm(200, generator=g)[:count].int()
    return Observations(points.to(device, dtype), ids.to(device), 2.5)


def make_normals(views: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> Observations:
    """Return each view's normals in some of 300 directions, not all within its image. The second view has none."""
    g = torch.Generator().manual_seed(7)
    rays = torch.rand(300, 3, generator=g, dtype=torch.float64) * 1.4 - 0.7
    rays[:, 2] = 1
    normals = torch.nn.functional.normalize(torch.randn(300, 3, generator=g, dtype=torch.float64) - rays, dim=-1)
    ids = torch.full((views, 170), -1, dtype=torch.int32)
    for i in range(views):
        count = 0 if i == 1 else 120 + 50 * i // views
        ids[i, :count] = torch.randperm(300, generator=g)[:count].int()
    return Observations(rays.to(device, dtype), ids.to(device), 1.0, normals.to(device, dtype))


def make_points(count: int, dtype: torch.dtype, device: torch.device | str = "cpu", seed: int = 0) -> Points:
    """Random Gaussians in a box of side 2 around the origin, some of them large, some coincident."""
    g = torch.Generator().manual_seed(seed)
    means = torch.rand(count, 3, generator=g, dtype=torch.float64) * 2 - 1
    if count > 4:
        means[1] = means[0]
    params = {
        "means": means,
        "scales": torch.log(0.03 + 0.15 * torch.rand(count, 3, generator=g, dtype=torch.float64)),
        "quats": torch.randn(count, 4, generator=g, dtype=torch.float64),
        "opacities": torch.randn(count, 1, generator=g, dtype=torch.float64),
        "features_dc": torch.randn(count, 3, generator=g, dtype=torch.float64) * 0.5,
        "features_rest": torch.randn(count, 15, 3, generator=g, dtype=torch.float64) * 0.2,
    }
    return Points({k: v.to(device, dtype).requires_grad_() for k, v in params.items()})


def make_moving_points(count: int, dtype: torch.dtype, device: torch.device | str = "cpu", seed: int = 0) -> Points:
    """Return `make_points` as 4D Gaussians that move, come and go."""
    g = torch.Generator().manual_seed(seed + 1)
    params = dict(make_points(count, torch.float64, seed=seed).params)
    params |= {
        "times": torch.rand(count, 1, generator=g, dtype=torch.float64),
        "motions": torch.tensor([1.0, 0, 0, 0]) + 0.3 * torch.randn(count, 4, generator=g, dtype=torch.float64),
        "durations": torch.log(0.1 + 0.5 * torch.rand(count, 1, generator=g, dtype=torch.float64)),
        "cosines_dc": 0.2 * torch.randn(count, 2, 3, generator=g, dtype=torch.float64),
        "cosines_rest": 0.1 * torch.randn(count, 2, 15, 3, generator=g, dtype=torch.float64),
    }
    return Points({k: v.detach().to(device, dtype).requires_grad_() for k, v in params.items()})


def make_surfels(count: int, dtype: torch.dtype, device: Any = "cpu") -> Points:
    """Return `make_points` as 2D Gaussians, somewhat larger."""
    params = {name: value.detach() for name, value in make_points(count, dtype, device).params.items()}
    params["scales"] = params["scales"][:, :2] + 0.3
    return Points({name: value.clone().requires_grad_() for name, value in params.items()})


def make_convexes(count: int, dtype: torch.dtype, device: Any = "cpu") -> Points:
    """Random convexes where `make_points` has Gaussians, of all sizes and edges, some of them coincident."""
    params = {name: value.detach() for name, value in make_points(count, dtype, device).params.items()}
    g = torch.Generator().manual_seed(2)
    size = params.pop("scales").exp().amax(-1, keepdim=True).cpu()
    del params["quats"]
    corners = 1.5 * size * torch.randn(count, 18, generator=g, dtype=torch.float64).to(dtype)
    deltas = torch.log((10 + 90 * torch.rand(count, 1, generator=g, dtype=torch.float64)).to(dtype) / size)
    sigmas = (
        torch.log((1 + 6 * torch.rand(count, 1, generator=g, dtype=torch.float64)).to(dtype)) - deltas - 2 * size.log()
    )
    params |= {"corners": corners.to(device), "deltas": deltas.to(device), "sigmas": sigmas.to(device)}
    return Points({name: value.clone().requires_grad_() for name, value in params.items()})


def make_gains(views: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> torch.Tensor:
    """Exposures [views + 3, 3]: there are more views than those of a batch."""
    g = torch.Generator().manual_seed(5)
    return (1 + 0.25 * torch.randn(views + 3, 3, generator=g)).to(device, dtype)


def make_grids(views: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> torch.Tensor:
    """Bilateral grids [views + 3, 12, 2, 4, 3] around maps that change nothing, some of whose results leave [0, 1]."""
    g = torch.Generator().manual_seed(8)
    maps = torch.eye(3, 4).flatten()[:, None, None, None] + 0.15 * torch.randn(views + 3, 12, 2, 4, 3, generator=g)
    return maps.to(device, dtype)


def make_corrections(views: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> torch.Tensor:
    """Pose corrections [views + 3, 6]: there are more views than those of a batch. Some turn by next to nothing, one by
    nothing at all."""
    g = torch.Generator().manual_seed(6)
    found = 0.04 * torch.randn(views + 3, 6, generator=g, dtype=torch.float64)
    found[1] = 0
    found[2::3, 3:] /= 50
    return found.to(device, dtype)


def make_image(view: View) -> torch.Tensor:
    """Return [H, W, 3] uint8 noise."""
    g = torch.Generator().manual_seed(9 + view.index)
    return torch.randint(0, 256, (view.height, view.width, 3), generator=g, dtype=torch.uint8)


def make_layers(view: View, sky: bool = False) -> torch.Tensor:
    """Return [H, W, 5] uint8: `make_image`, noise as alpha, and a mask of blocks of 8 pixels, a third of them black.
    With `sky` [H, W, 6]: half of these blocks are sky, and a pixel next to each that is half sky."""
    g = torch.Generator().manual_seed(90 + view.index)
    alpha = torch.randint(0, 256, (view.height, view.width, 1), generator=g, dtype=torch.uint8)
    blocks = torch.rand(-(-view.height // 8), -(-view.width // 8), generator=g) > 1 / 3
    mask = blocks.repeat_interleave(8, 0).repeat_interleave(8, 1)[: view.height, : view.width, None]
    layers = [make_image(view), alpha, 255 * mask.byte()]
    if sky:
        above = (torch.rand(blocks.shape, generator=g) > 0.5) & ~blocks
        there = above.repeat_interleave(8, 0).repeat_interleave(8, 1)[: view.height, : view.width, None]
        layers.append(255 * there.byte() | 127 * there.roll(1, 1).byte())
    return torch.cat(layers, dim=-1)
