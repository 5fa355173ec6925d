"""Datamanager of training rays: every rank gets the same rays and holds a shard of the images."""

import random
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from nerfstudio.cameras.cameras import Cameras
from nerfstudio.cameras.rays import RayBundle
from nerfstudio.data.datamanagers.base_datamanager import VanillaDataManager, VanillaDataManagerConfig
from nerfstudio.data.datasets.base_dataset import InputDataset
from nerfstudio.data.utils.dataloaders import FixedIndicesEvalDataloader, RandIndicesEvalDataloader
from nerfstudio.model_components.ray_generators import RayGenerator
from torch import Tensor

from ns_multigpu.core.dist.world import World
from ns_multigpu.plugin.capture.coordinate_offset import OffsetOption
from ns_multigpu.plugin.capture.image_reading import FileDataset
from ns_multigpu.plugin.capture.parsing import parsed_together
from ns_multigpu.plugin.capture.tracks import Tracks
from ns_multigpu.plugin.launch.process_world import get_world
from ns_multigpu.plugin.radiance.data.device_inputs import DeviceInputs
from ns_multigpu.plugin.radiance.data.keypoints import find_keypoints
from ns_multigpu.plugin.radiance.data.pinhole_rays import PinholeRays
from ns_multigpu.plugin.radiance.data.split import ImageSplit
from ns_multigpu.plugin.radiance.field.draws import mixed
from ns_multigpu.radiance.partition import points_along

_TRAIN, _EVAL, _IMAGE, _RAYS = 5, 6, 7, 8
"""First seed numbers of the random draws: train, eval, image, rays."""
_SAMPLES_A_RAY = 16


@dataclass
class RadianceDataManagerConfig(VanillaDataManagerConfig, OffsetOption):
    """Options of nerfstudio's ray datamanager."""

    _target: type = field(default_factory=lambda: RadianceDataManager)


