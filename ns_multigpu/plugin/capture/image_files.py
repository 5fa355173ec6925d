"""Checks of image files by their headers, without decoding."""

import shlex
import unicodedata
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from nerfstudio.data.dataparsers.base_dataparser import DataparserOutputs
from nerfstudio.data.datasets.base_dataset import InputDataset
from numpy.typing import NDArray
from PIL import Image

from ns_multigpu.core.dist.collectives import all_gather_objects
from ns_multigpu.core.dist.world import World

_CHANNELS = {"RGB": 3, "L": 3, "RGBA": 4}
"""Channels of nerfstudio's array of an image, by PIL mode."""

FRAME_FILES = {"normal_file_path": "normals", "sky_mask_path": "sky_masks"}
"""Files of a frame of transforms.json that nerfstudio's dataparsers do not read, by key: the folder of those files in
COLMAP's layout, and their name in the metadata of a dataparser's outputs."""

_ASPECT = 0.02
"""Largest relative difference between the aspects of a map and of its photograph."""
_SKY = 128
"""Least value, of 255, of a mask's pixels that are sky."""
_EXIF_ORIENTATION = 0x0112
_TURNED, _LYING = range(2, 9), range(5, 9)
"""EXIF orientations other than upright, and those that exchange width and height."""

COPY_AGAIN = "copy it again, or leave its view out"
"""Remedy of a damaged photograph."""

_IN_SCANS = np.isin(np.arange(256), [0x00, *range(0xD0, 0xD8), 0xFF])
"""True for bytes that may follow 0xFF in coded pixels: stuffing, restarts and padding."""
_ZEROS = 32
"""Zero bytes in a row that are damage, unless they are the code of a plain area."""

_THREADS = 8
_TAIL = 64
_MOST_FOLDERS = 8
"""Number of sub-folders in which a missing file is searched."""


@dataclass(frozen=True)
class Header:
    """Properties of one image file.

    Attributes:
        channels: of the decoded image; 0 if it is unusable.
        problems: faults of the image or its mask, a line each.
        turned: True if EXIF data ask for a rotation or mirroring and the size does not show whether it has been
            applied.
    """

    channels: int
    problems: tuple[str, ...] = ()
    turned: bool = False


def add_frame_files(outputs: DataparserOutputs, frames: Mapping[Path, Mapping[str, Any]]) -> DataparserOutputs:
    """Add the lists of `FRAME_FILES` to the metadata of a dataparser's outputs, where all images have such a file.

    Args:
        outputs: of a split; changed in place.
        frames: of each image file, its further files by `FRAME_FILES`, complete paths.
    """
    for key, name in FRAME_FILES.items():
        files = [frames[Path(image)].get(key) for image in outputs.image_filenames]
        if files and all(files):
            outputs.metadata[name] = [Path(str(file)) for file in files]
    return outputs


def read_headers(dataset: InputDataset, sizes: Sequence[tuple[int, int]], world: World) -> list[Header]:
    """Read the headers of all images of a dataset, each rank a part of them. Every rank calls it.

    Args:
        dataset: nerfstudio's, or one that reads images as it does.
        sizes: (width, height) that the cameras give each image.
        world: the ranks.
    """
    outputs = dataset._dataparser_outputs  # pyright: ignore[reportPrivateUsage]
    masks = outputs.mask_filenames or []
    mine = range(world.rank, len(dataset), world.size)

    def look(index: int) -> Header:
        mask = Path(masks[index]) if index < len(masks) else None
        return read_header(Path(outputs.image_filenames[index]), mask, sizes[index], dataset.scale_factor)

    with ThreadPoolExecutor(_THREADS) as pool:
        found = dict(zip(mine, pool.map(look, mine), strict=True))
    merged: dict[int, Header] = {}
    for part in all_gather_objects(found, world):
        merged.update(part)
    return [merged[index] for index in range(len(dataset))]


def read_header(path: Path, mask: Path | None, size: tuple[int, int], scale: float = 1.0) -> Header:
    """Read the header of one image and, if it has one, of its mask.

    Args:
        path: the image.
        mask: its mask.
        size: (width, height) of its camera.
        scale: nerfstudio's scale factor of the image after reading.
    """
    problems: list[str] = []
    found, turned = _look(path, _mode_problem, problems), False
    if found is not None:
        own = _scaled(found.size, scale)
        turned = found.orientation in _TURNED and own == size
        if found.orientation in _LYING and own == size[::-1] != size:
            problems.append(
                f"{path}: it has {_x(own)} pixels and its camera {_x(size)}: by its EXIF data it is to be turned, and "
                "nerfstudio does not do that. Turn the files themselves (mogrify -auto-orient images/*)"
            )
            turned = False
        elif own != size:
            problems.append(
                f"{path}: it has {_x(own)} pixels and its camera {_x(size)}; give the images the cameras' size, or "
                "choose the matching downscale factor"
            )
    if mask is not None:
        other = _look(mask, _mask_problem, problems)
        if other is not None and _scaled(other.size, scale) != size:
            problems.append(f"{mask}: the mask has {_x(_scaled(other.size, scale))} pixels and the camera {_x(size)}")
    return Header(0 if problems or found is None else _CHANNELS[found.mode], tuple(problems), turned)


