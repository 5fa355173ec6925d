"""Fast check of COLMAP's files: read the list of views and detect damaged files.

Keypoints and tracks, most of the bytes, are skipped, so thousands of views take a second. The format:
https://colmap.github.io/format.html.
"""

import math
import mmap
import struct
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

_PARAMETERS = {0: 3, 1: 4, 2: 4, 3: 5, 4: 8, 5: 8, 6: 12, 7: 5, 8: 4, 9: 5, 10: 12}
"""Number of camera parameters, by model number."""
_NAMES = (
    "SIMPLE_PINHOLE", "PINHOLE", "SIMPLE_RADIAL", "RADIAL", "OPENCV", "OPENCV_FISHEYE", "FULL_OPENCV", "FOV",
    "SIMPLE_RADIAL_FISHEYE", "RADIAL_FISHEYE", "THIN_PRISM_FISHEYE",
)  # fmt: skip
READABLE = _NAMES[:6]
"""Camera models that nerfstudio's parser supports."""

_IMAGE, _POINT = struct.Struct("<i7di"), struct.Struct("<Q3d3BdQ")
_CAMERA, _COUNT = struct.Struct("<iiQQ"), struct.Struct("<Q")
_KEYPOINT, _TRACK = 24, 8


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
        points: number of seed points; None if there is no file of them.
        observations: total length of all tracks: the number of (point, view) observations.
        problems: a line each.
    """

    views: list[ColmapView] = field(default_factory=list[ColmapView])
    points: int | None = None
    observations: int = 0
    problems: list[str] = field(default_factory=list[str])


class Damaged(Exception):
    """A file that ends too early or holds invalid values."""


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
    cameras: dict[int, tuple[str, int, int]] = {}
    with _reported(found, folder / f"cameras.{kind}") as path:
        cameras = _cameras_text(path) if text else _cameras_binary(path)
        for number, (model, width, height) in cameras.items():
            if model not in READABLE:
                found.problems.append(
                    f"{path}: camera {number} is of the model {model}; {', '.join(READABLE)} can be read"
                )
            if min(width, height) < 1:
                found.problems.append(f"{path}: camera {number} is {width}x{height} pixels")
        if not cameras:
            raise Damaged("it lists no cameras")
    with _reported(found, folder / f"images.{kind}") as path:
        images = _images_text(path) if text else _images_binary(path)
        if not images:
            raise Damaged("it lists no images")
        for _, (name, camera, finite) in sorted(images.items()):
            if not finite:
                found.problems.append(f"{name}: its pose is NaN or infinite")
            if camera in cameras:
                found.views.append(ColmapView(name, *cameras[camera][1:]))
            elif cameras:
                found.problems.append(f"{name}: its camera {camera} is not in cameras.{kind}")
    points = next((path for path in (folder / "points3D.bin", folder / "points3D.txt") if path.exists()), None)
    if points is not None:
        with _reported(found, points) as path:
            found.points, found.observations = (_points_binary if path.suffix == ".bin" else _points_text)(path)
    return found


def point_count(folder: Path) -> int | None:
    """Return the number of seed points of a reconstruction; None without a file of them or if it is unreadable."""
    try:
        if (path := folder / "points3D.bin").exists():
            with path.open("rb") as file:
                return int(_COUNT.unpack(file.read(_COUNT.size))[0])
        return sum(1 for words in _lines(folder / "points3D.txt") if words)
    except (OSError, struct.error, UnicodeDecodeError):
        return None


@contextmanager
def _reported(found: Reconstruction, path: Path) -> Iterator[Path]:
    """Convert errors of reading a file into a line in `found.problems`."""
    try:
        yield path
    except FileNotFoundError:
        found.problems.append(f"{path}: there is no such file")
    except OSError as error:
        found.problems.append(f"{path}: it cannot be read ({error.strerror or error})")
    except (Damaged, UnicodeDecodeError, ValueError, IndexError) as error:
        found.problems.append(f"{path}: {error}. Copy it again, or run COLMAP again")


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


def _cameras_binary(path: Path) -> dict[int, tuple[str, int, int]]:
    cameras: dict[int, tuple[str, int, int]] = {}
    with _bytes_of(path) as data:
        count, place = _COUNT.unpack_from(data)[0], _COUNT.size
        for number in range(count):
            if place + _CAMERA.size > len(data):
                raise _cut("camera", number, count)
            camera, model, width, height = _CAMERA.unpack_from(data, place)
            if model not in _PARAMETERS:
                raise Damaged(f"camera {camera} is of a model that is unknown, number {model}")
            place += _CAMERA.size + 8 * _PARAMETERS[model]
            if place > len(data):
                raise _cut("camera", number, count)
            cameras[camera] = (_NAMES[model], width, height)
    return cameras


def _images_binary(path: Path) -> dict[int, tuple[str, int, bool]]:
    images: dict[int, tuple[str, int, bool]] = {}
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
            images[image] = (name, camera, all(map(math.isfinite, pose)))
    return images


def _points_binary(path: Path) -> tuple[int, int]:
    """Return the number of points and the total length of all tracks."""
    with _bytes_of(path) as data:
        starts = point_starts(data)
    count = len(starts) - 1
    return count, (starts[-1] - _COUNT.size - count * _POINT.size) // _TRACK


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


def _lines(path: Path) -> Iterator[list[str]]:
    """Yield the words of each line that is no comment, empty lines included."""
    with path.open(encoding="utf8") as file:
        for line in file:
            if not line.lstrip().startswith("#"):
                yield line.split()


def _cameras_text(path: Path) -> dict[int, tuple[str, int, int]]:
    cameras: dict[int, tuple[str, int, int]] = {}
    for words in _lines(path):
        if not words:
            continue
        if len(words) < 5 or words[1] not in _NAMES:
            raise Damaged(f"this line is no camera: {' '.join(words)[:60]!r}")
        if len(words) - 4 < _PARAMETERS[_NAMES.index(words[1])]:
            raise Damaged(f"it is truncated: camera {words[0]} lacks parameters")
        cameras[int(words[0])] = (words[1], int(words[2]), int(words[3]))
    return cameras


def _images_text(path: Path) -> dict[int, tuple[str, int, bool]]:
    images: dict[int, tuple[str, int, bool]] = {}
    lines = _lines(path)
    for words in lines:
        if not words:
            continue
        if len(words) < 10:
            raise Damaged(f"this line is no image: {' '.join(words)[:60]!r}")
        keypoints = next(lines, None)
        if keypoints is None or len(keypoints) % 3:
            raise Damaged(f"it is truncated: image {words[9]} lacks its keypoints")
        finite = all(math.isfinite(float(word)) for word in words[1:8])
        images[int(words[0])] = (words[9], int(words[8]), finite)
    return images


def _points_text(path: Path) -> tuple[int, int]:
    """Return the same as `_points_binary` for points3D.txt."""
    count = observations = 0
    for words in _lines(path):
        if not words:
            continue
        if len(words) < 8 or len(words) % 2:
            raise Damaged(f"it is truncated: this line is no point: {' '.join(words)[:60]!r}")
        count, observations = count + 1, observations + (len(words) - 8) // 2
    return count, observations
