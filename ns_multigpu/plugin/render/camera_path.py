"""Camera paths: the viewer's JSON files, checked for `ns-multigpu render` and for plain `ns-render camera-path`."""

import json
import math
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeGuard

from nerfstudio.cameras.camera_paths import get_path_from_json

from ns_multigpu.plugin.faults.errors import InputError
from ns_multigpu.plugin.launch.nerfstudio_commands import running_command

CAMERA_TYPES = ("perspective", "equirectangular")
"""Types of cameras that `ns-multigpu render` draws."""


def check_ns_render(*, gaussians: bool) -> None:
    """Check the camera path, if the command `ns-render camera-path` creates the pipeline.

    Args:
        gaussians: the model draws perspective cameras only; a radiance field draws all of nerfstudio's.

    Raises:
        SystemExit: the path cannot be rendered, with the reason.
    """
    command, _ = running_command("render.py") or (None, None)
    if command is None or type(command).__name__ != "RenderCameraPath":
        return
    path = Path(command.camera_path_filename)
    try:
        path_json = read_camera_path(path)
        check_camera_path(path, path_json, CAMERA_TYPES if gaussians else None)
    except InputError as error:
        raise SystemExit(f"ns-render: {error}") from error
    if gaussians and (kind := path_json.get("camera_type", "perspective")) != "perspective":
        words = ["--load-config", command.load_config, "--camera-path-filename", path]
        again = ["ns-multigpu", "render", *words, "--output-path", command.output_path]
        raise SystemExit(
            f"ns-render: {_name(path)}: camera_type is {kind!r}, and ns-render draws Gaussians as perspective only. "
            f"Give:\n  {shlex.join(map(str, again))}"
        )


def read_camera_path(path: Path) -> dict[str, Any]:
    """Return a path's content, of which only `camera_path` is known to exist.

    Raises:
        InputError: there is no such file, or it is no camera path.
    """
    if not path.is_file():
        raise InputError(f"{_name(path)}: there is no such file. Save one from the viewer.")
    try:
        path_json = json.loads(path.read_text("utf8"))
    except (ValueError, OSError) as error:
        raise InputError(f"{_name(path)}: this is no camera path ({error}).") from error
    if not isinstance(path_json, dict) or "camera_path" not in path_json:
        raise InputError(f"{_name(path)}: this is no camera path (it has no camera_path). Save one from the viewer.")
    return path_json


def check_camera_path(path: Path, path_json: dict[str, Any], types: Sequence[str] | None) -> tuple[int, int]:
    """Check a path's content, and make its crop's numbers floats; return its width and height.

    Args:
        types: types of cameras that can be drawn; None for all.

    Raises:
        InputError: it cannot be rendered.
    """
    sizes: list[int] = []
    for name in ("render_width", "render_height"):
        value = path_json.get(name)
        if not _is_finite(value) or value < 1 or value != int(value):
            raise InputError(f"{_name(path)}: {name} is {value!r}. Give a whole number of pixels, at least 1.")
        sizes.append(int(value))
    kind = path_json.get("camera_type", "perspective")
    if types is not None and kind not in types:
        raise InputError(
            f"{_name(path)}: camera_type is {kind!r}. Models are rendered as {' and '.join(types)}. "
            "Choose one of these types in the viewer's render panel."
        )
    seconds = path_json.get("seconds")
    if not _is_finite(seconds) or seconds <= 0:
        raise InputError(f"{_name(path)}: seconds is {seconds!r}. Give the video's length in seconds, above 0.")
    views = path_json.get("camera_path")
    if not isinstance(views, list) or not views:
        raise InputError(f"{_name(path)}: camera_path has no cameras. Save one with keyframes from the viewer.")
    for number, view in enumerate(views):
        _check_view(path, number, view, kind)
    try:
        get_path_from_json(path_json)
    except (ValueError, KeyError, TypeError, RuntimeError, AssertionError) as error:
        raise InputError(f"{_name(path)}: this is no camera path ({error!r}).") from error
    _check_crop(path, path_json.get("crop"))
    return sizes[0], sizes[1]


def _check_crop(path: Path, crop: Any) -> None:
    if crop is None:
        return
    if not isinstance(crop, dict):
        raise InputError(f"{_name(path)}: crop is {crop!r}. Give an object, or null for no crop.")
    for name in ("crop_center", "crop_scale", "crop_rot"):
        values = crop.get(name, [0, 0, 0] if name == "crop_rot" else None)
        if not isinstance(values, list) or len(values) != 3 or not all(map(_is_finite, values)):
            raise InputError(f"{_name(path)}: the crop's {name} is {values!r}. Give three numbers, such as [0, 0, 0].")
        crop[name] = [float(value) for value in values]  # nerfstudio fails on whole numbers
    colour = crop.get("crop_bg_color")
    if not isinstance(colour, dict) or not all(_is_finite(colour.get(name)) for name in "rgb"):
        raise InputError(
            f"{_name(path)}: the crop's crop_bg_color is {colour!r}. Give r, g and b from 0 to 255, such as "
            '{"r": 255, "g": 255, "b": 255}.'
        )


def _is_finite(value: Any) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and math.isfinite(value)


def _check_view(path: Path, number: int, view: Any, kind: str) -> None:
    pose = view.get("camera_to_world") if isinstance(view, dict) else None
    if not isinstance(pose, list) or len(pose) != 16:
        raise InputError(f"{_name(path)}: camera {number} has no camera_to_world of 16 numbers.")
    if not all(map(_is_finite, pose)):
        raise InputError(
            f"{_name(path)}: camera {number} has a camera_to_world with a value that is not a finite number "
            f"({pose}). Take this keyframe out, or set it again in the viewer."
        )
    fov = view.get("fov")
    if kind == "perspective" and not (isinstance(fov, (int, float)) and 0 < fov < 180):
        raise InputError(f"{_name(path)}: camera {number} has a fov of {fov!r}. Give degrees between 0 and 180.")
    time = view.get("render_time", 0.0)
    if not _is_finite(time):
        raise InputError(
            f"{_name(path)}: camera {number} has a render_time of {time!r}. Give a number, 0 for the capture's "
            "first moment and 1 for its last."
        )


def _name(path: Path) -> str:
    return f"--camera-path-filename {path}"
