"""Nerfstudio's full-image datamanager for several ranks: one sequence of views, images distributed over the ranks."""

import itertools
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from nerfstudio.cameras.cameras import Cameras, CameraType
from nerfstudio.data.datamanagers.base_datamanager import VanillaDataManager
from nerfstudio.data.datamanagers.full_images_datamanager import FullImageDatamanager, FullImageDatamanagerConfig
from nerfstudio.data.datasets.base_dataset import InputDataset
from nerfstudio.utils.rich_utils import CONSOLE
from numpy.typing import NDArray

from ns_multigpu.core.assign.view_sequence import ViewSequence
from ns_multigpu.core.dist.collectives import all_gather_ints, all_gather_objects
from ns_multigpu.core.random import keyed_generator, keyed_permutation
from ns_multigpu.plugin.capture.checks import raise_together
from ns_multigpu.plugin.capture.coordinate_offset import OffsetOption
from ns_multigpu.plugin.capture.image_files import FRAME_FILES, Header, checked_sky
from ns_multigpu.plugin.capture.image_reading import FileDataset, ImageReader, through_lenses
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
from ns_multigpu.plugin.capture.seed_points import some_seeds
from ns_multigpu.plugin.faults.host_memory import available_memory
from ns_multigpu.plugin.launch import checks
from ns_multigpu.plugin.launch.process_world import get_world
from ns_multigpu.plugin.launch.run_parts import run_parts

_FREE_FOR_IMAGES = 0.5
"""Default fraction of a machine's free memory that its ranks may fill with images."""
_REMEDY = (
    "Give --pipeline.datamanager.image-memory-gb less for each rank, or leave it out for half of what is free. Images "
    "beyond the limit are decoded again before each use. Without enough memory:"
)
"""For a machine that lacks the memory that the option asks for."""
_SEEDS, _LEAST_SEEN, _MOST_IN_SKY = 5_000, 100, 0.75
"""Number of seed points that masks of the sky are compared with, the least number of their places in views, and the
part of these in the sky above which masks are refused."""


@dataclass
class DistributedDataManagerConfig(FullImageDatamanagerConfig, OffsetOption):
    """Options of the distributed datamanager, under nerfstudio's names."""

    _target: type = field(default_factory=lambda: DistributedDataManager)
    cache_images: Literal["cpu", "gpu"] = "cpu"
    """Memory that holds a rank's images: "cpu" (page-locked if there is a GPU) or "gpu"."""
    cache_images_type: Literal["uint8", "float32"] = "uint8"
    """Data type of images in memory and between ranks; float32 takes four times the memory of uint8."""
    undistort: bool = True
    """True takes lens distortion out of photographs before training. False trains on them as they are, through their
    lenses: borders are kept, and nothing is resampled. For panoramas it is the only way.
    """
    image_memory_gb: float | None = None
    """Memory limit of a rank's images, held-out ones included, in GB (10^9 bytes). Images beyond it are decoded again
    before each use. By default half of the machine's free memory, divided by its ranks.
    """


