"""Nerfstudio's full-image datamanager for several ranks: one sequence of views, each rank holding its share."""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch
from nerfstudio.cameras.cameras import Cameras
from nerfstudio.data.datamanagers.full_images_datamanager import (
    FullImageDatamanager,
    FullImageDatamanagerConfig,
    _undistort_image,  # pyright: ignore[reportPrivateUsage]
)
from nerfstudio.data.datasets.base_dataset import InputDataset

from ns_multigpu.core.collectives import all_gather_objects
from ns_multigpu.core.random import keyed_permutation
from ns_multigpu.core.view_sequence import ViewSequence
from ns_multigpu.plugin.image_share import ImageData, ImageShare
from ns_multigpu.plugin.process_world import get_world


@dataclass
class DistributedDataManagerConfig(FullImageDatamanagerConfig):
    """Nerfstudio's options, under their own names."""

    _target: type = field(default_factory=lambda: DistributedDataManager)
    cache_images: Literal["cpu", "gpu"] = "cpu"
    """Where a rank keeps its share of the images: "cpu" (page-locked where there is a GPU) or "gpu"."""
    cache_images_type: Literal["uint8", "float32"] = "uint8"
    """How images are kept and sent between ranks; float32 takes four times the memory."""


class DistributedDataManager(FullImageDatamanager[InputDataset]):
    """Serves the same list of views to every rank, and each image to the rank that renders it.

    Image i is decoded and held by rank i % world size. A dataparser may name the dataset to use in an attribute
    `dataset_type` (one that renders its images, say).
    """

    config: DistributedDataManagerConfig

    def __init__(self, config: DistributedDataManagerConfig, device: torch.device | str = "cpu", **kwargs: Any) -> None:
        self.world = get_world(str(device))
        super().__init__(config, device=device, **kwargs)
        self.sequence = ViewSequence(len(self.train_dataset), config.train_cameras_sampling_seed)
        if config.train_cameras_sampling_strategy == "fps":
            first = list(self.train_unseen_cameras)
            self.sequence = ViewSequence(
                len(self.train_dataset),
                config.train_cameras_sampling_seed,
                draw=lambda: [first.pop(0) for _ in range(len(first))] or self.sample_train_cameras(),
            )

    @cached_property
    def dataset_type(self) -> type[InputDataset]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The dataparser's own dataset class, if it has one, else nerfstudio's `InputDataset`."""
        return getattr(self.dataparser, "dataset_type", None) or InputDataset

    @cached_property
    def train_share(self) -> ImageShare:
        """This rank's training images. Made by all ranks together."""
        return self._share(self.train_dataset, "training")

    @cached_property
    def eval_share(self) -> ImageShare:
        """This rank's held-out images. Made by all ranks together."""
        return self._share(self.eval_dataset, "held-out")

    @cached_property
    def train_cameras_on_device(self) -> Cameras:
        """The training cameras, for poses; intrinsics are read from the host's, which costs no wait."""
        return self.train_dataset.cameras.to(self.device)

    def _share(self, dataset: InputDataset, label: str) -> ImageShare:
        on_gpu = torch.device(self.device).type == "cuda"
        changed: dict[int, tuple[float, float, float, float, int, int]] = {}

        def decode(index: int) -> ImageData:
            data, intrinsics = self._decode(dataset, index)
            if intrinsics is not None:
                changed[index] = intrinsics
            if self.config.cache_images == "gpu":
                return {name: value.to(self.device) for name, value in data.items()}
            return data

        share = ImageShare(
            len(dataset), decode, self.world, pinned=on_gpu and self.config.cache_images == "cpu", label=label
        )
        # Undistorting changes a camera; every rank must know every camera.
        for table in all_gather_objects(changed, self.world):
            for index, (fx, fy, cx, cy, width, height) in table.items():
                cameras = dataset.cameras
                cameras.fx[index], cameras.fy[index] = fx, fy
                cameras.cx[index], cameras.cy[index] = cx, cy
                cameras.width[index], cameras.height[index] = width, height
        if dataset.cameras.distortion_params is not None:
            dataset.cameras.distortion_params = torch.zeros_like(dataset.cameras.distortion_params)
        return share

    def _decode(
        self, dataset: InputDataset, index: int
    ) -> tuple[ImageData, tuple[float, float, float, float, int, int] | None]:
        """Reads one image and takes its lens distortion out; returns the camera's new intrinsics if that changed it."""
        data = dataset.get_data(index, image_type=self.config.cache_images_type)
        camera = dataset.cameras[index].reshape(())
        size = (int(camera.width.item()), int(camera.height.item()))
        found = (int(data["image"].shape[1]), int(data["image"].shape[0]))
        if size != found:
            raise ValueError(
                f"{dataset.image_filenames[index]} is {found[0]}x{found[1]} pixels, its camera {size[0]}x{size[1]}; "
                "give the images the cameras' size, or choose the matching downscale factor"
            )
        kept: ImageData = {"image": data["image"]}
        if "mask" in data:
            kept["mask"] = data["mask"]
        parameters = camera.distortion_params
        if parameters is None or bool(torch.all(parameters == 0)):
            return kept, None
        K, image, mask = _undistort_image(
            camera, parameters.numpy(), data, data["image"].numpy(), camera.get_intrinsics_matrices().numpy()
        )
        kept["image"] = torch.from_numpy(np.ascontiguousarray(image))
        if mask is not None:
            kept["mask"] = mask
        height, width = image.shape[:2]
        return kept, (float(K[0, 0]), float(K[1, 1]), float(K[0, 2]), float(K[1, 2]), width, height)

    # ---- training ----

    def train_batch(self, step: int, size: int) -> list[int]:
        """The step's views, the same on every rank."""
        return self.sequence.batch(step, size)

    def train_camera(self, index: int) -> Cameras:
        """One training camera, [1], on the host, with its `cam_idx`."""
        return _one_camera(self.train_dataset.cameras, index)

    def train_camera_on_device(self, index: int) -> Cameras:
        """The same on the device."""
        return _one_camera(self.train_cameras_on_device, index)

    def next_train(self, step: int) -> tuple[Cameras, dict[str, Any]]:
        """One view of the sequence with its image, for callers who know nothing of batches. Every rank calls it."""
        index = self.sequence.at(step)
        return self.train_camera_on_device(index), self.train_share.fetch(index, torch.device(self.device))

    def get_train_rays_per_batch(self) -> int:
        """Pixels of the first training image: nerfstudio's speed display multiplies it by steps a second."""
        camera = self.train_dataset.cameras[0]
        return int(camera.width.item()) * int(camera.height.item())

    # ---- evaluation ----

    def eval_camera(self, index: int) -> Cameras:
        """One held-out camera, [1], on the device."""
        return self.eval_dataset.cameras[index : index + 1].to(self.device)

    def next_eval_image(self, step: int) -> tuple[Cameras, dict[str, Any]]:
        """A held-out view drawn by the step, with its image, the same on every rank. Every rank calls it."""
        index = keyed_permutation(len(self.eval_dataset), self.config.train_cameras_sampling_seed, "eval", step)[0]
        data = self.eval_share.fetch(index, torch.device(self.device))
        return self.eval_camera(index), data

    @property
    def fixed_indices_eval_dataloader(self) -> list[tuple[Cameras, dict[str, Any]]]:  # pyright: ignore
        """The held-out views that this rank holds: all of them in a world of one."""
        device = torch.device(self.device)
        share = self.eval_share
        return [(self.eval_camera(i), {k: v.to(device) for k, v in share[i].items()}) for i in share.own]


def _one_camera(cameras: Cameras, index: int) -> Cameras:
    camera = cameras[index : index + 1]
    camera.metadata = {**(camera.metadata or {}), "cam_idx": index}
    return camera
