"""4D Gaussians for the operators' tests."""

from collections.abc import Callable

import torch
from torch import Tensor

import cuda_ext
from tests.cuda_ext.scenes import Scene, lens_scene, random_scene

MOVING = ("means", "times", "left", "motions", "scales", "opacities")


def moving(scene: Scene, seed: int = 0, duration: float = 0.4) -> tuple[list[Tensor], Tensor]:
    """Return the scene's points as 4D Gaussians that move, as leaves in the order of `MOVING`, and its views' times."""
    g = torch.Generator().manual_seed(seed)
    points, like = len(scene.means), {"dtype": scene.means.dtype}
    times = torch.rand(points, generator=g, dtype=torch.float64).to(**like)
    motions = 0.5 * torch.randn(points, 4, generator=g, dtype=torch.float64).to(**like)
    motions[:, 0] += 1
    spans = duration * (0.5 + torch.rand(points, 1, generator=g, dtype=torch.float64)).to(**like)
    scales = torch.cat([spans, scene.scales], dim=-1)
    leaves = (scene.means, times, scene.quats, motions, scales, scene.opacities)
    view_times = torch.linspace(0.2, 0.8, len(scene.viewmats), **like)
    return [leaf.detach().clone().requires_grad_() for leaf in leaves], view_times


def moving_scene(*, lenses: bool = False, **options: int | torch.dtype) -> tuple[Scene, list[Tensor], Tensor]:
    """Return a `random_scene` or `lens_scene`, its points that move, and the times of its views."""
    scene = (lens_scene if lenses else random_scene)(**options)  # type: ignore[arg-type]
    return (scene, *moving(scene))


def with_gradients(run: Callable[..., tuple[Tensor, ...]], leaves: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Return the outputs of `run(*leaves)`, and the leaves' gradients for fixed random gradients of the floating
    ones."""
    out = run(*leaves)
    floats = [o for o in out if o.requires_grad]
    g = torch.Generator().manual_seed(7)
    given = [torch.randn(o.shape, generator=g, dtype=torch.float64).to(o) for o in floats]
    return list(out), list(torch.autograd.grad(floats, leaves, given))


def projected_rows(scene: Scene, leaves: list[Tensor], view_times: Tensor, rows: tuple[Tensor, Tensor]) -> list[Tensor]:
    """Return the inputs of `project_axes` of the points at their views' times: leaves, and last the view matrices."""
    moment = cuda_ext.condition(*leaves, view_times, *rows)
    return [part.detach().clone().requires_grad_() for part in (*moment, scene.viewmats)]
