"""Cameras to render: a camera path, or views interpolated between, circling around, or taken from the capture."""

import json
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

Mode = Literal["camera-path", "interpolate", "spiral", "dataset"]
Split = Literal["train", "val", "test", "train+test"]
_CAMERA_TYPES = ("perspective", "equirectangular")


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
        path_json = self._path_json()
        sizes: list[int] = []
        for name in ("render_width", "render_height"):
            value = path_json.get(name)
            if not isinstance(value, (int, float)) or not math.isfinite(value) or value < 1 or value != int(value):
                raise InputError(f"{self._name}: {name} is {value!r}. Give a whole number of pixels, at least 1.")
            sizes.append(int(value))
        kind = path_json.get("camera_type", "perspective")
        if kind not in _CAMERA_TYPES:
            raise InputError(
                f"{self._name}: camera_type is {kind!r}. Models are rendered as {' and '.join(_CAMERA_TYPES)}. "
                "Choose one of these types in the viewer's render panel."
            )
        seconds = path_json.get("seconds")
        if not isinstance(seconds, (int, float)) or not math.isfinite(seconds) or seconds <= 0:
            raise InputError(f"{self._name}: seconds is {seconds!r}. Give how long the video is to be, more than 0.")
        views = path_json.get("camera_path")
        if not isinstance(views, list) or not views:
            raise InputError(f"{self._name}: camera_path has no cameras. Save one with keyframes from the viewer.")
        for number, view in enumerate(views):
            self._check_view(number, view, kind)
        try:
            self.shots(None)
        except (ValueError, KeyError, TypeError, RuntimeError, AssertionError) as error:
            raise InputError(f"{self._name}: this is no camera path ({error!r}).") from error
        return sizes[0], sizes[1]

    def _check_view(self, number: int, view: Any, kind: str) -> None:
        pose = view.get("camera_to_world") if isinstance(view, dict) else None
        if not isinstance(pose, list) or len(pose) != 16:
            raise InputError(f"{self._name}: camera {number} has no camera_to_world of 16 numbers.")
        if any(not isinstance(value, (int, float)) or not math.isfinite(value) for value in pose):
            raise InputError(
                f"{self._name}: camera {number} has a camera_to_world with a value that is not a finite number "
                f"({pose}). Take this keyframe out, or set it again in the viewer."
            )
        fov = view.get("fov")
        if kind == "perspective" and not (isinstance(fov, (int, float)) and 0 < fov < 180):
            raise InputError(f"{self._name}: camera {number} has a fov of {fov!r}. Give degrees between 0 and 180.")
        time = view.get("render_time", 0.0)
        if not isinstance(time, (int, float)) or not math.isfinite(time):
            raise InputError(
                f"{self._name}: camera {number} has a render_time of {time!r}. Give a number, 0 for the capture's "
                "first moment and 1 for its last."
            )

    @property
    def _name(self) -> str:
        return f"--camera-path-filename {self.path}"

    def _path_json(self) -> dict[str, Any]:
        if not self.path.is_file():
            raise InputError(f"{self._name}: there is no such file. Save one from the viewer.")
        try:
            path_json = json.loads(self.path.read_text("utf8"))
        except (ValueError, OSError) as error:
            raise InputError(f"{self._name}: this is no camera path ({error}).") from error
        if not isinstance(path_json, dict) or "camera_path" not in path_json:
            raise InputError(f"{self._name}: this is no camera path (it has no camera_path). Save one from the viewer.")
        return path_json

    def shots(self, pipeline: Any) -> Shots:
        """Return the path's frames."""
        from nerfstudio.scripts.render import get_crop_from_json  # slow to import

        path_json = self._path_json()
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
