"""Preliminary check of a capture, from file names, headers and COLMAP's files, before any worker starts.

Workers check everything again (see `checks` and `reading`). This check takes seconds and needs no GPU, so problems are
reported before processes start and before a run folder exists.
"""

import dataclasses
import json
import math
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from math import ceil, floor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from nerfstudio.data.dataparsers.colmap_dataparser import MAX_AUTO_RESOLUTION, ColmapDataParserConfig
from nerfstudio.data.dataparsers.nerfstudio_dataparser import Nerfstudio, NerfstudioDataParserConfig
from nerfstudio.data.utils.dataparsers_utils import get_train_eval_split_fraction, get_train_eval_split_interval
from numpy.typing import NDArray

from ns_multigpu.plugin.capture.checks import (
    camera_problems,
    list_problems,
    small_problems,
    transforms_notes,
    transforms_problems,
)
from ns_multigpu.plugin.capture.colmap import Damaged, Reconstruction, look_at, view_count
from ns_multigpu.plugin.capture.coordinate_offset import offset_for
from ns_multigpu.plugin.capture.image_files import Header, header_size, is_all_black, missing_file, read_header
from ns_multigpu.plugin.capture.ply import sample_ply
from ns_multigpu.plugin.capture.seed_points import (
    FLIP,
    CaptureViews,
    distinct_rows,
    invalid_points,
    rounded_points,
    unseen_note,
    unseen_problem,
)
from ns_multigpu.plugin.capture.split_lists import ListedNerfstudio, missing_list
from ns_multigpu.plugin.capture.tracks import OPTION, track_problems

_THREADS = 16
_PHOTOGRAPHS = (".jpg", ".jpeg", ".png", ".heic", ".tif", ".tiff", ".webp")
_VIDEOS, _ARCHIVES = (".mp4", ".mov", ".avi", ".mkv", ".insv", ".360"), (".zip", ".7z", ".rar", ".tar", ".gz", ".tgz")
_MASKS = 8
"""Number of masks, and of images with an alpha channel, that are decoded."""
_DISTINCT = 0.98
"""Share of seed points at different positions below which a note is printed; COLMAP's are seldom equal."""
_NONE_HELD_OUT = "No view is held out, so no score is measured"
_ONE_PLACE = 1e-5
"""Distance of the views, in distances of the seed points, below which they are from one place."""
_SEED_POINTS, _MANY = 10_000, 1_000_000
"""Number of seed points of a text file that suffices, and of points above which equal ones are not counted."""
_PATIENCE = 8.0
"""Time limit in seconds; the workers check the remaining headers."""


PLACES = (Path("colmap/sparse/0"), Path("sparse/0"))
"""Folders that are searched without `--colmap-path`: nerfstudio's default, and COLMAP's own."""


@dataclass
class Findings:
    """Result of the check.

    Attributes:
        problems: a line for each reason not to start.
        notes: a line for each hint.
        unseen: the reason why cameras and seed points do not fit together; "" if they do.
    """

    problems: list[str] = field(default_factory=list[str])
    notes: list[str] = field(default_factory=list[str])
    unseen: str = ""


@dataclass(frozen=True)
class _Image:
    path: Path
    mask: Path | None
    size: tuple[int, int]


