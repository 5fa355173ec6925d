"""A small scene of convexes: large and small ones, sharp and soft ones, flat ones, one too near, some with ties."""

from functools import partial
from typing import NamedTuple

import torch

from cuda_ext.ops.raster.convexes import CONVEXES
from tests.cuda_ext.surface_scene import draw_scene, gradients_of, project_scene, scene_of


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


def points_at(means: torch.Tensor, g: torch.Generator) -> list[torch.Tensor]:
    """Return parameters of convexes at these places, which some of them change."""
    count = len(means)

    def uniform(*shape: int) -> torch.Tensor:
        return torch.rand(*shape, generator=g, dtype=torch.float64)

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
    return [means, corners.flatten(1), deltas, sigmas, opacities]


make_scene = partial(scene_of, Scene, points_at)
project = partial(project_scene, CONVEXES.project)
draw = partial(draw_scene, project, CONVEXES.rasterize)
gradients = partial(gradients_of, draw)