class DistributedDataManager(FullImageDatamanager[InputDataset]):
    """Datamanager that gives every rank the same list of views, and each image to the rank that renders it.

    Rank i % world size holds image i, unless `hold_by` sets the owners of training images. A dataparser's attribute
    `dataset_type` may name the dataset class, for example one that renders its images.

    Raises:
        InputError: on every rank, if the capture cannot be read on one of them.

    Attributes:
        sky: masks of the sky of the training images, a file for each; None unless `read_sky` was called.
    """

    config: DistributedDataManagerConfig

    def __init__(self, config: DistributedDataManagerConfig, device: torch.device | str = "cpu", **kwargs: Any) -> None:
        checks.check_image_memory(config.image_memory_gb)
        self.world = get_world(str(device))
        self._owners_of_views: list[int] | None = None
        self.sky: list[Path] | None = None
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
        """Return the next epoch's views; nerfstudio has drawn the first epoch's.

        Numpy's global generator is seeded by the epoch and restored, so the draw does not depend on when a rank
        prefetches.
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
        """Return the dataparser's own dataset class, else `FileDataset`."""
        return getattr(self.dataparser, "dataset_type", None) or FileDataset

    def check_capture(self) -> None:
        """Check all cameras and the headers of all image files, held-out ones included. Every rank calls it.

        Raises:
            InputError: on every rank, with all problems.
        """
        refuse_different([self.train_dataset, self.eval_dataset], self.world)
        lines = capture_problems([self.train_dataset, self.eval_dataset], undistort=self.config.undistort)
        headers = [*(self.train_headers or []), *(self.eval_headers or [])]
        raise_together(lines + [line for header in headers for line in header.problems], self.world, FAULTS)
        _ = self.train_shapes, self.eval_shapes
        run_parts().done("capture checked")

    def read_sky(self, option: str) -> None:
        """Read the capture's masks of the sky with the training images. Every rank calls it before `check_capture`;
        each checks a part of the masks.

        Args:
            option: that asks for them, in messages.

        Raises:
            InputError: on every rank, with all problems of the masks, or if most seed points are in the sky.
        """
        outputs, key = self.train_dataparser_outputs, "sky_mask_path"
        self.sky, cameras = outputs.metadata.get(FRAME_FILES[key]), outputs.cameras
        facts: list[tuple[float, int, int]] = []
        problems = [
            f"the capture has none: give {key} for each frame of transforms.json, or a folder {FRAME_FILES[key]} next "
            f"to COLMAP's images, or leave {option} out"
        ]
        if self.sky:
            seeds, mine = some_seeds(outputs, _SEEDS), range(self.world.rank, len(self.sky), self.world.size)
            with ThreadPoolExecutor(8) as pool:
                found = list(pool.map(partial(_seeds_in_sky, self.sky, cameras, seeds), mine))
            problems = [some for some in found if isinstance(some, str)]
            facts = [some for some in found if not isinstance(some, str)]
            if self.config.undistort and (cameras.camera_type == CameraType.FISHEYE624.value).any():
                problems.append("masks of photographs through a lens of the model FISHEYE624 cannot be undistorted")
        headline = f"{option}: {{count}} problem(s) with the capture's masks of the sky:"
        raise_together(problems, self.world, headline)
        facts = [some for part in all_gather_objects(facts, self.world) for some in part]
        share, seen, there = np.sum(facts, axis=0) / [len(facts), 1, 1]
        inverted = (
            f"{there / max(seen, 1):.0%} of the seed points in the views lie in the sky of their masks, and the scene "
            f"is no sky. White is sky: are they inverted? Invert them, or leave {option} out"
        )
        raise_together([inverted] if seen >= _LEAST_SEEN and there > _MOST_IN_SKY * seen else [], self.world, headline)
        CONSOLE.print(f"Loss of the sky: {len(facts)} masks, {share:.1%} of their pixels are sky.", soft_wrap=True)
        if share == 0:
            CONSOLE.print(
                f"[yellow]Warning: no mask has sky, which is 128 to 255 of 255, so that {option} does nothing.",
                soft_wrap=True,
            )
        run_parts().done("masks of the sky")

    @cached_property
    def train_headers(self) -> list[Header] | None:
        """Read the headers of all training files; the same on every rank. Every rank calls it, before a reader
        exists.
        """
        return file_headers(self.train_dataset, self.world)

    @cached_property
    def eval_headers(self) -> list[Header] | None:
        """Read the headers of all held-out files, as `train_headers`."""
        return file_headers(self.eval_dataset, self.world)

    @cached_property
    def train_reader(self) -> ImageReader:
        """Create the reader of training images; the cameras are those of its images afterwards. Every rank calls it."""
        _ = self.train_headers  # they are compared with the cameras of the files, which the reader replaces
        return self._reader(self.train_dataset, self.sky)

    @cached_property
    def eval_reader(self) -> ImageReader:
        """Create the reader of held-out images, as `train_reader`."""
        _ = self.eval_headers
        return self._reader(self.eval_dataset)

    @cached_property
    def train_shapes(self) -> list[ImageShape]:
        """Return the shapes of all training images, the same on every rank. Every rank calls it."""
        headers, kind = self.train_headers, self.config.cache_images_type
        return image_shapes(self.train_dataset, self.train_reader, headers, kind, self.world)

    @cached_property
    def eval_shapes(self) -> list[ImageShape]:
        """Return the shapes of all held-out images, as `train_shapes`."""
        headers, kind = self.eval_headers, self.config.cache_images_type
        return image_shapes(self.eval_dataset, self.eval_reader, headers, kind, self.world)

    def hold_by(self, owners: Sequence[int]) -> None:
        """Set the rank that holds each training image.

        `image_owners_of` computes them from each view's main machine, `train_shapes` and `train_memory`.
        Every rank calls it with the same owners, before `train_share` exists, which checks them.

        Raises:
            RuntimeError: `train_share` exists already.
        """
        if "train_share" in vars(self):
            raise RuntimeError(
                "hold_by: the training images are held already. Say who holds them before prepare_training, which "
                "reads them."
            )
        self._owners_of_views = list(owners)

    @cached_property
    def train_share(self) -> ImageShare:
        """Create this rank's store of training images. Every rank calls it."""
        return self._share(
            self.train_reader, self.train_shapes, "training", self.train_memory, self._owners_of_views, _REMEDY
        )

    @cached_property
    def eval_share(self) -> ImageShare:
        """Create this rank's store of held-out images. Every rank calls it."""
        return self._share(self.eval_reader, self.eval_shapes, "held-out", self.eval_memory)

    @cached_property
    def train_cameras_on_device(self) -> Cameras:
        """Return the training cameras on the device, for poses. Intrinsics are read on the host, without
        synchronization.
        """
        return self.train_dataset.cameras.to(self.device)

    @cached_property
    def image_memory(self) -> int | None:
        """Return the bytes a rank may fill with images, the same on every rank; None for no limit. Every rank calls
        it.
        """
        if self.config.image_memory_gb is not None:
            return int(self.config.image_memory_gb * 1e9)
        free = available_memory()
        mine = -1 if free is None else int(free * _FREE_FOR_IMAGES) // self.world.host_size
        least = min(row[0] for row in all_gather_ints([mine], self.world))
        return None if least < 0 else least

    @cached_property
    def train_memory(self) -> int | None:
        """Return the bytes a rank may fill with training images, the same on every rank; None for no limit. Every rank
        calls it. Held-out images use the same memory and are allocated first, at least two of them.
        """
        budget, held_out = self._split_memory, self.eval_memory
        return max(0, budget - held_out) if self._trains and budget is not None and held_out is not None else budget

    @cached_property
    def eval_memory(self) -> int | None:
        """Return the bytes a rank may fill with held-out images, as `train_memory`."""
        budget = self._split_memory
        if budget is None or not self._trains:
            return budget
        train, held_out = (sum(s.nbytes for s in part) for part in (self.train_shapes, self.eval_shapes))
        least = 2 * max((aligned(shape.nbytes) for shape in self.eval_shapes), default=0)
        return max(least, int(budget * (held_out / (train + held_out))))

    @cached_property
    def _split_memory(self) -> int | None:
        """Return the memory limit of both splits together."""
        return None if self.config.cache_images == "gpu" and self.config.image_memory_gb is None else self.image_memory

    def _reader(self, dataset: InputDataset, sky: Sequence[Path] | None = None) -> ImageReader:
        undistorts = self.config.undistort
        reader = ImageReader(dataset, self.config.cache_images_type, self.world, lens=not undistorts, sky=sky)
        dataset.cameras = reader.cameras if undistorts else through_lenses(reader.cameras)
        return reader

    def _share(
        self,
        reader: ImageReader,
        shapes: Sequence[ImageShape],
        label: str,
        budget: int | None,
        owners: Sequence[int] | None = None,
        remedy: str = "",
    ) -> ImageShare:
        on_gpu = self.config.cache_images == "gpu"
        return ImageShare(
            shapes,
            reader.read,
            self.world,
            owners=owners,
            label=label,
            budget=budget,
            place=self.device if on_gpu else "cpu",
            pinned=torch.device(self.device).type != "cpu" and torch.cuda.is_available() and not on_gpu,
            remedy=remedy,
        )

    # ---- training ----

    def train_batch(self, step: int, size: int) -> list[int]:
        """Return the step's views, the same on every rank, and start to decode those of the next steps."""
        batch = self.sequence.batch(step, size)
        # Within one epoch: a sequence only keeps the last two epochs that were requested.
        ahead = min(self.train_share.lookahead, self._epoch - size)
        if ahead > 0:
            last = (step + 1) * size
            self.train_share.expect(batch + [self.sequence.at(p) for p in range(last, last + ahead)])
        return batch

    def coming(self, steps: range, size: int) -> list[list[int]]:
        """Return the views of coming steps, to prefetch plans; [] if views are drawn by distance, epoch by epoch."""
        if self.config.train_cameras_sampling_strategy == "fps":
            return []
        if self._preview is None:
            self._preview = ViewSequence(len(self.train_dataset), self.config.train_cameras_sampling_seed)
        return [self._preview.batch(step, size) for step in steps]

    def train_camera(self, index: int) -> Cameras:
        """Return one training camera, [1], on the host, with its `cam_idx`."""
        return _one_camera(self.train_dataset.cameras, index)

    def train_camera_on_device(self, index: int) -> Cameras:
        """Return one training camera, [1], on the device, with its `cam_idx`."""
        return _one_camera(self.train_cameras_on_device, index)

    def next_train(self, step: int) -> tuple[Cameras, dict[str, Any]]:
        """Return one view of the sequence with its image, for callers without batches. Every rank calls it."""
        index = self.sequence.at(step)
        return self.train_camera_on_device(index), self.train_share.fetch(index, torch.device(self.device))

    def get_train_rays_per_batch(self) -> int:
        """Return the pixels of the first training image; nerfstudio's speed display multiplies them by steps per
        second.
        """
        camera = self.train_dataset.cameras[0]
        return int(camera.width.item()) * int(camera.height.item())

    # ---- evaluation ----

    def eval_camera(self, index: int) -> Cameras:
        """Return one held-out camera, [1], on the device."""
        return self.eval_dataset.cameras[index : index + 1].to(self.device)

    def next_eval_image(self, step: int) -> tuple[Cameras, dict[str, Any]]:
        """Return a held-out view drawn by the step, with its image; the same on every rank. Every rank calls it."""
        index = keyed_permutation(len(self.eval_dataset), self.config.train_cameras_sampling_seed, "eval", step)[0]
        data = self.eval_share.fetch(index, torch.device(self.device))
        return self.eval_camera(index), data

    def eval_held(self) -> Sequence[int]:
        """Return the held-out views whose images this rank holds, ascending. Not a property: see `eval_dataloader`."""
        return self.eval_share.own

    def eval_holder(self, index: int) -> int:
        """Return the rank that holds a held-out view's image."""
        return self.eval_share.holder(index)

    def eval_image(self, index: int) -> tuple[Cameras, dict[str, Any]]:
        """Return a held-out view of this rank by its number, with its image, and start to read the following ones."""
        return self.fixed_indices_eval_dataloader[self.eval_share.own.index(index)]

    @property
    def eval_dataloader(self) -> "_FirstCamera":
        """Return the source of the first camera of `ns-render spiral`."""
        return _FirstCamera(self)

    # Cached, because nerfstudio's viewer reads every other property of every object on rank 0 alone, and making the
    # share takes all ranks.
    @cached_property
    def fixed_indices_eval_dataloader(self) -> Sequence[tuple[Cameras, dict[str, Any]]]:  # pyright: ignore
        """Return the held-out views that this rank holds (all if the world has one rank). Each is read on demand."""
        return _OwnViews(self, self.eval_share)