def first_look(
    datamanager: Any, model: Any = None, *, tracks: bool = False, allow_unseen_points: bool = False
) -> Findings:
    """Check a capture in COLMAP's or nerfstudio's format; captures of other formats are not checked.

    Args:
        datamanager: the configuration of nerfstudio's full-image datamanager.
        model: the model's configuration; None to leave out what depends on it.
        tracks: True if observations are needed (see `tracks`).
        allow_unseen_points: note points that views do not see, instead of reporting a problem.
    """
    parser = datamanager.dataparser
    data = Path(datamanager.data or parser.data)
    found = Findings()
    if not isinstance(parser, (ColmapDataParserConfig, NerfstudioDataParserConfig)):
        found.problems += [f"{OPTION}: {line}" for line in track_problems(parser)] if tracks else []
        return found
    if not data.exists():
        found.problems.append(f"--data {data}: there is no such file or folder")
        return found
    if data.is_file() and (isinstance(parser, ColmapDataParserConfig) or data.suffix != ".json"):
        found.problems.append(f"--data {data}: it is a file, and a capture is a folder.{_other_format(data)}")
        return found
    parser = dataclasses.replace(parser, data=data)
    for name in ("scale_factor", "scene_scale"):
        if not 0 < (value := getattr(parser, name, 1.0)) < math.inf:
            found.problems.append(f"--{name.replace('_', '-')} {value}: give a number above 0")
    if isinstance(parser, ColmapDataParserConfig):
        images = _of_colmap(parser, found)
    else:
        images = _of_nerfstudio(parser, found, getattr(datamanager, "undistort", True))
    if found.unseen:
        (found.notes if allow_unseen_points else found.problems).append(
            found.unseen + ("" if allow_unseen_points else ". To train all the same: --allow-unseen-points True")
        )
    if not found.problems and tracks:
        found.problems += [f"{OPTION}: {line}" for line in track_problems(parser)]
    if not found.problems:
        found.problems += small_problems([image.size for image in images], [image.path for image in images], model)
        _look_at_images(images, found)
    return found


# ---- COLMAP's layout ----


def find_reconstruction(datamanager: Any) -> str:
    """Replace the dataparser's `colmap_path` by one of `PLACES` if it is no folder and that one is.

    Args:
        datamanager: the configuration of a datamanager; unchanged unless its dataparser is COLMAP's.

    Returns:
        a note if both folders exist; else "".
    """
    parser = datamanager.dataparser
    if not isinstance(parser, ColmapDataParserConfig):
        return ""
    data = Path(datamanager.data or parser.data)
    found = [place for place in PLACES if (data / place).is_dir()]
    if found and not (data / parser.colmap_path).is_dir():
        datamanager.dataparser = parser = dataclasses.replace(parser, colmap_path=found[0])
    others = [place for place in found if place != parser.colmap_path]
    if len(found) < len(PLACES):
        return ""
    used = parser.colmap_path
    return f"The capture has two reconstructions. {used} is used; for the other: --colmap-path {others[0]}"


def colmap_problems(parser: ColmapDataParserConfig) -> tuple[list[str], Reconstruction | None]:
    """Check the reconstruction that a dataparser will read; return the problems and the reconstruction."""
    folder = parser.data / parser.colmap_path
    if not folder.is_dir():
        others = _reconstructions(parser.data)
        hint = f" There is one in {others[0]}: give --colmap-path {others[0]}" if others else ""
        return [f"--colmap-path {parser.colmap_path}: {folder} is no folder.{hint}"], None
    found = look_at(folder)
    problems = list(found.problems)
    if found.points is None and parser.load_3D_points and not any("points3D" in line for line in problems):
        problems.append(
            f"{folder}: points3D.bin (or .txt) is missing: Gaussians begin there. Give COLMAP's whole model, or begin "
            "with random Gaussians: colmap --load-3D-points False"
        )
    return problems, found


def _of_colmap(parser: ColmapDataParserConfig, found: Findings) -> list[_Image]:
    problems, model = colmap_problems(parser)
    found.problems += problems
    if model is None or problems:
        return []
    _look_for_more_views(parser, model, found)
    folder, factor = _image_folder(parser, model, found)
    sizes = {
        (view.width, view.height): _scaled(view.width, view.height, factor, parser.downscale_rounding_mode)
        for view in model.views
    }
    if factor > 1 and (problem := _rounding_problem(parser, model, folder, factor)) is not None:
        found.problems.append(problem)
        return []
    _look_at_split(parser, [view.name for view in model.views], found)
    poses: dict[str, set[tuple[float, ...]]] = {}
    for view, pose in zip(model.views, model.poses, strict=True):
        poses.setdefault(view.name, set()).add(pose)
    found.problems += [
        f"{name}: listed with {len(seen)} different poses" for name, seen in poses.items() if len(seen) > 1
    ]
    views = _colmap_views(model)
    _look_at_centres(np.hstack([views.lenses[:, 2:], views.sizes]), found)
    if parser.load_3D_points:
        file = next((parser.data / parser.colmap_path).glob("points3D.*"))
        _look_at_seed_points(file, model.xyz, views, found)
        if len(model.rgb) > 1:
            _look_at_colours(file, model.rgb, ". `colmap color_extractor` takes them from the photographs", found)
    _look_at_places(views, model.xyz, found)
    images: list[_Image] = []
    for view in model.views:
        mask = None
        if parser.masks_path is not None:
            masks = parser.data / parser.masks_path
            mask = (_at(masks, factor) / view.name).with_suffix(".png")
        images.append(_Image(folder / view.name, mask, sizes[view.width, view.height]))
    return images


