"""Rays to train on, the same on every rank: rank 0 reads the images and draws, the others are told."""

import random
from dataclasses import dataclass, field
from typing import Any

import torch
from nerfstudio.cameras.cameras import Cameras
from nerfstudio.cameras.rays import RayBundle
from nerfstudio.data.datamanagers.base_datamanager import VanillaDataManager, VanillaDataManagerConfig
from nerfstudio.model_components.ray_generators import RayGenerator
from torch import Tensor

from ns_multigpu.core.collectives import broadcast_object
from ns_multigpu.core.replicas import broadcast_in_place
from ns_multigpu.plugin.launch.process_world import get_world
from ns_multigpu.plugin.radiance.draws import drawn, mixed
from ns_multigpu.radiance.partition import points_along

_TRAIN, _EVAL, _IMAGE, _RAYS = 5, 6, 7, 8
"""First numbers of the seeds of what is drawn."""
_SAMPLES_A_RAY = 16


@dataclass
class RadianceDataManagerConfig(VanillaDataManagerConfig):
    """nerfstudio's options of rays."""

    _target: type = field(default_factory=lambda: RadianceDataManager)


class RadianceDataManager(VanillaDataManager):
    """nerfstudio's datamanager of rays, whose images are on rank 0 alone."""

    config: RadianceDataManagerConfig

    def __init__(self, config: RadianceDataManagerConfig, **kwargs: Any) -> None:
        self.world = get_world(str(kwargs.get("device", "cpu")))
        self.seed = torch.initial_seed() & (1 << 62) - 1
        self._channels: dict[int, int] = {}
        super().__init__(config, **kwargs)

    def setup_train(self) -> None:
        """Rank 0 reads the images."""
        if self.world.is_main:
            with drawn("cpu", self.seed, _TRAIN):
                super().setup_train()
        else:
            assert self.train_dataset is not None
            self.train_ray_generator = RayGenerator(self.train_dataset.cameras.to(self.device))

    def setup_eval(self) -> None:
        """Rank 0 reads the images."""
        if self.world.is_main:
            with drawn("cpu", self.seed, _EVAL):
                super().setup_eval()
        else:
            assert self.eval_dataset is not None
            self.eval_ray_generator = RayGenerator(self.eval_dataset.cameras.to(self.device))

    def next_train(self, step: int) -> tuple[RayBundle, dict[str, Tensor]]:
        """The rays of a step and their colours. Every rank calls it and gets the same, whoever has gone before."""
        self.train_count += 1
        return self._rays(_TRAIN, step, self.train_ray_generator)

    def next_eval(self, step: int) -> tuple[RayBundle, dict[str, Tensor]]:
        """As `next_train`, of held-out views."""
        self.eval_count += 1
        return self._rays(_EVAL, step, self.eval_ray_generator)

    def _rays(self, kind: int, step: int, generator: RayGenerator) -> tuple[RayBundle, dict[str, Tensor]]:
        table, device = torch.zeros(0), self.world.device
        if self.world.is_main:
            loader, sampler = (
                (self.iter_train_image_dataloader, self.train_pixel_sampler)
                if kind == _TRAIN
                else (self.iter_eval_image_dataloader, self.eval_pixel_sampler)
            )
            with drawn(device, self.seed, kind, step):
                images = next(loader)
                assert sampler is not None and images is not None
                batch = sampler.sample(images)
            # Camera, row and column are exact as floats below 2^24.
            table = torch.cat([batch["indices"].to(device, torch.float32), batch["image"].to(device).float()], 1)
        shape = broadcast_object(list(table.shape), 0, self.world)
        if not self.world.is_main:
            table = torch.empty(shape, device=device)
        broadcast_in_place(table, self.world)
        indices = table[:, :3].long()
        return generator(indices.to(generator.image_coords.device)), {"indices": indices, "image": table[:, 3:]}

    def next_eval_image(self, step: int) -> tuple[Cameras, dict[str, Any]]:
        """A held-out view, the same on every rank; rank 0 has its image."""
        index = random.Random(mixed(self.seed, _IMAGE, step)).randrange(len(self.eval_dataset))
        return self.eval_image(index)

    def eval_image(self, index: int) -> tuple[Cameras, dict[str, Any]]:
        """A held-out view by its number, [1]; and its image, on rank 0."""
        camera = self.eval_camera(index).to(self.device)
        batch = self.eval_dataset.get_data(index) if self.world.is_main else {}
        return camera, batch

    def eval_camera(self, index: int) -> Cameras:
        """That of a held-out view by its number, [1]."""
        return self.eval_dataset.cameras[index : index + 1]

    def get_train_rays_per_batch(self) -> int:
        """Rays of a step, of all ranks: they have the same."""
        return self.config.train_num_rays_per_batch

    def points_along_rays(self, near: float, far: float, rays: int = 1 << 14) -> Tensor:
        """Points [N, 3] along rays of training views, drawn at random: what space is cut by without a reconstruction.

        Args:
            near, far: distances between which they lie.
            rays: how many rays.
        """
        cameras = self.train_dataset.cameras
        g = torch.Generator().manual_seed(mixed(self.seed, _RAYS))
        view = torch.randint(len(cameras), (rays,), generator=g)
        size = torch.stack([cameras.height[view, 0], cameras.width[view, 0]], 1).cpu()
        coords = torch.rand(rays, 2, generator=g) * size
        bundle = cameras.generate_rays(camera_indices=view[:, None], coords=coords)
        return points_along(bundle.origins, bundle.directions, near, far, _SAMPLES_A_RAY)
