"""Small models of `nerfacto-xl`, and rays to render, without a capture."""

from collections.abc import Callable
from typing import Any

import torch
from nerfstudio.cameras.rays import RayBundle
from nerfstudio.data.scene_box import SceneBox
from torch import Tensor

from ns_multigpu.core.dist.world import World
from ns_multigpu.plugin.radiance.field.model import NerfactoXLModel, NerfactoXLModelConfig
from ns_multigpu.radiance.partition import Partition, partition

IMAGES, RAYS = 4, 48
SMALL: dict[str, Any] = {
    "implementation": "torch", "log2_hashmap_size": 10, "num_levels": 4, "max_res": 64, "hidden_dim": 16,
    "hidden_dim_color": 16, "num_proposal_samples_per_ray": (24, 12), "num_nerf_samples_per_ray": 8,
    "appearance_embed_dim": 4, "average_init_density": 3.0,
    "proposal_net_args_list": [
        {"hidden_dim": 8, "log2_hashmap_size": 9, "num_levels": 3, "max_res": 32, "use_linear": False}
    ],
}  # fmt: skip

GRIDS: dict[str, Any] = {"grid_resolution": 8, "march_steps": 40}


def model(
    world: World,
    cells: int,
    *,
    kind: type[NerfactoXLModelConfig] = NerfactoXLModelConfig,
    before: Callable[[Any, Tensor, Partition], None] | None = None,
    **options: Any,
) -> NerfactoXLModel:
    """Return a model with its cells, whose grids are not nearly zero, as they are at first.

    Args:
        kind: its options' class. before: called with the model, points and cells before fields are made.
        options: of the model.
    """
    torch.manual_seed(11)
    config = kind(**{**SMALL, **GRIDS, **options})
    made = config.setup(
        scene_box=SceneBox(torch.tensor([[-1.0, -1, -1], [1, 1, 1]])), num_train_data=IMAGES, seed_points=None,
        metadata={}, device="cpu", grad_scaler=None,
    )  # fmt: skip
    points = torch.randn(400, 3, generator=torch.Generator().manual_seed(1)) * torch.tensor([0.6, 0.4, 0.2])
    cut = partition(points, cells, made.domain)
    if before is not None:
        before(made, points, cut)
    made.place(cut, world)
    with torch.no_grad():
        for name, param in sorted(made.named_parameters()):
            if "hash_table" in name:
                g = torch.Generator().manual_seed(sum(map(ord, name)))
                param.copy_(torch.randn(param.shape, generator=g) * 0.8)
    return made.to(world.device)


def moved_cameras(made: Any) -> None:
    """Give each image's camera a correction."""
    with torch.no_grad():
        g = torch.Generator().manual_seed(6)
        made.camera_optimizer.pose_adjustment.copy_(1e-2 * torch.randn(IMAGES, 6, generator=g))


def fog(cells: int, **options: Any) -> Any:
    """Return a model of the same fog everywhere: parameters behind densities are 0, so that their first one is left."""
    made: Any = model(World.single(), cells, average_init_density=1.0, far_plane=0.9, **options)
    with torch.no_grad():
        for name, param in made.named_parameters():
            if name.startswith(("cells.", "shared.density.")):
                param.zero_()
    return made.eval()


def rays(extent: float = 0.6) -> RayBundle:
    """Rays from about the middle, of all images."""
    g = torch.Generator().manual_seed(3)
    return RayBundle(
        origins=(torch.rand(RAYS, 3, generator=g) - 0.5) * extent,
        directions=torch.nn.functional.normalize(torch.randn(RAYS, 3, generator=g), dim=1),
        pixel_area=torch.full((RAYS, 1), 1e-4),
        camera_indices=torch.randint(IMAGES, (RAYS, 1), generator=g),
    )


def truth(channels: int = 3) -> dict[str, Tensor]:
    """Return the expected values of the rays, and the points that every third shows."""
    g = torch.Generator().manual_seed(4)
    image = torch.rand(RAYS, channels, generator=g)
    points = torch.randn(RAYS, 3, generator=g)
    return {"image": image, "points": points, "scales": 2.5 * (torch.arange(RAYS)[:, None] % 3 == 0)}