def _look_for_more_views(parser: ColmapDataParserConfig, model: Reconstruction, found: Findings) -> None:
    """Note a larger reconstruction next to the one that is used, and photographs that are in no reconstruction."""
    used, views = parser.data / parser.colmap_path, len(model.views)
    siblings = used.parent.iterdir() if parser.colmap_path.parts else ()
    others = [(view_count(folder), folder) for folder in siblings if folder.is_dir() and folder != used]
    count, larger = max(others, default=(0, used))
    if count > views:
        found.notes.append(
            f"{parser.colmap_path} holds {views} views and {parser.colmap_path.parent / larger.name} holds {count}; "
            f"for the larger one: --colmap-path {parser.colmap_path.parent / larger.name}"
        )
        return
    kinds = {Path(view.name).suffix.lower() for view in model.views}
    files = (parser.data / parser.images_path).rglob("[!.]*")  # macOS writes ._0001.jpg
    photographs = sum(path.suffix.lower() in kinds for path in files)
    if 2 * len({view.name for view in model.views}) < photographs:
        found.notes.append(
            f"{parser.colmap_path} holds {views} views, fewer than half of the {photographs} photographs in "
            f"{parser.images_path}: COLMAP could not place the others"
        )


def _colmap_views(model: Reconstruction) -> CaptureViews:
    quaternions, shifts = np.split(np.array(model.poses), [4], axis=1)
    to_camera = np.tile(np.eye(4), (len(shifts), 1, 1))
    w, x, y, z = (quaternions / np.linalg.norm(quaternions, axis=1, keepdims=True)).T
    rows = (
        (1 - 2 * (y * y + z * z), 2 * (x * y - w * z), 2 * (x * z + w * y)),
        (2 * (x * y + w * z), 1 - 2 * (x * x + z * z), 2 * (y * z - w * x)),
        (2 * (x * z - w * y), 2 * (y * z + w * x), 1 - 2 * (x * x + y * y)),
    )
    to_camera[:, :3, :3], to_camera[:, :3, 3] = np.moveaxis(np.array(rows), 2, 0), shifts
    sizes = np.array([(view.width, view.height) for view in model.views], np.float64)
    return CaptureViews(np.linalg.inv(to_camera) @ FLIP, np.array(model.lenses), sizes, is_colmap=True)


def _reconstructions(data: Path) -> list[Path]:
    """Return the folders with a COLMAP reconstruction, in the form of `--colmap-path`."""
    files = [path for depth in ("", "*/", "*/*/", "*/*/*/") for path in data.glob(f"{depth}cameras.*")]
    found = dict.fromkeys(path.parent for path in files if path.suffix in (".bin", ".txt"))
    return [folder.relative_to(data) for folder in found]


def _image_folder(parser: ColmapDataParserConfig, model: Reconstruction, found: Findings) -> tuple[Path, int]:
    """Return the folder that images are read from, and their downscale factor against COLMAP's images."""
    whole = parser.data / parser.images_path
    smaller = _smaller(whole)
    have = [f"{whole.name}_{n} (colmap --downscale-factor {n})" for n in smaller]
    factor = parser.downscale_factor
    if factor is None:
        size = header_size(whole / model.views[0].name)
        if size is None and not whole.is_dir():
            hint = "" if have else _image_hint(parser.data, model.views[0].name, "--images-path {}")
            found.problems.append(_no_folder(whole, have) + hint)
            return whole, 1
        longest, factor = max(size) if size else 0, 1
        while longest / factor > MAX_AUTO_RESOLUTION:
            factor *= 2
    folder = _at(whole, factor)
    if not folder.is_dir():
        have = [f"{whole.name} (colmap --downscale-factor 1)", *have] if whole.is_dir() else have
        why = f"Images of more than {MAX_AUTO_RESOLUTION} pixels are read from a smaller copy by default. "
        found.problems.append(("" if parser.downscale_factor else why) + _no_folder(folder, have))
    return folder, factor


