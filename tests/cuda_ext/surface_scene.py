"""Views, patches and gradients of all outputs, which scenes of surfels and of convexes share."""

from collections.abc import Callable
from typing import Any

import torch

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


def all_pairs(count: int, views: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return view_ids and point_ids of all pairs, by view."""
    view_ids = torch.arange(views).repeat_interleave(count).int().to(device)
    return view_ids, torch.arange(count).repeat(views).int().to(device)


def whole(views: int) -> list[int]:
    """Return patches that are all of each view."""
    return [n for view in range(views) for n in (view, 0, 0, WIDTH, HEIGHT)]


def gradients_of(draw: Callable[..., Any], scene: Any, patches: list[int] | None = None, seed: int = 3) -> list[Any]:
    """Return gradients of a sum of all outputs with random weights, by the scene's floats."""
    g = torch.Generator().manual_seed(seed)
    _, pixels = draw(scene, patches)
    loss = torch.zeros((), dtype=scene.means.dtype, device=scene.means.device)
    for name, value in pixels._asdict().items():
        value = value.abs() if name == "alphas" else value
        loss = loss + (value * torch.randn(value.shape, generator=g, dtype=torch.float64).to(value)).sum()
    return list(torch.autograd.grad(loss, scene.floats))
