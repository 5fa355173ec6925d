"""Fast check of COLMAP's files: read the list of views and detect damaged files.

Keypoints and tracks, most of the bytes, are skipped, so thousands of views take a second. The format:
https://colmap.github.io/format.html.
"""

import math
import mmap
import struct
from array import array
from codecs import BOM_UTF8
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

_PARAMETERS = {0: 3, 1: 4, 2: 4, 3: 5, 4: 8, 5: 8, 6: 12, 7: 5, 8: 4, 9: 5, 10: 12}
"""Number of camera parameters, by model number."""
_NAMES = (
    "SIMPLE_PINHOLE", "PINHOLE", "SIMPLE_RADIAL", "RADIAL", "OPENCV", "OPENCV_FISHEYE", "FULL_OPENCV", "FOV",
    "SIMPLE_RADIAL_FISHEYE", "RADIAL_FISHEYE", "THIN_PRISM_FISHEYE",
)  # fmt: skip
_FISHEYE = ("OPENCV_FISHEYE", "SIMPLE_RADIAL_FISHEYE", "RADIAL_FISHEYE")
READABLE = (*_NAMES[:5], "FULL_OPENCV", *_FISHEYE)
"""Camera models that can be read."""
_UNDISTORT = (
    "Convert the capture: colmap image_undistorter --image_path images --input_path sparse/0 --output_path FOLDER"
)

_IMAGE, _POINT = struct.Struct("<i7di"), struct.Struct("<Q3d3BdQ")
_PLACE_AND_COLOR = np.dtype([("xyz", "<f8", 3), ("rgb", "u1", 3)])
"""Fields of `_POINT` after the id."""
_CAMERA, _COUNT = struct.Struct("<iiQQ"), struct.Struct("<Q")
_KEYPOINT, _TRACK = 24, 8
_ONE_FOCAL = ("SIMPLE_PINHOLE", "SIMPLE_RADIAL", "RADIAL", "SIMPLE_RADIAL_FISHEYE", "RADIAL_FISHEYE")
_ROUNDING = 1e-2
"""Tolerance of a quaternion's length; poses written with three digits stay well below."""
_AT_ONCE = 1 << 18
"""Points per batch of extraction, which indexes each of their bytes."""

_Camera = tuple[str, int, int, tuple[float, ...]]
"""Model, width, height and lens (fx, fy, cx, cy) of a camera."""
_T = TypeVar("_T")
_Picture = tuple[str, int, tuple[float, ...]]
"""Name, camera and pose of an image."""


@dataclass(frozen=True)
class ColmapView:
    """Image of the reconstruction: its name, and its camera's width and height in pixels."""

    name: str
    width: int
    height: int


@dataclass
class Reconstruction:
    """Contents of a folder with a COLMAP reconstruction.

    Attributes:
        views: by image id, as nerfstudio orders them.
        poses: of each view, world to camera: quaternion w, x, y, z and translation.
        lenses: fx, fy, cx, cy of each view, pixels.
        points: number of seed points; None if there is no file of them.
        xyz, rgb: [points, 3] positions and colours, 0 to 255, of the seed points.
        observations: total length of all tracks: the number of (point, view) observations.
        problems: a line each.
    """

    views: list[ColmapView] = field(default_factory=list[ColmapView])
    poses: list[tuple[float, ...]] = field(default_factory=list[tuple[float, ...]])
    lenses: list[tuple[float, ...]] = field(default_factory=list[tuple[float, ...]])
    points: int | None = None
    xyz: NDArray[np.float64] = field(default_factory=lambda: np.zeros((0, 3)))
    rgb: NDArray[np.integer[Any]] = field(default_factory=lambda: np.zeros((0, 3), np.uint8))
    observations: int = 0
    problems: list[str] = field(default_factory=list[str])


class Damaged(Exception):
    """A file that ends too early or holds invalid values."""


class _UnknownModel(Damaged):
    """A camera model of a newer COLMAP."""


