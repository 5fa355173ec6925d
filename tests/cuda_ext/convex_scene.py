"""A small scene of convexes: large and small ones, sharp and soft ones, flat ones, one too near, some with ties."""

from typing import Any, NamedTuple

import torch

from cuda_ext.ops.raster.convexes import (
    ConvexPixels,
    ConvexProjection,
    convex_lists,
    project_convexes,
    rasterize_convexes,
)

WIDTH, HEIGHT = 41, 37


class Scene(NamedTuple):
    means: torch.Tensor
    corners: torch.Tensor
    deltas: torch.Tensor
    sigmas: torch.Tensor
    opacities: torch.Tensor
    colors: torch.Tensor
    viewmats: torch.Tensor
    Ks: torch.Tensor
    view_ids: torch.Tensor
    point_ids: torch.Tensor

    @property
    def floats(self) -> tuple[torch.Tensor, ...]:
        """Return all but the intrinsics and the ids."""
        return self[:7]


def make_scene(
    count: int = 24, views: int = 2, dtype: torch.dtype = torch.float64, device: str = "cpu", seed: int = 0,
    grad: bool = True, spread: float = 1.5,
) -> Scene:  # fmt: skip
    """Return `count` convexes in front of `views` cameras, all of whose pairs are rows."""
    g = torch.Generator().manual_seed(seed)

    def uniform(*shape: int) -> torch.Tensor:
        return torch.rand(*shape, generator=g, dtype=torch.float64)

    means = (uniform(count, 3) - 0.5) * torch.tensor([spread, spread, 2.0]).double() + torch.tensor([0, 0, 3.0])
    size = 0.03 + 0.3 * uniform(count, 1, 1) ** 2
    corners = size * torch.randn(count, 6, 3, generator=g, dtype=torch.float64)
    corners = corners - corners.mean(1, keepdim=True)
    size = size[:, 0, 0]
    deltas = (10 + 90 * uniform(count)) / size
    sigmas = (1 + 6 * uniform(count)) / (deltas * size**2)
    opacities = 0.02 + 0.97 * uniform(count)
    if count > 8:
        corners[0, :, 2] = 0  # flat, parallel to the screen
        corners[1, :, :2] = 0  # seen from its side, a line: without a hull
        means[1, :2] = 0
        means[2, 2] = 0.25
        corners[2, :, 2] = torch.tensor([-0.2, 0.2, 0.1, -0.1, 0.0, 0.0])  # a corner before the near plane
        corners[3, 5] = corners[3, 4] = corners[3, 3]  # three at one place
        means[4, 2] = -1.0
        opacities[5] = 0.003
        opacities[6], sigmas[6] = 0.9995, 20 / (deltas[6] * size[6] ** 2)  # the cap
    viewmats = torch.eye(4, dtype=torch.float64).repeat(views, 1, 1)
    for view in range(views):
        turn = torch.tensor(0.15 * view, dtype=torch.float64)
        viewmats[view, 0, 0] = viewmats[view, 2, 2] = turn.cos()
        viewmats[view, 0, 2], viewmats[view, 2, 0] = turn.sin(), -turn.sin()
        viewmats[view, :3, 3] = torch.tensor([0.1 * view, -0.05 * view, 0.2 * view])
    K = torch.tensor([[50.0, 0, WIDTH / 2 + 0.4], [0, 47.0, HEIGHT / 2 - 0.7], [0, 0, 1]], dtype=torch.float64)
    floats = [means, corners.flatten(1), deltas, sigmas, opacities, uniform(count * views, 3), viewmats]
    ready = [value.to(device, dtype).requires_grad_(grad) for value in floats]
    view_ids = torch.arange(views).repeat_interleave(count).int().to(device)
    point_ids = torch.arange(count).repeat(views).int().to(device)
    return Scene(*ready, K.to(device, dtype).repeat(views, 1, 1), view_ids, point_ids)


def whole(views: int) -> list[int]:
    """Patch that are all of each view."""
    return [n for view in range(views) for n in (view, 0, 0, WIDTH, HEIGHT)]


def project(scene: Scene) -> ConvexProjection:
    sizes = [WIDTH, HEIGHT] * len(scene.viewmats)
    means, corners, deltas, sigmas, opacities, _, viewmats, Ks, view_ids, point_ids = scene
    cameras = (viewmats, Ks, sizes)
    return project_convexes(means, corners, deltas, sigmas, opacities, *cameras, view_ids, point_ids, near=0.2)


def draw(scene: Scene, patches: list[int] | None = None) -> tuple[ConvexProjection, ConvexPixels]:
    patches = whole(len(scene.viewmats)) if patches is None else patches
    rows = project(scene)
    lists = convex_lists(rows, scene.view_ids, patches)
    return rows, rasterize_convexes(rows, scene.colors, *lists, patches)


def gradients(scene: Scene, patches: list[int] | None = None, seed: int = 3) -> list[Any]:
    """Of a sum of all outputs with random weights, by the scene's floats."""
    g = torch.Generator().manual_seed(seed)
    _, pixels = draw(scene, patches)
    loss = torch.zeros((), dtype=scene.means.dtype, device=scene.means.device)
    for name, value in pixels._asdict().items():
        value = value.abs() if name == "alphas" else value
        loss = loss + (value * torch.randn(value.shape, generator=g, dtype=torch.float64).to(value)).sum()
    return list(torch.autograd.grad(loss, scene.floats))