def let_spirals_begin() -> None:
    """Let a running `ns-render spiral` accept our datamanager. It takes three of nerfstudio's, none of full images, and
    needs the first camera alone."""
    for name in ("nerfstudio.scripts.render", "__main__"):
        script: Any = sys.modules.get(name)
        if hasattr(script, "SpiralRender") and getattr(script, "VanillaDataManager", None) is VanillaDataManager:
            script.VanillaDataManager = (VanillaDataManager, DistributedDataManager)


class _FirstCamera:
    """Part of nerfstudio's evaluation dataloader that `ns-render spiral` uses."""

    def __init__(self, data: DistributedDataManager) -> None:
        self._data = data

    def get_camera(self, image_idx: int = 0) -> tuple[Cameras, dict[str, Any]]:
        """Return a held-out camera without its image; a training camera if none is held out."""
        dataset = self._data.eval_dataset if len(self._data.eval_dataset) else self._data.train_dataset
        return dataset.cameras[image_idx : image_idx + 1].to(self._data.device), {}


class _OwnViews(Sequence[tuple[Cameras, dict[str, Any]]]):
    """Sequence of held-out cameras with their images, on the device."""

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


def _seeds_in_sky(
    masks: Sequence[Path], cameras: Cameras, seeds: NDArray[np.float64], index: int
) -> tuple[float, int, int] | str:
    """Return the part of a view's mask that is sky, and the numbers of seed points in the view and in its sky; or the
    mask's problem. Lenses are taken for pinholes, which moves points little for such a count."""
    names = ("fx", "fy", "cx", "cy", "width", "height")
    fx, fy, cx, cy, width, height = (float(getattr(cameras, name)[index].item()) for name in names)
    sky = checked_sky(masks[index], (int(width), int(height)))
    if isinstance(sky, str):
        return sky
    pose = cameras.camera_to_worlds[index].double().cpu().numpy()
    seen = (seeds - pose[:, 3]) @ pose[:, :3]
    x, y, z = seen[seen[:, 2] < 0].T
    at = np.stack([(cy + fy * y / z) / height, (cx - fx * x / z) / width], axis=1)
    rows, columns = (at[((at >= 0) & (at < 1)).all(1)] * sky.shape).astype(np.int64).T
    return float(sky.mean()), len(rows), int(sky[rows, columns].sum())
