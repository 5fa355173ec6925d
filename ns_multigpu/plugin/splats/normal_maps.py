"""Normal maps of training views, turned into observations for the loss of normal maps.

Colours encode normals as n = 2 rgb - 1, as omnidata, sdfstudio and dn-splatter do. Normals are in the axes of the
camera: OpenCV's in sdfstudio, OpenGL's by default in dn-splatter. Visible surfaces face the camera, which is so in one
of the two only. Pixels are drawn, and their directions found, as those of depth maps are.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import torch
from nerfstudio.data.dataparsers.base_dataparser import DataparserOutputs
from nerfstudio.utils.rich_utils import CONSOLE
from numpy.typing import NDArray

from ns_multigpu.core.dist.collectives import all_gather_objects
from ns_multigpu.core.dist.world import World
from ns_multigpu.plugin.capture.checks import raise_together
from ns_multigpu.plugin.capture.image_files import FRAME_FILES, missing_file
from ns_multigpu.plugin.capture.seed_points import some_seeds
from ns_multigpu.plugin.capture.tracks import Tracks
from ns_multigpu.plugin.launch.run_parts import run_parts
from ns_multigpu.plugin.splats.depth_maps import Floats, MapReader, MapSamples

OPTION = "--pipeline.model.normal-map-loss"
AXES = {"OpenCV": (1.0, 1.0, 1.0), "OpenGL": (1.0, -1.0, -1.0)}
"""Signs of the axes of normals (x, y, z) in those of OpenCV: x right, y down, z forward."""
_KEY = "normal_file_path"
_LENGTHS = (0.5, 1.5)
"""Lengths of what is taken for a normal. Black, white and grey have none of them."""
_FACING = 0.75
"""Least part of the normals that face their camera."""
_SEEDS, _VIEWS, _LEAST_PAIRS = 4_000, 64, 300
"""Numbers of seed points and of views between which normals are compared, and the least number of comparisons."""
_CELLS = 16
"""Cells across a view, in which the nearest seed points hide others."""
_CLEARLY = 0.1
"""Least difference of correlations by which maps are taken to be in the axes of the world."""
_HEADLINE = f"{OPTION}: {{count}} problem(s) with the capture's normal maps:"


class NormalReader(MapReader):
    """Reader of the normal maps of a split's views. See `MapReader`."""

    nothing = f"it has no normals, as no colour is that of a vector of length 1: {{}}, or leave {OPTION} out"

    def values(self, path: Path) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
        """See `MapReader.values`: vectors [h, w, 3]."""
        normals = read_normals(path)
        lengths = np.linalg.norm(normals, axis=-1)
        return normals, (lengths > _LENGTHS[0]) & (lengths < _LENGTHS[1])


def read_normals(path: Path) -> NDArray[np.float32]:
    """Read a map [h, w, 3], 2 v - 1 of its values v in [0, 1]: of a picture of 8 or 16 bits, or of a .npy file
    [h, w, 3] or [3, h, w].

    Raises:
        ValueError: the file is missing, unreadable or not of three channels.
    """
    if not path.exists():
        raise ValueError(f"{missing_file(path)}. Maps of any size will do")
    values: Any
    try:
        values = np.load(path) if path.suffix == ".npy" else cv2.imread(str(path), cv2.IMREAD_UNCHANGED)
    except (ValueError, OSError, EOFError, cv2.error) as error:
        raise ValueError(f"{path}: it is no normal map that can be read ({error}): write it again") from error
    if values is not None and path.suffix == ".npy" and values.ndim == 3 and values.shape[2] != 3:
        values = np.moveaxis(values, 0, -1)
    elif values is not None and path.suffix != ".npy" and values.ndim == 3:
        values = values[..., :3][..., ::-1]  # OpenCV's order is blue, green, red, alpha
    if values is None or values.ndim != 3 or values.shape[2] != 3:
        what = "is no picture" if values is None else f"has the shape {list(values.shape)}"
        raise ValueError(f"{path}: it {what}: give red, green and blue for each pixel, as 8-bit png")
    full = np.iinfo(values.dtype).max if values.dtype.kind == "u" else 1
    return 2 * values.astype(np.float32) / full - 1


