"""Nerfstudio's full-image datamanager for several ranks: one sequence of views, each rank holding its share."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch
from nerfstudio.cameras.cameras import Cameras
from nerfstudio.data.datamanagers.full_images_datamanager import FullImageDatamanager, FullImageDatamanagerConfig
from nerfstudio.data.datasets.base_dataset import InputDataset

from ns_multigpu.core.assign.view_sequence import ViewSequence
from ns_multigpu.core.dist.collectives import all_gather_ints
from ns_multigpu.core.random import keyed_generator, keyed_permutation
from ns_multigpu.plugin.capture.checks import raise_together
from ns_multigpu.plugin.capture.image_files import Header
from ns_multigpu.plugin.capture.image_reading import ImageReader
from ns_multigpu.plugin.capture.image_share import ImageShare
from ns_multigpu.plugin.capture.image_store import ImageShape, aligned
from ns_multigpu.plugin.capture.parsing import parsed_together
from ns_multigpu.plugin.capture.reading import (
    FAULTS,
    capture_problems,
    file_headers,
    image_shapes,
    refuse_different,
)
from ns_multigpu.plugin.faults.host_memory import available_memory
from ns_multigpu.plugin.launch import checks
from ns_multigpu.plugin.launch.process_world import get_world
from ns_multigpu.plugin.launch.run_parts import run_parts

_FREE_FOR_IMAGES = 0.5
"""The part of a machine's free memory that its ranks may fill with images unless the user says otherwise."""


@dataclass
class DistributedDataManagerConfig(FullImageDatamanagerConfig):
    """Nerfstudio's options, under their own names."""

    _target: type = field(default_factory=lambda: DistributedDataManager)
    cache_images: Literal["cpu", "gpu"] = "cpu"
    """Where a rank keeps its share of the images: "cpu" (page-locked where there is a GPU) or "gpu"."""
    cache_images_type: Literal["uint8", "float32"] = "uint8"
    """How images are kept and sent between ranks; float32 takes four times the memory."""
    image_memory_gb: float | None = None
    """Memory a rank may fill with images, held-out ones included, in GB (10^9 bytes); what does not fit is decoded
    again each time it is needed, ahead of its use. By default half of the machine's free memory, divided by its
    ranks."""