def header_size(path: Path) -> tuple[int, int] | None:
    """Return width and height of a picture; None if it is unreadable."""
    found = _look(path, lambda mode: None, [])
    return None if found is None else found.size


def aspect_problem(path: Path, own: tuple[int, int], size: tuple[int, int]) -> str | None:
    """Return the problem of a map of `own` size for a photograph of `size`; None if their aspects agree."""
    width, height = own
    if abs(width * size[1] / (height * size[0]) - 1) <= _ASPECT + 1 / min(own):
        return None
    return (
        f"{path}: it has {_x(own)} pixels and its photograph {_x(size)}: give a map of the whole photograph, of any "
        "size but the same aspect"
    )


def checked_sky(path: Path, size: tuple[int, int]) -> NDArray[np.bool_] | str:
    """Return a mask of the sky of a photograph of this size, see `read_sky`; or its problem."""
    problems: list[str] = []
    found = _look(path, _mask_problem, problems)
    if found is None:
        return problems[0]
    sky = read_sky(path)
    if sky.all():
        return (
            f"{path}: all of it is sky, so that its photograph trains nothing. White is sky: invert the mask, or "
            "leave its view out"
        )
    return aspect_problem(path, found.size, size) or sky


def read_sky(path: Path, size: tuple[int, int] | None = None) -> NDArray[np.bool_]:
    """Read a mask [h, w] of the sky, which is half of white or more there, at its own width and height or others."""
    with Image.open(path) as image:
        return np.asarray(image.convert("L").resize(size or image.size, Image.Resampling.NEAREST)) >= _SKY


def is_all_black(mask: Path) -> bool:
    """Return True if a readable mask, or the alpha channel of a picture that has one, has no pixel above zero."""
    with Image.open(mask) as image:
        return (image.getchannel("A") if image.mode == "RGBA" else image.convert("L")).getextrema() == (0, 0)


def missing_file(path: Path) -> str:
    """Return the message about a file that does not exist; it names a file that was probably meant."""
    line = f"{path}: there is no such file"
    if path.is_symlink():
        return f"{path}: it is a link to {path.readlink()}, and there is no such file"
    if "\\" in path.name:
        return f"{line}. The name has backslashes, as Windows writes paths: replace them by slashes"
    try:
        folder = path.parent.stat()
    except OSError:
        return f"{path.parent}: there is no such folder"
    like = _names_by_stem(path.parent, folder.st_mtime_ns).get(_plain(path.stem), [])
    if not like:
        below = next(
            (found for found in _folders(path.parent, folder.st_mtime_ns) if (found / path.name).exists()), None
        )
        return f"{line}, but {below.name}/{path.name} is there" if below else line
    same = " in another Unicode form (macOS)" if _nfc(path.name) == _nfc(like[0]) else ""
    return f"{line}, but {like[0]}{same} is there: give both the same name"


@lru_cache(maxsize=8)
def _folders(folder: Path, _changed: int) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.is_dir())[:_MOST_FOLDERS]


@lru_cache(maxsize=8)
def _names_by_stem(folder: Path, _changed: int) -> dict[str, list[str]]:
    """Return the file names of a folder by all that stands before each of their dots."""
    found: defaultdict[str, list[str]] = defaultdict(list)
    for path in sorted(folder.iterdir()):
        parts = _plain(path.name).split(".")
        for end in range(1, len(parts)):
            found[".".join(parts[:end])].append(path.name)
    return found


def _nfc(name: str) -> str:
    return unicodedata.normalize("NFC", name)


def _plain(name: str) -> str:
    return _nfc(name).casefold()