def training_normals(outputs: DataparserOutputs, world: World, sky: Sequence[Path] | None = None) -> Tracks:
    """Read the normal maps of the training views. Every rank calls it; each reads a part of the maps.

    Args:
        outputs: the dataparser's of the training split. world: the ranks. sky: see `MapReader`.

    Returns:
        the directions of the maps' pixels, with their normals: see `Observations`.

    Raises:
        InputError: on every rank, with all problems of the maps.
    """
    files = outputs.metadata.get(FRAME_FILES[_KEY])
    missing = [
        f"the capture has none: give {_KEY} for each frame of transforms.json, or a folder {FRAME_FILES[_KEY]} next to "
        f"COLMAP's images, or leave {OPTION} out"
    ]
    raise_together([] if files else missing, world, _HEADLINE)
    assert files
    samples, problems = NormalReader(outputs, files, sky).read_part(world)
    raise_together(problems, world, _HEADLINE)
    warning = world_axes_warning(samples, len(files), some_seeds(outputs, _SEEDS), world)
    if warning and world.is_main:
        CONSOLE.print(warning, style="bold yellow", soft_wrap=True, markup=False)
    mine = {index: directed(some) for index, some in samples.items()}
    merged: dict[int, tuple[NDArray[np.float32], NDArray[np.float32]]] = {}
    for part in all_gather_objects(mine, world):
        merged.update(part)
    rays, normals = (np.concatenate([merged[index][k] for index in range(len(files))]) for k in (0, 1))
    if len(rays) == 0:
        raise_together([f"{files[0]}: masks hide all of this map and all others"], world, _HEADLINE)
    facing = {name: float(((normals * signs * rays).sum(-1) < 0).mean()) for name, signs in AXES.items()}
    axes = max(facing, key=lambda name: facing[name])
    problem = (
        f"{files[0]}: in this map and the others, {facing['OpenCV']:.0%} of the normals face the camera in OpenCV's "
        f"axes and {facing['OpenGL']:.0%} in OpenGL's, and visible surfaces do: give n = 2 rgb - 1 in the axes of the "
        "camera"
    )
    raise_together([] if facing[axes] >= _FACING else [problem], world, _HEADLINE)
    CONSOLE.print(
        f"Loss of normals: {len(rays):,} pixels of {len(files)} normal maps, in {axes}'s axes.", soft_wrap=True
    )
    run_parts().done("normal maps")
    turned = torch.from_numpy(normals * np.array(AXES[axes], np.float32))
    counts = [len(merged[index][0]) for index in range(len(files))]
    return Tracks(torch.from_numpy(rays), torch.arange(len(rays), dtype=torch.int32), counts, 1.0, turned)


def world_axes_warning(samples: Mapping[int, MapSamples], count: int, seeds: Floats, world: World) -> str:
    """Return a warning, or "", if normals at seed points agree better between views as they are than turned from camera
    to world. Every rank calls it.

    Each view's mean normal is subtracted: without it, normals that face their cameras agree as they are. Points behind
    others are left out where the seed points show it.

    Args:
        samples: of this rank's maps, by view. count: of all maps. seeds: [n, 3] in world units.
    """
    sums, squares, seen = np.zeros((3, len(seeds), 3)), np.zeros(len(seeds)), np.zeros(len(seeds))
    for index, some in samples.items():
        if index % -(-count // _VIEWS) or len(some.values) < _CELLS:
            continue
        at, depths, rows = some.project(seeds)
        off, nearest = some.nearest(at)
        near = (off < some.spacing) & in_front(at, depths, some.places)
        if near.any():
            rows, own = rows[near], directed(some)[1][nearest[near]].astype(np.float64)
            own -= own.mean(0)
            to_world = some.pose[:, :3] * AXES["OpenGL"]
            turned = [own * signs @ to_world.T for signs in AXES.values()]
            sums[:, rows] += [*turned, own]
            squares[rows] += (own**2).sum(-1)
            seen[rows] += 1
    gathered = all_gather_objects((sums, squares, seen), world)
    sums, squares, seen = (np.sum(parts, axis=0) for parts in zip(*gathered, strict=True))
    # Of vectors v_i at a point: sum over pairs of v_i . v_j = |sum of v_i|^2 - sum of |v_i|^2
    agreed = ((sums**2).sum(-1) - squares).sum(-1) / max(float(((seen - 1) * squares).sum()), 1e-12)
    as_camera, as_world = float(agreed[:2].max()), float(agreed[2])
    if (seen * (seen - 1)).sum() < 2 * _LEAST_PAIRS or as_world < as_camera + _CLEARLY:
        return ""
    return (
        "Normal maps seem to be in the axes of the world, which makes a model worse. Between views, normals of a "
        f"point correlate by {as_world:.2f} as they are, and by {as_camera:.2f} turned from their cameras. "
        "Give n = 2 rgb - 1 in the axes of each camera."
    )


def in_front(at: Floats, depths: Floats, places: Floats) -> NDArray[np.bool_]:
    """Return which seed points no other hides: of each cell of a grid over the map's places, the nearest ones."""
    low, high = places.min(0), places.max(0)
    inside = ((at >= low) & (at <= high)).all(1)
    across, down = (np.where(inside[:, None], at - low, 0) / (high - low).max() * (_CELLS - 1)).astype(np.int64).T
    front = np.full((_CELLS, _CELLS), np.inf)
    np.minimum.at(front, (across[inside], down[inside]), depths[inside])
    return inside & (depths < 1.05 * front[across, down])


def directed(samples: MapSamples) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return the directions [n, 3] of a map's pixels in OpenCV's axes of its camera, to depth 1, and its unit
    normals [n, 3] as in the file."""
    rays = samples.rays @ samples.pose[:, :3] * AXES["OpenGL"]
    normals = samples.values / np.linalg.norm(samples.values, axis=1, keepdims=True)
    return rays.astype(np.float32), normals.astype(np.float32)