class DistributedDataManager(FullImageDatamanager[InputDataset]):
    """Serves the same list of views to every rank, and each image to the rank that renders it.

    Image i is held by rank i % world size, unless `hold_by` says otherwise of the training images. A dataparser may
    name the dataset to use in an attribute `dataset_type` (one that renders its images, say).

    Raises:
        InputError: on every rank, that the capture cannot be read on one of them.
    """

    config: DistributedDataManagerConfig

    def __init__(self, config: DistributedDataManagerConfig, device: torch.device | str = "cpu", **kwargs: Any) -> None:
        checks.check_image_memory(config.image_memory_gb)
        self.world = get_world(str(device))
        self._homes: list[int] | None = None
        self._trains = kwargs.get("test_mode", "val") == "val"
        with parsed_together(config, self.world, self._trains):
            super().__init__(config, device=device, **kwargs)
        run_parts().done("capture read")
        self.sequence = ViewSequence(len(self.train_dataset), config.train_cameras_sampling_seed)
        self._preview: ViewSequence | None = None
        self._epoch = len(self.train_dataset)
        if config.train_cameras_sampling_strategy == "fps":
            first = list(self.train_unseen_cameras)
            self._epoch = len(first)
            self._draws = itertools.count()
            self.sequence = ViewSequence(
                len(self.train_dataset),
                config.train_cameras_sampling_seed,
                draw=lambda: self._draw_by_distance(first),
            )

    def _draw_by_distance(self, first: list[int]) -> list[int]:
        """The next epoch's views; nerfstudio has drawn the first's.

        It draws from numpy's global generator, whose state must not depend on when a rank looks ahead.
        """
        epoch = next(self._draws)
        if epoch == 0:
            return first
        state = np.random.get_state()  # noqa: NPY002
        drawn = torch.randint(
            2**31, (1,), generator=keyed_generator(self.config.train_cameras_sampling_seed, "views by distance", epoch)
        )
        np.random.seed(int(drawn.item()))  # noqa: NPY002
        try:
            return self.sample_train_cameras()
        finally:
            np.random.set_state(state)  # noqa: NPY002

    @cached_property
    def dataset_type(self) -> type[InputDataset]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The dataparser's own dataset class, if it has one, else nerfstudio's `InputDataset`."""
        return getattr(self.dataparser, "dataset_type", None) or InputDataset

    def check_capture(self) -> None:
        """Looks at all cameras and at the headers of all image files, held-out ones included. Every rank calls it.

        Raises:
            InputError: on every rank, naming everything that is wrong.
        """
        refuse_different([self.train_dataset, self.eval_dataset], self.world)
        lines = capture_problems([self.train_dataset, self.eval_dataset])
        headers = [*(self.train_headers or []), *(self.eval_headers or [])]
        raise_together(lines + [line for header in headers for line in header.problems], self.world, FAULTS)
        _ = self.train_shapes, self.eval_shapes
        run_parts().done("capture checked")

    @cached_property
    def train_headers(self) -> list[Header] | None:
        """Of all training files, the same on every rank. Read by all ranks together, before there is a reader."""
        return file_headers(self.train_dataset, self.world)

    @cached_property
    def eval_headers(self) -> list[Header] | None:
        """Of all held-out files, as `train_headers`."""
        return file_headers(self.eval_dataset, self.world)

    @cached_property
    def train_reader(self) -> ImageReader:
        """What reads training images. Made by all ranks together; from then on the cameras are free of distortion."""
        return self._reader(self.train_dataset)

    @cached_property
    def eval_reader(self) -> ImageReader:
        """What reads held-out images, as `train_reader`."""
        return self._reader(self.eval_dataset)

    @cached_property
    def train_shapes(self) -> list[ImageShape]:
        """Of all training images, the same on every rank. Made by all ranks together."""
        headers, kind = self.train_headers, self.config.cache_images_type
        return image_shapes(self.train_dataset, self.train_reader, headers, kind, self.world)

    @cached_property
    def eval_shapes(self) -> list[ImageShape]:
        """Of all held-out images, as `train_shapes`."""
        headers, kind = self.eval_headers, self.config.cache_images_type
        return image_shapes(self.eval_dataset, self.eval_reader, headers, kind, self.world)

    def hold_by(self, homes: Sequence[int]) -> None:
        """Says which rank is to hold each training image: `homes_of` makes homes of the machines that see most of each
        view, with `train_shapes` and `train_memory`. Every rank calls it with the same, before there is a
        `train_share`, which checks them.

        Raises:
            RuntimeError: there is one.
        """
        if "train_share" in vars(self):
            raise RuntimeError(
                "hold_by: the training images are held already. Say who holds them before prepare_training, which "
                "reads them."
            )
        self._homes = list(homes)

    @cached_property
    def train_share(self) -> ImageShare:
        """This rank's training images. Made by all ranks together."""
        return self._share(self.train_reader, self.train_shapes, "training", self.train_memory, self._homes)

    @cached_property
    def eval_share(self) -> ImageShare:
        """This rank's held-out images. Made by all ranks together."""
        return self._share(self.eval_reader, self.eval_shapes, "held-out", self.eval_memory)

    @cached_property
    def train_cameras_on_device(self) -> Cameras:
        """The training cameras, for poses; intrinsics are read from the host's, which costs no wait."""
        return self.train_dataset.cameras.to(self.device)

    @cached_property
    def image_memory(self) -> int | None:
        """Bytes a rank may fill with images, the same on every rank; None for no limit. Made by all ranks together."""
        if self.config.image_memory_gb is not None:
            return int(self.config.image_memory_gb * 1e9)
        free = available_memory()
        mine = -1 if free is None else int(free * _FREE_FOR_IMAGES) // self.world.host_size
        least = min(row[0] for row in all_gather_ints([mine], self.world))
        return None if least < 0 else least

    @cached_property
    def train_memory(self) -> int | None:
        """Bytes a rank may fill with training images, the same on every rank; None for no limit. Made by all ranks
        together. Held-out images live in the same memory: they have their part first, two of them at least."""
        budget, held_out = self._split_memory, self.eval_memory
        return max(0, budget - held_out) if self._trains and budget is not None and held_out is not None else budget

    @cached_property
    def eval_memory(self) -> int | None:
        """As `train_memory`, with held-out images."""
        budget = self._split_memory
        if budget is None or not self._trains:
            return budget
        train, held_out = (sum(s.nbytes for s in part) for part in (self.train_shapes, self.eval_shapes))
        least = 2 * max((aligned(shape.nbytes) for shape in self.eval_shapes), default=0)
        return max(least, int(budget * (held_out / (train + held_out))))

    @cached_property
    def _split_memory(self) -> int | None:
        """What both splits have together."""
        return None if self.config.cache_images == "gpu" and self.config.image_memory_gb is None else self.image_memory

    def _reader(self, dataset: InputDataset) -> ImageReader:
        reader = ImageReader(dataset, self.config.cache_images_type, self.world)
        dataset.cameras = reader.cameras
        return reader

    def _share(
        self,
        reader: ImageReader,
        shapes: Sequence[ImageShape],
        label: str,
        budget: int | None,
        homes: Sequence[int] | None = None,
    ) -> ImageShare:
        on_gpu = self.config.cache_images == "gpu"
        return ImageShare(
            shapes,
            reader.read,
            self.world,
            homes=homes,
            label=label,
            budget=budget,
            place=self.device if on_gpu else "cpu",
            pinned=torch.device(self.device).type == "cuda" and not on_gpu,
        )

    # ---- training ----

    def train_batch(self, step: int, size: int) -> list[int]:
        """The step's views, the same on every rank; those of the steps to come begin to be decoded."""
        batch = self.sequence.batch(step, size)
        # Not beyond the next epoch: a sequence forgets the epochs before the last two that it was asked for.
        ahead = min(self.train_share.lookahead, self._epoch - size)
        if ahead > 0:
            last = (step + 1) * size
            self.train_share.expect(batch + [self.sequence.at(p) for p in range(last, last + ahead)])
        return batch

    def coming(self, steps: range, size: int) -> list[list[int]]:
        """The views of coming steps, for whoever plans ahead; none where they are drawn by distance, as they come."""
        if self.config.train_cameras_sampling_strategy == "fps":
            return []
        if self._preview is None:
            self._preview = ViewSequence(len(self.train_dataset), self.config.train_cameras_sampling_seed)
        return [self._preview.batch(step, size) for step in steps]

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

    def eval_held(self) -> Sequence[int]:
        """The held-out views whose images this rank holds, ascending. No property: see below."""
        return self.eval_share.own

    def eval_holder(self, index: int) -> int:
        """The rank that holds a held-out view's image."""
        return self.eval_share.holder(index)

    def eval_image(self, index: int) -> tuple[Cameras, dict[str, Any]]:
        """A held-out view that this rank holds, by its number, with its image; those behind it begin to be read."""
        return self.fixed_indices_eval_dataloader[self.eval_share.own.index(index)]

    @property
    def eval_dataloader(self) -> "_FirstCamera":
        """What `ns-render spiral` asks for a camera to begin with."""
        return _FirstCamera(self)

    # Cached, because nerfstudio's viewer reads every other property of every object on rank 0 alone, and making the
    # share takes all ranks.
    @cached_property
    def fixed_indices_eval_dataloader(self) -> Sequence[tuple[Cameras, dict[str, Any]]]:  # pyright: ignore
        """The held-out views that this rank holds: all of them in a world of one. Each is read when it is asked for."""
        return _OwnViews(self, self.eval_share)