def _no_folder(folder: Path, have: Sequence[str]) -> str:
    there = f". There {'is' if len(have) == 1 else 'are'} {', '.join(have)}" if have else ""
    return f"{folder}: there is no such folder{there}"


def _image_hint(data: Path, name: str, remedy: str) -> str:
    """Return a hint at the folder in a capture that holds an image; "" if there is none."""
    folders = (data, *sorted(path for path in data.iterdir() if path.is_dir()))
    holder = next((folder.relative_to(data) for folder in folders if (folder / name).is_file()), None)
    return "" if holder is None else f". {name} is in {holder}: {remedy.format(holder)}"


def _smaller(whole: Path) -> list[int]:
    """Return the downscale factors of the scaled copies of an image folder."""
    tails = [path.name.removeprefix(f"{whole.name}_") for path in whole.parent.glob(f"{whole.name}_*") if path.is_dir()]
    return sorted(int(tail) for tail in tails if tail.isdigit())


def _at(folder: Path, factor: int) -> Path:
    return folder if factor == 1 else folder.with_name(f"{folder.name}_{factor}")


def _scaled(width: int, height: int, factor: int, rounding: str) -> tuple[int, int]:
    rounded = {"floor": floor, "round": lambda x: floor(x + 0.5), "ceil": ceil}[rounding]
    return int(rounded(width / factor)), int(rounded(height / factor))


def _rounding_problem(parser: ColmapDataParserConfig, model: Reconstruction, folder: Path, factor: int) -> str | None:
    """Return a problem if the first image has a size that another `--downscale-rounding-mode` gives."""
    view = model.views[0]
    fits = {mode: _scaled(view.width, view.height, factor, mode) for mode in ("floor", "round", "ceil")}
    size = header_size(folder / view.name)
    modes = [mode for mode, expected in fits.items() if expected == size]
    if not modes or parser.downscale_rounding_mode in modes:
        return None
    return (
        f"{folder}: {view.width}x{view.height} pixels are rounded differently: {view.name} has "
        f"{'x'.join(map(str, size or ()))}. Give --downscale-rounding-mode {modes[-1]}"
    )


# ---- nerfstudio's format ----


def _other_format(data: Path) -> str:
    """Return a hint at what a file, or a folder without transforms.json, holds; "" if it is unknown."""
    output = f"--data {data} --output-dir FOLDER"
    kind = data.suffix.lower()
    if not data.is_dir():
        what = "video" if kind in _VIDEOS else "images" if kind in _PHOTOGRAPHS else ""
        hint = f" It has no poses yet: ns-process-data {what} {output}" if what else ""
        return " Unpack it, and give the folder" if kind in _ARCHIVES else hint
    for folder, name in (("keyframes", "polycam"), ("EXR_RGBD", "record3d")):
        if (data / folder).is_dir():
            return f" Convert it first: ns-process-data {name} {output}"
    if others := _reconstructions(data):
        option = f" --colmap-path {others[0]}" if others[0] not in PLACES else ""
        return f" For COLMAP's layout, end the command with: colmap{option}"
    if (data / "transforms_train.json").is_file():
        return " For Blender's transforms_train.json, end the command with: blender-data"
    for folder in (data, data / "images"):
        if folder.is_dir() and any(path.suffix.lower() in _PHOTOGRAPHS for path in folder.iterdir()):
            return f" Photographs have no poses yet: ns-process-data images --data {folder} --output-dir FOLDER"
    return ""


