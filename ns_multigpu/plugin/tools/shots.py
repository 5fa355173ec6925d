"""Cameras to render: a camera path, or views interpolated between, circling around, or taken from the capture."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import torch
from nerfstudio.cameras.camera_paths import get_interpolated_camera_path, get_path_from_json, get_spiral_path
from nerfstudio.cameras.cameras import Cameras, CameraType
from nerfstudio.data.scene_box import OrientedBox

from ns_multigpu.plugin.faults.errors import InputError
from ns_multigpu.plugin.render.camera_path import CAMERA_TYPES, check_camera_path, read_camera_path

Mode = Literal["camera-path", "interpolate", "spiral", "dataset"]
Split = Literal["train", "val", "test", "train+test"]


@dataclass(frozen=True)
class Shot:
    """One frame.

    Attributes:
        camera: one camera, on the host.
        name: of the image file, without suffix.
        image: reads the camera's photograph, or the one shown next to the frame, if any, [h, w, 3|4] in [0, 1].
    """

    camera: Cameras
    name: str
    image: Callable[[], Any] | None = None


@dataclass(frozen=True)
class Shots:
    """All frames of a render.

    Attributes:
        frames: in order.
        seconds: duration of the film; None for images.
        crop: render only points in this box.
        background: the colour behind cropped points, [3].
    """

    frames: list[Shot]
    seconds: float | None
    crop: OrientedBox | None = None
    background: torch.Tensor | None = None


@dataclass(frozen=True)
class CameraPath:
    """Camera path from a file of the viewer.

    Attributes:
        path: the JSON file.
    """

    path: Path
    test_mode: Literal["test", "inference"] = field(default="inference", init=False)

    def check(self) -> tuple[int, int]:
        """Check the path; return its width and height.

        Raises:
            InputError: the path does not exist, or cannot be rendered.
        """
        return check_camera_path(self.path, read_camera_path(self.path), CAMERA_TYPES)

    def shots(self, pipeline: Any) -> Shots:
        """Return the path's frames."""
        from nerfstudio.scripts.render import get_crop_from_json  # slow to import

        path_json = read_camera_path(self.path)
        cameras, crop = get_path_from_json(path_json), get_crop_from_json(path_json)
        frames = _numbered(cameras)
        if crop is None:
            return Shots(frames, float(path_json["seconds"]))
        return Shots(frames, float(path_json["seconds"]), crop.obb, crop.background_color)


@dataclass(frozen=True)
class Interpolated:
    """Cameras interpolated between the capture's views, as by ns-render interpolate.

    Attributes:
        source: split of the views.
        steps: frames from one view to the next.
        ordered: sort the views by proximity.
        rate: frames per second.
    """

    source: Literal["eval", "train"] = "eval"
    steps: int = 10
    ordered: bool = False
    rate: int = 24
    test_mode: Literal["test", "inference"] = field(default="test", init=False)

    def check(self) -> None:
        """Check the options, before a model is loaded.

        Raises:
            InputError: a number is below 1.
        """
        _at_least_one("--interpolation-steps", self.steps)
        _at_least_one("--frame-rate", self.rate)

    def shots(self, pipeline: Any) -> Shots:
        """Return the interpolated frames.

        Raises:
            InputError: the split has fewer than two views.
        """
        data = pipeline.datamanager
        cameras = (data.eval_dataset if self.source == "eval" else data.train_dataset).cameras
        if len(cameras) < 2:
            raise InputError(
                f"--pose-source {self.source}: the capture has {len(cameras)} such views, and two are needed to have "
                "something in between. Choose the other source."
            )
        path = get_interpolated_camera_path(cameras=cameras, steps=self.steps, order_poses=self.ordered)
        path.times = self._times(cameras, len(path))
        return Shots(_numbered(path), self.steps * len(cameras) / self.rate)

    def _times(self, cameras: Cameras, frames: int) -> torch.Tensor | None:
        """Return the frames' times, [frames, 1], interpolated between the views'. If views are sorted by proximity,
        times increase evenly from the first to the last. None if views have no times.
        """
        if cameras.times is None:
            return None
        times = cameras.times.reshape(-1).cpu()
        if self.ordered:
            return torch.linspace(float(times.min()), float(times.max()), frames)[:, None]
        times_of = [torch.linspace(float(a), float(b), self.steps) for a, b in pairwise(times)]
        return torch.cat(times_of)[:, None]


@dataclass(frozen=True)
class Spiral:
    """Spiral that begins at the first held-out view, as by ns-render spiral.

    Attributes:
        seconds: duration.
        rate: frames per second.
        radius: of the spiral.
    """

    seconds: float = 3.0
    rate: int = 24
    radius: float = 0.1
    test_mode: Literal["test", "inference"] = field(default="test", init=False)

    def check(self) -> None:
        """Check the options, before a model is loaded.

        Raises:
            InputError: a number is not positive, or the spiral would have no frame.
        """
        _at_least_one("--frame-rate", self.rate)
        if not self.seconds * self.rate >= 1 or not math.isfinite(self.seconds):
            raise InputError(f"--seconds {self.seconds}: at {self.rate} frames a second that is no frame.")
        if not self.radius > 0:
            raise InputError(f"--radius {self.radius}: give more than 0.")

    def shots(self, pipeline: Any) -> Shots:
        """Return the spiral's frames."""
        camera = pipeline.datamanager.eval_camera(0)
        path = get_spiral_path(camera, steps=int(self.rate * self.seconds), radius=self.radius)
        return Shots(_numbered(path), self.seconds)


@dataclass(frozen=True)
class Dataset:
    """Views of the capture, as rendered by ns-render dataset.

    Attributes:
        split: of the views.
    """

    split: Split = "test"
    test_mode: Literal["test", "inference"] = field(default="inference", init=False)

    def check(self) -> None:
        """Do nothing: every split is valid."""

    def shots(self, pipeline: Any) -> Shots:
        """Return the split's views; their names are the images' paths, below the split's name.

        Raises:
            InputError: the split has no views.
        """
        data = pipeline.datamanager
        frames: list[Shot] = []
        for split in self.split.split("+"):
            outputs = data.dataparser.get_dataparser_outputs(split=split)
            dataset = data.dataset_type(outputs, scale_factor=data.config.camera_res_scale_factor)
            names = [Path(name) for name in outputs.image_filenames]
            root = _common(names)
            for index, name in enumerate(names):
                camera = dataset.cameras[index : index + 1]
                inside = name.relative_to(root).with_suffix("")
                frames.append(Shot(camera, f"{split}/{{}}/{inside}", lambda d=dataset, i=index: d[i]["image"]))
        if not frames:
            raise InputError(f"--split {self.split}: the capture has no such views.")
        return Shots(frames, None)


def _common(names: list[Path]) -> Path:
    """Return the deepest folder that contains all images."""
    parents = [set(name.parents) for name in names]
    shared = set.intersection(*parents) if parents else {Path()}
    return max(shared, key=lambda path: len(path.parts))


def _numbered(cameras: Cameras) -> list[Shot]:
    return [Shot(cameras[index : index + 1], f"{index:05d}") for index in range(len(cameras))]


def _at_least_one(flag: str, value: int) -> None:
    if value < 1:
        raise InputError(f"{flag} {value}: give at least 1.")


def is_panorama(camera: Cameras) -> bool:
    """Return True if a camera is equirectangular."""
    kind = camera.camera_type
    return kind is not None and int(kind.reshape(-1)[0]) == CameraType.EQUIRECTANGULAR.value