class _FirstCamera:
    """As much of nerfstudio's evaluation dataloader as a spiral begins with."""

    def __init__(self, data: DistributedDataManager) -> None:
        self._data = data

    def get_camera(self, image_idx: int = 0) -> tuple[Cameras, dict[str, Any]]:
        """A held-out camera, or a training camera where none is held out; without its image."""
        dataset = self._data.eval_dataset if len(self._data.eval_dataset) else self._data.train_dataset
        return dataset.cameras[image_idx : image_idx + 1].to(self._data.device), {}


class _OwnViews(Sequence[tuple[Cameras, dict[str, Any]]]):
    """Held-out cameras with their images, on the device."""

    def __init__(self, data: DistributedDataManager, share: ImageShare) -> None:
        self._data, self._share = data, share

    def __len__(self) -> int:
        return len(self._share.own)

    def __getitem__(self, place: int) -> tuple[Cameras, dict[str, Any]]:  # pyright: ignore
        own = self._share.own
        self._share.expect(own[place : place + self._share.lookahead])
        device = torch.device(self._data.device)
        return self._data.eval_camera(own[place]), self._share.image(own[place], device)

    def __iter__(self) -> Iterator[tuple[Cameras, dict[str, Any]]]:
        return (self[place] for place in range(len(self)))


def _one_camera(cameras: Cameras, index: int) -> Cameras:
    camera = cameras[index : index + 1]
    camera.metadata = {**(camera.metadata or {}), "cam_idx": index}
    return camera
