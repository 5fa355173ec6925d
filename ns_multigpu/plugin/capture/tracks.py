"""Tracks of COLMAP's reconstruction: which points each view observes. nerfstudio's dataparsers drop them.

Points are transformed and scaled as the dataparser transforms poses. The pixel of an observation is computed from the
camera when the view is drawn (`core.depth_loss`). So nothing here depends on the size of images, or on their
distortion.
"""

import struct
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from nerfstudio.data.dataparsers.base_dataparser import DataparserOutputs
from nerfstudio.data.dataparsers.colmap_dataparser import ColmapDataParserConfig
from nerfstudio.data.dataparsers.nerfstudio_dataparser import NerfstudioDataParserConfig
from nerfstudio.data.utils import colmap_parsing_utils as colmap
from nerfstudio.utils.rich_utils import CONSOLE
from numpy.typing import NDArray
from torch import Tensor

from ns_multigpu.core.dist.collectives import broadcast_object
from ns_multigpu.core.dist.world import World
from ns_multigpu.plugin.capture.checks import raise_together
from ns_multigpu.plugin.capture.colmap import look_at

OPTION = "--pipeline.model.depth-loss"
"""Option that requires observations."""
_HEADLINE = f"{OPTION}: the depths of points that views observe cannot be had from this capture:"
_WITHOUT = f"or leave {OPTION} out"
_USUAL = Path("colmap/sparse/0")
"""Default folder of COLMAP's model next to a transforms.json, as ns-process-data writes it."""
_FITS = 1e-2
"""Largest distance between a COLMAP camera and the capture's, in units of the scene."""
_AROUND = 1.1
"""Scene size in units of the farthest camera's distance from the centre: gsplat's."""


class NoTracks(ValueError):
    """A capture without observations; the message gives the reason and the fix."""


@dataclass(frozen=True)
class Tracks:
    """Observations of views.

    Attributes:
        points: [P, 3] float32, positions of the observed points; see `Observations`.
        ids: [N] int32, rows of `points`, grouped by view in view order.
        counts: number of observations of each view.
        scale: the scene's size, world units.
        normals: [P, 3] float32, of normal maps; see `Observations`.
    """

    points: Tensor
    ids: Tensor
    counts: Sequence[int]
    scale: float
    normals: Tensor | None = None


def track_problems(parser: Any) -> list[str]:
    """Check COLMAP's files for observations; return the reasons why there are none, a line each.

    Args:
        parser: a dataparser's configuration, with its data.
    """
    folder = _model_of(parser)
    if folder is None:
        name = type(parser).__name__.removesuffix("Config").removesuffix("DataParser").lower()
        return [
            f"the dataparser {name} has no reconstruction of COLMAP's: use colmap, or nerfstudio-data with COLMAP's "
            f"model in {_USUAL}, {_WITHOUT}"
        ]
    if not folder.is_dir():
        return [f"{folder}: there is no such folder: put COLMAP's model (cameras, images, points3D) there, {_WITHOUT}"]
    found = look_at(folder)
    if found.problems:
        return found.problems
    if not found.points:
        return [f"{folder}: there are no points in points3D.bin (or .txt): give COLMAP's whole model, {_WITHOUT}"]
    if not found.observations:
        return [
            f"{folder}: no point has a track, so the views that observe it are unknown: give the model as COLMAP "
            f"wrote it, {_WITHOUT}"
        ]
    return []


def training_tracks(datamanager: Any, world: World) -> Tracks:
    """Read the observations of the training views on rank 0 and broadcast them. Every rank calls it.

    Args:
        datamanager: a `DistributedDataManager`, its capture checked.

    Raises:
        InputError: on every rank, if there are none; the message says what is missing.
    """
    found: Tracks | None = None
    problems: list[str] = []
    if world.is_main:
        parser, outputs = datamanager.dataparser_config, datamanager.train_dataparser_outputs
        problems = track_problems(parser)
        if not problems:
            try:
                found = read_tracks(parser, outputs)
            except NoTracks as error:
                problems = [f"{error}, {_WITHOUT}"]
            except (ValueError, IndexError, KeyError, struct.error, OSError) as error:
                what = f"{type(error).__name__}: {error}"
                problems = [f"{_model_of(parser)}: a file is damaged ({what}): copy it again, {_WITHOUT}"]
    raise_together(problems, world, _HEADLINE)
    found = broadcast_object(found, 0, world)
    assert found is not None
    seeing = sum(count > 0 for count in found.counts)
    CONSOLE.print(
        f"Depth loss: {len(found.points):,} points of COLMAP's, observed {len(found.ids):,} times by {seeing} of "
        f"{len(found.counts)} training views.",
        soft_wrap=True,
    )
    return found