def _of_nerfstudio(parser: NerfstudioDataParserConfig, found: Findings, undistort: bool) -> list[_Image]:
    path = parser.data if parser.data.suffix == ".json" else parser.data / "transforms.json"
    if not path.is_file():
        found.problems.append(f"{path}: there is no such file.{_other_format(parser.data)}")
        return []
    found.problems += transforms_problems(parser.data)
    if found.problems:
        found.problems += _first_image_missing(path)
        return []
    # nerfstudio's own parser knows the files; seed points are all that it reads in full.
    outputs: list[Any] = []
    missing: list[str] = []
    meta: Any = json.loads(path.read_text("utf8"))
    for split in ("train", "val", *(("test",) if "test_filenames" in meta else ())):
        try:
            outputs.append(_outputs(parser, split, missing))
        except ZeroDivisionError:
            found.problems.append(f"{path}: all views are taken from one place, so the scene has no depth: add views")
            return []
        except (AssertionError, KeyError, ValueError, RuntimeError, TypeError, OSError) as error:
            found.problems += [f"{path}: {error or type(error).__name__}", *missing]
            return []
    found.notes += transforms_notes(meta)
    if parser.load_3D_points and "ply_file_path" in meta:
        _look_at_seed_file(path, meta, found)
    if len(outputs[0].image_filenames) == 0:
        found.problems.append(_nothing_to_train(len(outputs[1].image_filenames)))
    if len(outputs[1].image_filenames) == 0:
        found.notes.append(_NONE_HELD_OUT)
    images: list[_Image] = []
    if outputs[-1].image_filenames == outputs[1].image_filenames:
        outputs = outputs[:2]
    for part in outputs:
        sizes = zip(part.cameras.width.flatten().tolist(), part.cameras.height.flatten().tolist(), strict=True)
        masks = part.mask_filenames or [None] * len(part.image_filenames)
        images += [_Image(*row) for row in zip(part.image_filenames, masks, sizes, strict=True)]
    folders = {image.path.parent for image in images}
    if len(folders) == 1 and not (folder := folders.pop()).is_dir():
        whole = folder.with_name(folder.name.rpartition("_")[0] or folder.name)
        have = [f"{whole.name}_{n} (nerfstudio-data --downscale-factor {n})" for n in _smaller(whole)]
        have = [f"{whole.name} (nerfstudio-data --downscale-factor 1)", *have] if whole.is_dir() else have
        found.problems.append(
            _no_folder(folder, have) + _image_hint(path.parent, images[0].path.name, "make the paths relative")
        )
        return []
    rows: list[torch.Tensor] = []
    for part in outputs:
        cameras = part.cameras
        names = [str(name) for name in part.image_filenames]
        found.problems += camera_problems(cameras, names, undistort=undistort)
        found.problems += list_problems(part.image_filenames, cameras, None)
        rows.append(torch.cat([cameras.cx, cameras.cy, cameras.width, cameras.height], dim=-1))
    _look_at_centres(torch.cat(rows).double().numpy(), found)
    _look_for_twins([str(image.path) for image in images], {str(path) for path in outputs[1].image_filenames}, found)
    return images


def _first_image_missing(path: Path) -> list[str]:
    """Return a line if the first image of a transforms.json that is no valid one does not exist."""
    try:
        file = path.parent / json.loads(path.read_text("utf8"))["frames"][0]["file_path"]
    except (ValueError, LookupError, TypeError):
        return []
    return [] if file.exists() else [missing_file(file)]


def _outputs(parser: NerfstudioDataParserConfig, split: str, missing: list[str]) -> Any:
    """Run nerfstudio's parser without seed points. To choose a factor it opens the first image: without that image,
    parse with factor 1, so that all missing images are listed later.
    """
    target = ListedNerfstudio if parser._target is Nerfstudio else parser._target
    parser = dataclasses.replace(parser, load_3D_points=False, _target=target)
    try:
        return parser.setup().get_dataparser_outputs(split)
    except OSError as error:
        if parser.downscale_factor is not None:
            raise
        missing += [missing_file(Path(error.filename))] if isinstance(error, FileNotFoundError) else []
    return dataclasses.replace(parser, downscale_factor=1).setup().get_dataparser_outputs(split)