def look_at(folder: Path) -> Reconstruction:
    """Read a reconstruction's views as nerfstudio does (cameras and images: .txt before .bin; points: .bin before
    .txt).

    Args:
        folder: holds `cameras`, `images` and `points3D`, each .bin or .txt.
    """
    found = Reconstruction()
    text = (folder / "cameras.txt").exists()
    if not text and not (folder / "cameras.bin").exists():
        found.problems.append(f"{folder}: there is no cameras.bin and no cameras.txt. Is it COLMAP's model?")
        return found
    kind = "txt" if text else "bin"
    for path in sorted(folder.glob("*.txt")):
        with path.open("rb") as file:
            if file.read(len(BOM_UTF8)) == BOM_UTF8:
                found.problems.append(
                    f"{path}: it begins with a byte order mark (Windows): save it as UTF-8 without one"
                )
    if found.problems:
        return found
    cameras: dict[int, _Camera] = {}
    with _reported(found, folder / f"cameras.{kind}") as path:
        cameras = _cameras_text(path) if text else _cameras_binary(path)
        for number, (model, width, height, lens) in cameras.items():
            if model not in READABLE:
                found.problems.append(
                    f"{path}: camera {number} is of the model {model}; {', '.join(READABLE)} can be read. {_UNDISTORT}"
                )
            if min(lens[:2]) <= 0:
                found.problems.append(f"{path}: camera {number} has a focal length of {min(lens[:2]):g} pixels")
            if min(width, height) < 1:
                found.problems.append(f"{path}: camera {number} is {width}x{height} pixels")
        if not cameras:
            raise Damaged("it lists no cameras")
    with _reported(found, folder / f"images.{kind}") as path:
        images = _images_text(path) if text else _images_binary(path)
        if not images:
            raise Damaged("it lists no images")
        if len({cameras[camera][0] in _FISHEYE for _, camera, _ in images.values() if camera in cameras}) > 1:
            found.problems.append(f"{path}: some images have fisheye cameras and some have not. {_UNDISTORT}")
        for _, (name, camera, pose) in sorted(images.items()):
            if not all(map(math.isfinite, pose)):
                found.problems.append(f"{name}: its pose is NaN or infinite")
            elif abs(math.hypot(*pose[:4]) - 1) > _ROUNDING:
                found.problems.append(
                    f"{name}: its rotation is a quaternion of length {math.hypot(*pose[:4]):.3g}, not 1"
                )
            if camera in cameras:
                _, width, height, lens = cameras[camera]
                found.views.append(ColmapView(name, width, height))
                found.poses.append(pose)
                found.lenses.append(lens)
            elif cameras:
                found.problems.append(f"{name}: its camera {camera} is not in cameras.{kind}")
    points = next((path for path in (folder / "points3D.bin", folder / "points3D.txt") if path.exists()), None)
    if points is not None:
        with _reported(found, points) as path:
            read = _points_binary if path.suffix == ".bin" else _points_text
            found.xyz, found.rgb, found.observations = read(path)
            found.points = len(found.xyz)
    return found


def names_in_text(file: Path) -> dict[int, str]:
    """Return the image names of an images.txt by image id. A name ends with its line and may hold spaces."""
    return {number: name for number, (name, *_) in _images_text(file).items()}


def point_count(folder: Path) -> int | None:
    """Return the number of seed points of a reconstruction; None without a file of them or if it is unreadable."""
    try:
        if (path := folder / "points3D.bin").exists():
            with path.open("rb") as file:
                return int(_COUNT.unpack(file.read(_COUNT.size))[0])
        return sum(1 for words in _lines(folder / "points3D.txt") if words)
    except (OSError, struct.error, UnicodeDecodeError):
        return None


def view_count(folder: Path) -> int:
    """Return the number of views of a reconstruction; 0 without one or if it is unreadable."""
    try:
        if (path := folder / "images.txt").exists():
            return len(_images_text(path))
        with (folder / "images.bin").open("rb") as file:
            return int(_COUNT.unpack(file.read(_COUNT.size))[0])
    except (OSError, ValueError, IndexError, struct.error, Damaged):
        return 0


