"""Views, patches and gradients of all outputs, which scenes of surfels and of convexes share."""

from collections.abc import Callable
from typing import Any

import torch

from cuda_ext.ops.raster.primitives import box_lists
from tests.cuda_ext.scenes import lens_in_turn

WIDTH, HEIGHT = 41, 37


def turned_views(views: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return poses [views, 4, 4] that turn by view, and their intrinsics [views, 3, 3], float64."""
    viewmats = torch.eye(4, dtype=torch.float64).repeat(views, 1, 1)
    for view in range(views):
        turn = torch.tensor(0.15 * view, dtype=torch.float64)
        viewmats[view, 0, 0] = viewmats[view, 2, 2] = turn.cos()
        viewmats[view, 0, 2], viewmats[view, 2, 0] = turn.sin(), -turn.sin()
        viewmats[view, :3, 3] = torch.tensor([0.1 * view, -0.05 * view, 0.2 * view])
    K = torch.tensor([[50.0, 0, WIDTH / 2 + 0.4], [0, 47.0, HEIGHT / 2 - 0.7], [0, 0, 1]], dtype=torch.float64)
    return viewmats, K.repeat(views, 1, 1)


def random_places(count: int, spread: float, g: torch.Generator) -> torch.Tensor:
    """Return places [count, 3] in front of the cameras, float64."""
    box = torch.tensor([spread, spread, 2.0]).double()
    return (torch.rand(count, 3, generator=g, dtype=torch.float64) - 0.5) * box + torch.tensor([0, 0, 3.0])


def scene_of(
    kind: Callable[..., Any], points_at: Callable[[torch.Tensor, torch.Generator], list[torch.Tensor]],
    count: int = 24, views: int = 2, dtype: torch.dtype = torch.float64, device: str = "cpu", seed: int = 0,
    grad: bool = True, spread: float = 1.5, lenses: bool = False,
) -> Any:  # fmt: skip
    """Return the scene of `count` points and random colours before `views` cameras, with lenses in turn if asked for.
    All pairs are rows."""
    g = torch.Generator().manual_seed(seed)
    points = points_at(random_places(count, spread, g), g)
    viewmats, Ks = turned_views(views)
    if lenses:
        Ks = torch.stack([lens_in_turn(view, K, (WIDTH, HEIGHT)) for view, K in enumerate(Ks)])
    colors = torch.rand(count * views, 3, generator=g, dtype=torch.float64)
    ready = [value.to(device, dtype).requires_grad_(grad) for value in (*points, colors, viewmats)]
    view_ids = torch.arange(views).repeat_interleave(count).int().to(device)
    return kind(*ready, Ks.to(device, dtype), view_ids, torch.arange(count).repeat(views).int().to(device))


def project_scene(project: Callable[..., Any], scene: Any) -> Any:
    """Return the rows of a scene."""
    cameras = (scene.viewmats, scene.Ks, [WIDTH, HEIGHT] * len(scene.viewmats))
    return project(scene[:-5], *cameras, scene.view_ids, scene.point_ids, near=0.2)


def draw_scene(
    project: Callable[..., Any], rasterize: Callable[..., Any], scene: Any, patches: list[int] | None = None
) -> tuple[Any, Any]:
    """Return the rows and the pixels of a scene, in all of its views by default."""
    patches = whole(len(scene.viewmats)) if patches is None else patches
    rows = project(scene)
    return rows, rasterize(rows, scene.colors, *box_lists(rows, scene.view_ids, patches), patches)


def whole(views: int) -> list[int]:
    """Return patches that are all of each view."""
    return [n for view in range(views) for n in (view, 0, 0, WIDTH, HEIGHT)]


def gradients_of(draw: Callable[..., Any], scene: Any, patches: list[int] | None = None, seed: int = 3) -> list[Any]:
    """Return gradients of a sum of all outputs with random weights, by all floats but intrinsics."""
    g = torch.Generator().manual_seed(seed)
    _, pixels = draw(scene, patches)
    loss = torch.zeros((), dtype=scene.means.dtype, device=scene.means.device)
    for name, value in pixels._asdict().items():
        value = value.abs() if name == "alphas" else value
        loss = loss + (value * torch.randn(value.shape, generator=g, dtype=torch.float64).to(value)).sum()
    return list(torch.autograd.grad(loss, scene[:-3]))