class RadianceDataManager(VanillaDataManager[InputDataset]):
    """nerfstudio's ray datamanager with the images sharded over the ranks.

    A dataparser may set the dataset class in an attribute `dataset_type` (for example one that renders its images).

    Raises:
        InputError: on every rank, if any rank cannot read the capture.
    """

    config: RadianceDataManagerConfig

    def __init__(self, config: RadianceDataManagerConfig, **kwargs: Any) -> None:
        device, trains = str(kwargs.get("device", "cpu")), kwargs.get("test_mode", "val") == "val"
        # Outside of training (ns-export) one process alone draws rays, even if other processes help to render.
        self.world = get_world(device)
        self._rays_world = self.world if trains else World.single(device)
        self.seed = torch.initial_seed() & (1 << 62) - 1
        self._splits: dict[int, ImageSplit] = {}
        self._set_up: list[int] = []
        with parsed_together(config, self.world, trains):
            super().__init__(config, **kwargs)
        if trains:
            for kind in self._set_up:  # empty if ns-render needs cameras only
                self._split(kind).begin()

    @cached_property
    def dataset_type(self) -> type[InputDataset]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The dataparser's own dataset class if it has one, else `FileDataset`."""
        return getattr(self.dataparser, "dataset_type", None) or FileDataset

    def setup_train(self) -> None:
        """Create the sampler and the ray generator. All ranks read the images later, together."""
        self._set_up.append(_TRAIN)
        self.train_pixel_sampler = self._get_pixel_sampler(self.train_dataset, self.config.train_num_rays_per_batch)
        self.train_ray_generator = RayGenerator(self.train_dataset.cameras.to(self.device))

    def setup_eval(self) -> None:
        """Do the same as `setup_train`, and create the dataloaders of single views that nerfstudio's commands use."""
        if not len(self.eval_dataset):
            return
        self._set_up.append(_EVAL)
        self.eval_pixel_sampler = self._get_pixel_sampler(self.eval_dataset, self.config.eval_num_rays_per_batch)
        self.eval_ray_generator = RayGenerator(self.eval_dataset.cameras.to(self.device))
        self.fixed_indices_eval_dataloader = FixedIndicesEvalDataloader(self.eval_dataset, device=self.device)
        self.eval_dataloader = RandIndicesEvalDataloader(self.eval_dataset, device=self.device)

    def _split(self, kind: int) -> ImageSplit:
        """Return a split's images. All ranks must create it together."""
        if kind not in self._splits:
            config, trains = self.config, kind == _TRAIN
            dataset: InputDataset = self.train_dataset if trains else self.eval_dataset
            sampler = self.train_pixel_sampler if trains else self.eval_pixel_sampler
            assert sampler is not None
            place = self._rays_world.device
            self._splits[kind] = ImageSplit(
                dataset,
                sampler,
                self._rays_world,
                (self.seed, kind),
                some=config.train_num_images_to_sample_from if trains else config.eval_num_images_to_sample_from,
                repeats=config.train_num_times_to_repeat_images if trains else config.eval_num_times_to_repeat_images,
                label="training" if trains else "held-out",
                option=f"--pipeline.datamanager.{'train' if trains else 'eval'}-num-rays-per-batch",
                places=(place if config.images_on_gpu else "cpu", place if config.masks_on_gpu else "cpu"),
            )
        return self._splits[kind]

    def observe(self, tracks: Tracks) -> None:
        """Draw a share of the training rays at keypoints of these tracks. Every rank calls it with the same."""
        self._split(_TRAIN).observe(find_keypoints(tracks, self.train_dataset.cameras))

    def next_train(self, step: int) -> tuple[RayBundle, dict[str, Tensor]]:
        """Return the rays and colours of a step. Every rank calls it and gets the same, also after a resume.

        Returns:
            rays [R], and the batch of `ImageSplit.pixels`.
        """
        self.train_count += 1
        return self._rays(_TRAIN, self.train_ray_generator, step, step)

    def step_inputs(self) -> DeviceInputs | None:
        """Return step inputs equal to `next_train`'s that never wait for the device; None unless all cameras are
        perspective. All ranks must create it together."""
        if not PinholeRays.fits(self.train_dataset.cameras):
            return None
        device = self.world.device
        return DeviceInputs(self._split(_TRAIN), PinholeRays(self.train_dataset.cameras).to(device), self.world)

    def next_eval(self, step: int) -> tuple[RayBundle, dict[str, Tensor]]:
        """Return a batch of held-out views, as `next_train` does. Images change by calls, not by steps."""
        self.eval_count += 1
        return self._rays(_EVAL, self.eval_ray_generator, self.eval_count - 1, step)

    def _rays(self, kind: int, generator: RayGenerator, draw: int, step: int) -> tuple[RayBundle, dict[str, Tensor]]:
        batch = self._split(kind).pixels(draw, step)
        return generator(batch["indices"].to(generator.image_coords.device)), batch

    def next_eval_image(self, step: int) -> tuple[Cameras, dict[str, Any]]:
        """Return a random held-out view, the same on every rank, and its image on rank 0."""
        index = random.Random(mixed(self.seed, _IMAGE, step)).randrange(len(self.eval_dataset))
        return self.eval_image(index)

    def eval_image(self, index: int) -> tuple[Cameras, dict[str, Any]]:
        """Return a held-out view [1] by its number, and its image on rank 0, read now."""
        camera = self.eval_camera(index).to(self.device)
        batch = self.eval_dataset.get_data(index) if self.world.is_main else {}
        return camera, batch

    def eval_camera(self, index: int) -> Cameras:
        """Return the camera [1] of a held-out view by its number."""
        return self.eval_dataset.cameras[index : index + 1]

    def eval_held(self) -> range:
        """Return the held-out views whose images this rank has: all on rank 0."""
        return range(len(self.eval_dataset) if self.world.is_main else 0)

    def eval_holder(self, index: int) -> int:
        """Return the rank that has a held-out view's image."""
        del index
        return 0

    def points_along_rays(self, near: float, far: float, rays: int = 1 << 14) -> Tensor:
        """Return random points [N, 3] along training rays, for splitting space without a reconstruction.

        Args:
            near, far: range of distances along the rays.
            rays: number of rays.
        """
        cameras = self.train_dataset.cameras
        g = torch.Generator().manual_seed(mixed(self.seed, _RAYS))
        view = torch.randint(len(cameras), (rays,), generator=g)
        size = torch.stack([cameras.height[view, 0], cameras.width[view, 0]], 1).cpu()
        coords = torch.rand(rays, 2, generator=g) * size
        bundle = cameras.generate_rays(camera_indices=view[:, None], coords=coords)
        return points_along(bundle.origins, bundle.directions, near, far, _SAMPLES_A_RAY)