def read_tracks(parser: Any, outputs: DataparserOutputs) -> Tracks:
    """Read the observations of a split's views.

    Args:
        parser: the configuration of the dataparser, without `track_problems`.
        outputs: the dataparser's outputs of the split.

    Raises:
        NoTracks: COLMAP's model is not the capture's, or no view of the split observes anything.
        ValueError, IndexError, KeyError, struct.error, OSError: nerfstudio's readers cannot read it.
    """
    folder = _model_of(parser)
    assert folder is not None
    text = (folder / "cameras.txt").exists()  # nerfstudio: cameras text first, points binary first
    images: dict[int, Any] = (
        colmap.read_images_text(folder / "images.txt") if text else colmap.read_images_binary(folder / "images.bin")
    )
    binary = (folder / "points3D.bin").exists()
    points: dict[int, Any] = (
        colmap.read_points3D_binary(folder / "points3D.bin")
        if binary
        else colmap.read_points3D_text(folder / "points3D.txt")
    )
    files = [Path(file) for file in outputs.image_filenames]
    numbers = images_of(files, {number: image.name for number, image in images.items()})
    pictures = [None if number is None else images[number] for number in numbers]
    if all(picture is None for picture in pictures):
        raise NoTracks(
            f"{folder}: none of its images, such as {next(iter(images.values())).name}, is one of the views, such as "
            f"{files[0]}: give the model of this capture"
        )
    poses = outputs.cameras.camera_to_worlds.double().cpu().numpy()
    scale = scene_scale(poses)
    if scale == 0:
        raise NoTracks("all training views are taken from one place, so that the scene has no size: add views")
    to_world = outputs.dataparser_transform.double().numpy()[:3]
    _check_fit(folder, pictures, poses, (to_world, float(outputs.dataparser_scale)), scale)
    places = np.array([point.xyz for point in points.values()], dtype=np.float64).reshape(-1, 3)
    observed = _observed(numbers, points)
    used, ids = np.unique(np.concatenate(observed), return_inverse=True)
    if len(used) == 0:
        raise NoTracks(f"{folder}: no view has a part in a point's track: give the model as COLMAP wrote it")
    world = (places[used] @ to_world[:, :3].T + to_world[:, 3]) * float(outputs.dataparser_scale)
    counts, ids = [len(rows) for rows in observed], torch.from_numpy(ids.reshape(-1)).int()
    return Tracks(torch.from_numpy(world).float(), ids, counts, scale)


def scene_scale(poses: NDArray[np.float64]) -> float:
    """Return the scene's size as gsplat's trainer: 1.1 times the largest distance of a camera from their centre.

    Args:
        poses: [n, 3, 4] camera-to-world.
    """
    places = poses[:, :3, 3]
    return _AROUND * float(np.linalg.norm(places - places.mean(0), axis=1).max(initial=0.0))


def images_of(files: Sequence[Path], names: dict[int, str]) -> list[int | None]:
    """Return the number of the COLMAP image that each file is; None for none.

    An image matches if its name is the end of the file's path, the longest such name first. Otherwise it matches if the
    file names are equal and unique, since scaled copies of images may be in one folder.

    Args:
        names: image names, by number.
    """
    by_last: defaultdict[str, list[tuple[int, tuple[str, ...]]]] = defaultdict(list)
    for number, name in names.items():
        parts = Path(name).parts
        by_last[parts[-1]].append((number, parts))
    found: list[int | None] = []
    for file in files:
        alike = by_last.get(file.name, [])
        ends = [(len(parts), number) for number, parts in alike if file.parts[-len(parts) :] == parts]
        found.append(max(ends)[1] if ends else alike[0][0] if len(alike) == 1 else None)
    return found


def _model_of(parser: Any) -> Path | None:
    """Return the folder of COLMAP's model; None if the dataparser has none."""
    if not isinstance(parser, (ColmapDataParserConfig, NerfstudioDataParserConfig)):
        return None
    data = Path(parser.data)
    return (data.parent if data.suffix == ".json" else data) / getattr(parser, "colmap_path", _USUAL)


def _check_fit(
    folder: Path, pictures: Sequence[Any], poses: NDArray[np.float64], moved: tuple[NDArray[np.float64], float],
    scale: float,
) -> None:  # fmt: skip
    """Check that the model's cameras, transformed by `moved` (matrix [3, 4], factor), equal the capture's.

    Each camera's centre is compared, and the points at the scene's size along each of its axes.

    Raises:
        NoTracks: a camera differs.
    """
    matrix, factor = moved
    corners = scale * np.concatenate([np.zeros((1, 3)), np.eye(3)])
    for picture, pose in zip(pictures, poses, strict=True):
        if picture is None:
            continue
        before = (corners / factor - picture.tvec) @ colmap.qvec2rotmat(picture.qvec)
        expected = (before @ matrix[:, :3].T + matrix[:, 3]) * factor
        found = corners * np.array([1.0, -1.0, -1.0]) @ pose[:, :3].T + pose[:, 3]  # OpenGL's axes
        off = float(np.linalg.norm(found - expected, axis=1).max()) / scale
        if not off <= _FITS:
            raise NoTracks(
                f"{folder}: its cameras are not those of the capture: {picture.name} is {off:.0%} of the scene's size "
                "away from where the capture has it: give the model that the capture's poses are from"
            )


def _observed(numbers: Sequence[int | None], points: dict[int, Any]) -> list[NDArray[np.int64]]:
    """Return, for each image number, the points whose tracks contain it: their rows in `points`, without duplicates."""
    tracks = [np.asarray(point.image_ids, dtype=np.int64) for point in points.values()]
    images = np.concatenate([np.zeros(0, np.int64), *tracks])
    rows = np.repeat(np.arange(len(tracks)), [len(track) for track in tracks])
    order = np.argsort(images, kind="stable")
    images, rows = images[order], rows[order]
    found: list[NDArray[np.int64]] = []
    for number in numbers:
        first, end = (0, 0) if number is None else np.searchsorted(images, [number, number + 1])
        found.append(np.unique(rows[first:end]))
    return found