def _look_at_seed_file(path: Path, meta: Any, found: Findings) -> None:
    """Check the .ply that a valid transforms.json names, and that its points are in front of the cameras."""
    file = path.parent / meta["ply_file_path"]
    try:
        xyz, rgb, count = sample_ply(file, _SEED_POINTS)
    except FileNotFoundError:
        found.problems.append(f"ply_file_path of {path}: {missing_file(file)}")
        return
    except (OSError, Damaged) as error:
        found.problems.append(str(error))
        return
    if len(xyz) == 0:
        found.problems.append(f"{file}: it has no points. Take ply_file_path out to begin with random Gaussians")
        return
    _look_at_colours(file, rgb, "", found)
    frames = meta["frames"]

    def numbers(*keys: str) -> Any:
        return np.array([[float(meta.get(key, frame.get(key))) for key in keys] for frame in frames])

    poses = np.array([[*frame["transform_matrix"][:3], [0, 0, 0, 1]] for frame in frames], np.float64)
    panorama = meta.get("camera_model") == "EQUIRECTANGULAR"
    views = CaptureViews(poses, numbers("fl_x", "fl_y", "cx", "cy"), numbers("w", "h"), is_panorama=panorama)
    _look_at_seed_points(file, xyz, views, found, is_sample=len(xyz) < count)
    _look_at_places(views, xyz, found)


# ---- seed points, views and images ----


def _look_at_colours(file: Path, rgb: NDArray[Any], remedy: str, found: Findings) -> None:
    """Note seed points without colours [n, 3], or with one."""
    if len(rgb) == 0 or (rgb == rgb[0]).all():
        colours = "no colours (red, green, blue)" if len(rgb) == 0 else f"one colour, {rgb[0].tolist()}"
        found.notes.append(f"{file}: its points have {colours}; training has to find them{remedy}")


def _look_at_centres(rows: NDArray[np.float64], found: Findings) -> None:
    """Note principal points outside of the images; `rows` [n, 4] have cx, cy, width, height."""
    out = rows[((rows[:, :2] <= 0) | (rows[:, :2] >= rows[:, 2:])).any(axis=1)]
    if len(out):
        x, y, width, height = out[0]
        found.notes.append(
            f"The principal point of {len(out)} of {len(rows)} views lies outside of the image, such as ({x:g}, {y:g}) "
            f"of {width:g}x{height:g} pixels: are cx, cy and the focal length those of these images?"
        )