@contextmanager
def _reported(found: Reconstruction, path: Path) -> Iterator[Path]:
    """Convert errors of reading a file into a line in `found.problems`."""
    try:
        yield path
    except FileNotFoundError:
        found.problems.append(f"{path}: there is no such file")
    except OSError as error:
        found.problems.append(f"{path}: it cannot be read ({error.strerror or error})")
    except UnicodeDecodeError as error:
        name = error.object[error.start :].split(b"\n")[0][:24]
        found.problems.append(
            f"{path}: its names are not in UTF-8 ({name!r}, in GBK {name.decode('gbk', 'replace')!r}): give the images "
            "names of ASCII letters and run COLMAP again"
        )
    except _UnknownModel as error:
        found.problems.append(f"{path}: {error}. {_UNDISTORT}")
    except (Damaged, ValueError, IndexError) as error:
        found.problems.append(f"{path}: {error}. Copy it again, or run COLMAP again")


def _put(found: dict[int, _T], number: int, value: _T, what: str) -> None:
    """Add a camera or an image by its id; readers would keep the last of two."""
    if number in found:
        raise Damaged(f"{what} {number} is listed twice")
    found[number] = value


def _lens(model: str, parameters: Sequence[float]) -> tuple[float, ...]:
    """Return fx, fy, cx, cy of a camera's parameters."""
    if not all(map(math.isfinite, parameters)):
        raise Damaged("a camera's parameter is NaN or infinite")
    return tuple(parameters[:1]) * 2 + tuple(parameters[1:3]) if model in _ONE_FOCAL else tuple(parameters[:4])


# ---- binary ----


@contextmanager
def _bytes_of(path: Path) -> Iterator[mmap.mmap]:
    with path.open("rb") as file:
        if file.seek(0, 2) < _COUNT.size:
            raise Damaged("it is empty" if file.tell() == 0 else "it is truncated: it has not even a count")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            yield data


def _cut(what: str, number: int, count: int) -> Damaged:
    return Damaged(f"it is truncated: it ends in {what} {number + 1} of {count}")


def _cameras_binary(path: Path) -> dict[int, _Camera]:
    cameras: dict[int, _Camera] = {}
    with _bytes_of(path) as data:
        count, place = _COUNT.unpack_from(data)[0], _COUNT.size
        for number in range(count):
            if place + _CAMERA.size > len(data):
                raise _cut("camera", number, count)
            camera, model, width, height = _CAMERA.unpack_from(data, place)
            if model not in _PARAMETERS:
                raise _UnknownModel(f"camera {camera} is of an unknown model, number {model}")
            first = place + _CAMERA.size
            place = first + 8 * _PARAMETERS[model]
            if place > len(data):
                raise _cut("camera", number, count)
            lens = _lens(_NAMES[model], struct.unpack_from(f"<{_PARAMETERS[model]}d", data, first))
            _put(cameras, camera, (_NAMES[model], width, height, lens), "camera")
    return cameras


def _images_binary(path: Path) -> dict[int, _Picture]:
    images: dict[int, _Picture] = {}
    with _bytes_of(path) as data:
        count, place = _COUNT.unpack_from(data)[0], _COUNT.size
        for number in range(count):
            end = data.find(b"\0", place + _IMAGE.size)
            if end < 0 or end + 1 + _COUNT.size > len(data):
                raise _cut("image", number, count)
            image, *pose, camera = _IMAGE.unpack_from(data, place)
            name = data[place + _IMAGE.size : end].decode()
            place = end + 1 + _COUNT.size + _KEYPOINT * _COUNT.unpack_from(data, end + 1)[0]
            if place > len(data):
                raise _cut("image", number, count)
            _put(images, image, (name, camera, tuple(pose)), "image")
    return images


def _points_binary(path: Path) -> tuple[NDArray[np.float64], NDArray[np.integer[Any]], int]:
    """Return the positions and colours of the points [n, 3] and the total length of all tracks."""
    with _bytes_of(path) as data:
        starts = point_starts(data)
        points = gather(data, np.array(starts)[:-1] + _COUNT.size, _PLACE_AND_COLOR)
    return (
        np.ascontiguousarray(points["xyz"]),
        points["rgb"],
        (starts[-1] - _COUNT.size - len(points) * _POINT.size) // _TRACK,
    )


