"""A small scene of surfels: large and small ones, edge-on ones, one too near, one that touches the camera's plane."""

from typing import Any, NamedTuple

import torch

from cuda_ext.ops.raster.surfels import SurfelPixels, SurfelProjection, box_lists, project_surfels, rasterize_surfels

WIDTH, HEIGHT = 41, 37


class Scene(NamedTuple):
    means: torch.Tensor
    quats: torch.Tensor
    scales: torch.Tensor
    opacities: torch.Tensor
    colors: torch.Tensor
    viewmats: torch.Tensor
    Ks: torch.Tensor
    view_ids: torch.Tensor
    point_ids: torch.Tensor

    @property
    def floats(self) -> tuple[torch.Tensor, ...]:
        """Return all but the intrinsics and the ids."""
        return self[:6]


def make_scene(
    count: int = 24, views: int = 2, dtype: torch.dtype = torch.float64, device: str = "cpu", seed: int = 0,
    grad: bool = True, spread: float = 1.5,
) -> Scene:  # fmt: skip
    """Return `count` surfels in front of `views` cameras, all of whose pairs are rows."""
    g = torch.Generator().manual_seed(seed)

    def uniform(*shape: int) -> torch.Tensor:
        return torch.rand(*shape, generator=g, dtype=torch.float64)

    means = (uniform(count, 3) - 0.5) * torch.tensor([spread, spread, 2.0]).double() + torch.tensor([0, 0, 3.0])
    scales = 0.02 + 0.3 * uniform(count, 2) ** 2
    quats = torch.randn(count, 4, generator=g, dtype=torch.float64)
    opacities = 0.02 + 0.97 * uniform(count)
    if count > 8:
        quats[0] = torch.tensor([2.0, 0, 0, 0])  # parallel to the screen
        quats[1] = torch.tensor([1.0, 0, 1, 0])  # edge-on
        means[2, 2], scales[2] = 0.5, torch.tensor([0.9, 0.1])
        quats[2] = torch.tensor([1.0, 0, 1, 0])  # its disc of one standard deviation touches the camera's plane
        means[3, 2], scales[3], opacities[3] = 1.0, torch.tensor([0.45, 0.1]), 0.9
        quats[3] = torch.tensor([1.0, 0, 0.8, 0])  # only where alpha is still 1/255 does it
        means[4, 2] = -1.0
        opacities[5] = 0.003
        opacities[6] = 0.9995  # the cap
    viewmats = torch.eye(4, dtype=torch.float64).repeat(views, 1, 1)
    for view in range(views):
        turn = torch.tensor(0.15 * view, dtype=torch.float64)
        viewmats[view, 0, 0] = viewmats[view, 2, 2] = turn.cos()
        viewmats[view, 0, 2], viewmats[view, 2, 0] = turn.sin(), -turn.sin()
        viewmats[view, :3, 3] = torch.tensor([0.1 * view, -0.05 * view, 0.2 * view])
    K = torch.tensor([[50.0, 0, WIDTH / 2 + 0.4], [0, 47.0, HEIGHT / 2 - 0.7], [0, 0, 1]], dtype=torch.float64)
    floats = [means, quats, scales, opacities, uniform(count * views, 3), viewmats]
    ready = [value.to(device, dtype).requires_grad_(grad) for value in floats]
    view_ids = torch.arange(views).repeat_interleave(count).int().to(device)
    point_ids = torch.arange(count).repeat(views).int().to(device)
    return Scene(*ready, K.to(device, dtype).repeat(views, 1, 1), view_ids, point_ids)


def whole(views: int) -> list[int]:
    """Patch that are all of each view."""
    return [n for view in range(views) for n in (view, 0, 0, WIDTH, HEIGHT)]


def project(scene: Scene) -> SurfelProjection:
    sizes = [WIDTH, HEIGHT] * len(scene.viewmats)
    cameras = (scene.viewmats, scene.Ks, sizes)
    return project_surfels(*scene[:4], *cameras, scene.view_ids, scene.point_ids, near=0.2)


def draw(scene: Scene, patches: list[int] | None = None) -> tuple[SurfelProjection, SurfelPixels]:
    patches = whole(len(scene.viewmats)) if patches is None else patches
    rows = project(scene)
    lists = box_lists(rows, scene.view_ids, patches)
    return rows, rasterize_surfels(rows, scene.colors, *lists, patches)


def gradients(scene: Scene, patches: list[int] | None = None, seed: int = 3) -> list[Any]:
    """Of a sum of all outputs with random weights, by the scene's floats."""
    g = torch.Generator().manual_seed(seed)
    _, pixels = draw(scene, patches)
    loss = torch.zeros((), dtype=scene.means.dtype, device=scene.means.device)
    for name, value in pixels._asdict().items():
        value = value.abs() if name == "alphas" else value
        loss = loss + (value * torch.randn(value.shape, generator=g, dtype=torch.float64).to(value)).sum()
    return list(torch.autograd.grad(loss, scene.floats))
