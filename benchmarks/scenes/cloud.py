"""A random cloud of Gaussians before one camera: a scene of any size that needs no file."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Scene:
    """A cloud of Gaussians before one camera, and the image it should show."""

    means: Tensor
    quats: Tensor
    scales: Tensor
    opacities: Tensor
    sh_dc: Tensor
    sh_rest: Tensor
    viewmats: Tensor
    Ks: Tensor
    target: Tensor

    @property
    def size(self) -> tuple[int, int]:
        return self.target.shape[1], self.target.shape[0]

    def parameters(self) -> list[Tensor]:
        return [self.means, self.quats, self.scales, self.opacities, self.sh_dc, self.sh_rest]


def make_scene(points: int, width: int, height: int) -> Scene:
    """Return points spread over the view, 2 to 8 units deep, of a size in pixels that covers the image."""
    generator = torch.Generator().manual_seed(0)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator)

    focal = 0.8 * width
    depth = 2 + 6 * uniform(points, 1)
    pixels = uniform(points, 2) * torch.tensor([width, height]) - torch.tensor([width / 2, height / 2])
    spread = 1.3 * math.sqrt(width * height / points) * depth / focal  # std of 1.3 times the mean spacing in pixels
    return Scene(
        means=torch.cat([pixels * depth / focal, depth], dim=1),
        quats=torch.nn.functional.normalize(torch.randn(points, 4, generator=generator), dim=1),
        scales=spread * (0.3 + 1.2 * uniform(points, 3)),
        opacities=0.05 + 0.9 * uniform(points),
        sh_dc=torch.randn(points, 3, generator=generator) * 0.5,
        sh_rest=torch.randn(points, 15, 3, generator=generator) * 0.1,
        viewmats=torch.eye(4)[None],
        Ks=torch.tensor([[[focal, 0, width / 2], [0, focal, height / 2], [0, 0, 1]]]),
        target=(uniform(height, width, 3) * 255).to(torch.uint8),
    )