def _is_heic(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(12)[4:] in (b"ftypheic", b"ftypheix", b"ftyphevc", b"ftypmif1", b"ftypmsf1")


def file_problem(path: Path) -> str | None:
    """Return the reason why a file is unreadable as a picture; None if it is readable."""
    problems: list[str] = []
    _look(path, lambda mode: None, problems)
    return problems[0] if problems else None


@dataclass(frozen=True)
class _Picture:
    mode: str
    size: tuple[int, int]
    orientation: int


def _look(path: Path, mode_problem: Callable[[str], str | None], problems: list[str]) -> _Picture | None:
    """Read a file's header; return None, with a line in `problems`, if it is unusable."""
    try:
        with Image.open(path) as image:
            mode, size, orientation = image.mode, image.size, _orientation(image)
            trouble = mode_problem(mode)
            if trouble is not None:
                problems.append(f"{path}: {trouble} {shlex.quote(str(path))}")
                return None
            if not _ends_well(path, image.format or ""):
                image.load()
    except FileNotFoundError:
        problems.append(missing_file(path))
        return None
    except IsADirectoryError:
        problems.append(f"{path}: it is a folder, and a picture is needed")
        return None
    except Image.DecompressionBombError:
        problems.append(f"{path}: it has more pixels than PIL reads ({2 * (Image.MAX_IMAGE_PIXELS or 0):,}): reduce it")
        return None
    except Exception as error:  # PIL's plugins raise any exception type for damaged files
        problems.append(
            f"{path}: HEIC pictures cannot be read: convert them to JPEG or PNG"
            if _is_heic(path)
            else f"{path}: it is truncated or unreadable ({error if path.stat().st_size else 'it is empty'}); "
            + COPY_AGAIN
        )
        return None
    return _Picture(mode, size, orientation)


def _orientation(image: Image.Image) -> int:
    """Return EXIF's orientation; 1 for upright."""
    try:
        return int(image.getexif().get(_EXIF_ORIENTATION, 1))
    except Exception:  # EXIF data may be malformed
        return 1


def _ends_well(path: Path, kind: str) -> bool:
    """Return True if a file ends with its format's end marker; then it is taken as complete without decoding.

    If not (some cameras append data behind the picture), the file must be decoded.
    """
    mark = {"JPEG": b"\xff\xd9", "PNG": b"IEND\xaeB`\x82"}.get(kind)
    if mark is None:
        return False
    with path.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - _TAIL))
        return file.read().rstrip(b"\0").endswith(mark)


def is_damaged_jpeg(data: NDArray[np.uint8]) -> bool:
    """Return True if the coded pixels of a JPEG file have bytes that no encoder writes (ITU-T T.81, B.1 and F.1.2).

    libjpeg decodes them to other pixels. Found are blocks of zeros, and nearly all blocks of 4 KiB of random bytes;
    not lost bytes, nor other coded pixels. Files of several scans, which have tables in between, are not looked at.

    Args:
        data: [bytes] of a file that libjpeg has decoded.
    """
    at, symbols = 2, list[int]()
    while data[at + 1] != 0xDA:  # the first scan
        if data[at] != 0xFF:  # padding
            return False
        if data[at + 1] == 0xFF:  # filling before a marker
            at += 1
            continue
        end = at + 2 + int(data[at + 2]) * 256 + int(data[at + 3])
        table = at + 4 if data[at + 1] == 0xC4 else end
        while table < end:  # of Huffman codes: its class, the number of codes by length, their symbols by code
            symbols += [int(data[table + 17])] if data[table] >= 16 else []
            table += 17 + int(data[table + 1 : table + 17].sum())
        at = end
    body = data[at + 2 :]
    marks = np.flatnonzero(body[:-1] == 0xFF)
    kinds = body[marks + 1]
    if 0xD9 not in kinds or 0xDA in kinds:
        return False
    end = int(np.argmax(kinds == 0xD9))  # of the picture: a camera may write others behind it
    kinds, body = kinds[:end], body[: marks[end]]
    # Plain areas are zeros where that is the code of symbol 0, which ends a block.
    can_be_zeros = not any(symbols)
    blocks = body[: len(body) // _ZEROS * _ZEROS].reshape(-1, _ZEROS)
    return not (_IN_SCANS[kinds].all() and (can_be_zeros or blocks.any(axis=1).all()))


def _mode_problem(mode: str) -> str | None:
    """Return why pixels are no colours, with the command that mends it, without its last word, the file."""
    if mode in _CHANNELS:
        return None
    return (
        f"its pixels are of kind {mode}, which nerfstudio does not read as colours; convert it to RGB: mogrify -type "
        "TrueColor -define png:color-type=2"
    )


def _mask_problem(mode: str) -> str | None:
    if len(Image.new(mode, (1, 1)).getbands()) == 1:
        return None
    return f"a mask must have one channel and this is {mode}; convert it: mogrify -alpha off -colorspace Gray"


def _scaled(size: tuple[int, int], scale: float) -> tuple[int, int]:
    return (int(size[0] * scale), int(size[1] * scale)) if scale != 1.0 else size


def _x(size: tuple[int, int]) -> str:
    return f"{size[0]}x{size[1]}"