def gather(data: bytes | mmap.mmap, starts: NDArray[np.int64], kind: np.dtype[Any]) -> NDArray[Any]:
    """Return the records [n] of a little-endian type that begin at the byte offsets `starts` [n]."""
    every, found, of_record = np.frombuffer(data, np.uint8), np.empty(len(starts), kind), np.arange(kind.itemsize)
    rows = found.view(np.uint8).reshape(len(starts), kind.itemsize)
    for first in range(0, len(starts), _AT_ONCE):
        rows[first : first + _AT_ONCE] = every[starts[first : first + _AT_ONCE, None] + of_record]
    return found


def point_starts(data: bytes | mmap.mmap) -> "array[int]":
    """Return the byte offset of each point of a points3D.bin, and the end of the last one. A track follows its point.

    Raises:
        Damaged: the file ends too early.
    """
    count, place = _COUNT.unpack_from(data)[0], _COUNT.size
    length, size, unpack = len(data), _POINT.size, _COUNT.unpack_from
    to_track, starts = size - _COUNT.size, array("q", [place])
    for number in range(count):
        if place + size > length:
            raise _cut("point", number, count)
        place += size + _TRACK * unpack(data, place + to_track)[0]
        starts.append(place)
    if place > length:
        raise _cut("point", count - 1, count)
    return starts


# ---- text ----


def _lines(path: Path, most: int = -1) -> Iterator[list[str]]:
    """Yield the words of each line that is no comment, empty lines included; after `most` words, the rest as one."""
    with path.open(encoding="utf8") as file:
        for line in file:
            if not line.lstrip().startswith("#"):
                yield line.strip().split(None, most)


def _cameras_text(path: Path) -> dict[int, _Camera]:
    cameras: dict[int, _Camera] = {}
    for words in _lines(path):
        if not words:
            continue
        if len(words) < 5 or words[1].isdigit():
            raise Damaged(f"this line is no camera: {' '.join(words)[:60]!r}")
        if words[1] not in _NAMES:
            raise _UnknownModel(f"camera {words[0]} is of an unknown model, {words[1]}")
        if not all(map(str.isdigit, (words[0], *words[2:4]))):
            raise Damaged(f"an id, width or height is no whole number: {' '.join(words)[:60]!r}")
        if len(words) - 4 < _PARAMETERS[_NAMES.index(words[1])]:
            raise Damaged(f"it is truncated: camera {words[0]} lacks parameters")
        camera = (words[1], int(words[2]), int(words[3]), _lens(words[1], [*map(float, words[4:])]))
        _put(cameras, int(words[0]), camera, "camera")
    return cameras


def _images_text(path: Path) -> dict[int, _Picture]:
    images: dict[int, _Picture] = {}
    lines = _lines(path, 9)
    for words in lines:
        if not words:
            continue
        if len(words) < 10:
            raise Damaged(f"this line is no image: {' '.join(words)[:60]!r}")
        keypoints = " ".join(next(lines, [])).split()  # editors remove the last line if it is empty
        if len(keypoints) % 3 or not all(word.removeprefix("-").isdigit() for word in keypoints[2:12:3]):
            raise Damaged(
                f"it is truncated, or an image has no line of keypoints, which may be empty: that of {words[9]} is "
                f"{' '.join(keypoints)[:60]!r}"
            )
        _put(images, int(words[0]), (words[9], int(words[8]), tuple(map(float, words[1:8]))), "image")
    return images


def _points_text(path: Path) -> tuple[NDArray[np.float64], NDArray[np.integer[Any]], int]:
    """Return the same as `_points_binary` for points3D.txt."""
    xyz, rgb, observations = array("d"), array("i"), 0
    for words in _lines(path):
        if not words:
            continue
        if len(words) < 8 or len(words) % 2:
            raise Damaged(f"it is truncated: this line is no point: {' '.join(words)[:60]!r}")
        xyz.extend(map(float, words[1:4]))
        rgb.extend(map(int, words[4:7]))
        observations += (len(words) - 8) // 2
    return np.array(xyz).reshape(-1, 3), np.array(rgb).reshape(-1, 3), observations
