"""A small scene of surfels: large and small ones, edge-on ones, one too near, one that touches the camera's plane."""

from functools import partial
from typing import NamedTuple

import torch

from cuda_ext.ops.raster.surfels import SURFELS
from tests.cuda_ext.surface_scene import draw_scene, gradients_of, project_scene, scene_of


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


def points_at(means: torch.Tensor, g: torch.Generator) -> list[torch.Tensor]:
    """Return parameters of surfels at these places, which some of them change."""
    count = len(means)

    def uniform(*shape: int) -> torch.Tensor:
        return torch.rand(*shape, generator=g, dtype=torch.float64)

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
    return [means, quats, scales, opacities]


make_scene = partial(scene_of, Scene, points_at)
project = partial(project_scene, SURFELS.project)
draw = partial(draw_scene, project, SURFELS.rasterize)
gradients = partial(gradients_of, draw)