def _look_at_places(views: CaptureViews, xyz: NDArray[np.float64], found: Findings) -> None:
    """Refuse views from one place, compared with the distance of the seed points [n, 3]."""
    if found.unseen:  # the points are in another frame
        return
    places = views.poses[:, :3, 3]
    middle = places.mean(axis=0)
    some = xyz[:: -(-len(xyz) // _SEED_POINTS) or 1]
    distance = np.median(np.linalg.norm(some - middle, axis=1)) if len(xyz) else 0.0
    if np.abs(places - middle).max() <= _ONE_PLACE * distance:
        found.problems.append("All views are taken from one place, so the scene has no depth: add views")


def _look_at_seed_points(
    file: Path, xyz: NDArray[np.float64], views: CaptureViews, found: Findings, *, is_sample: bool = False
) -> None:
    if (problem := invalid_points(file, xyz)) is not None:
        found.problems.append(problem)
        return
    found.unseen = unseen_problem(views, xyz) or ""
    if not found.unseen and (note := unseen_note(views, xyz)) is not None:
        found.notes.append(note)
    offset = offset_for(views.poses[:, :3, 3])
    if offset.any() and (note := rounded_points(file, xyz)) is not None:
        found.notes.append(note)
    rows = None if is_sample or len(xyz) > _MANY else distinct_rows((xyz - offset).astype(np.float32))
    if rows is not None and len(rows) < _DISTINCT * len(xyz):
        found.notes.append(
            f"{len(xyz) - len(rows)} of {len(xyz)} seed points lie where another one is, and are merged with it"
        )


def _look_at_split(parser: ColmapDataParserConfig, names: Sequence[str], found: Findings) -> None:
    """Check that training views remain, that no view is listed twice, and that lists of views name views."""
    files = {part: parser.data / f"{part}_list.txt" for part in ("train", "test", "val", "validation")}
    lists = {part: file for part, file in files.items() if file.is_file()}
    if missing := missing_list(lists.__contains__, "{}_list.txt"):
        found.problems.append(f"{parser.data}: it has {missing}")
    for file in lists.values():
        if unknown := sorted({*file.read_text("utf8").splitlines()} - {*names}):
            found.problems.append(f"{file}: no view of the reconstruction has these names: {_some(unknown)}")
    if lists:
        return
    listed: Any = list(names)  # nerfstudio's annotation is the invariant List
    if parser.eval_mode == "interval":
        train, held_out = get_train_eval_split_interval(listed, parser.eval_interval)
    elif parser.eval_mode == "fraction":
        train, held_out = get_train_eval_split_fraction(listed, parser.train_split_fraction)
    else:
        return
    if len(train) == 0:
        found.problems.append(_nothing_to_train(len(held_out)))
    if len(held_out) == 0:
        found.notes.append(_NONE_HELD_OUT)
    _look_for_twins(names, {str(names[i]) for i in held_out}, found)


def _nothing_to_train(held_out: int) -> str:
    return (
        f"The capture has {held_out} view(s), and all are held out for evaluation: none is left to train with. Add "
        "views, or train with those that are held out, too: --eval-mode all"
    )


def _look_for_twins(names: Sequence[str], held_out: Iterable[str], found: Findings) -> None:
    twins = [name for name, count in Counter(names).items() if count > 1]
    if not twins:
        return
    both = ". It is trained with and held out: its score will be too good" if set(twins) & set(held_out) else ""
    found.notes.append(f"Listed more than once: {_some(twins)}{both}")


def _look_at_images(images: Sequence[_Image], found: Findings) -> None:
    """Read the headers in parallel until the time limit."""
    end = time.monotonic() + _PATIENCE

    def look(image: _Image) -> Header | None:
        if time.monotonic() > end:
            return None
        return read_header(image.path, image.mask, image.size)

    with ThreadPoolExecutor(_THREADS) as pool:
        headers = list(pool.map(look, images))
    seen = [(image, header) for image, header in zip(images, headers, strict=True) if header is not None]
    found.problems += dict.fromkeys(line for _, header in seen for line in header.problems)
    _look_at_masks([image.mask for image, header in seen if image.mask and not header.problems], found)
    _look_at_alpha([image.path for image, header in seen if header.channels == 4], found)
    clear = [image.path.name for image, header in seen if header.channels == 4]
    opaque = [image.path.name for image, header in seen if header.channels == 3]
    if clear and opaque:
        few, kind = (clear, "have") if len(clear) <= len(opaque) else (opaque, "have not")
        found.notes.append(f"{len(few)} of {len(seen)} images {kind} an alpha channel, unlike the others: {_some(few)}")
    turned = [image.path.name for image, header in seen if header.turned]
    if turned and not found.problems:
        found.notes.append(
            f"{len(turned)} image(s) are to be turned by their EXIF data, and nerfstudio does not turn them: "
            f"{_some(turned)}. That is right where COLMAP did not turn them either"
        )


def _look_at_masks(masks: Sequence[Path], found: Findings) -> None:
    if black := _all_black(masks):
        found.notes.append(f"Masks that leave out every pixel (inverted?): {_some(black)}; white pixels are used")


def _look_at_alpha(images: Sequence[Path], found: Findings) -> None:
    if clear := _all_black(images):
        found.notes.append(
            f"Images whose alpha channel is zero everywhere: {_some(clear)}; only the background is seen"
        )


def _all_black(files: Sequence[Path]) -> list[str]:
    """Return those without a pixel of the few with the fewest bytes: masks of one colour are small."""
    fewest = sorted(set(files), key=lambda path: path.stat().st_size)[:_MASKS]
    with ThreadPoolExecutor(_THREADS) as pool:
        found = zip(fewest, pool.map(is_all_black, fewest), strict=True)
        return sorted(path.name for path, is_black in found if is_black)


def _some(names: Sequence[str], most: int = 3) -> str:
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + rest
