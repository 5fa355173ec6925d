"""Depth maps of training views, turned into observations for the depth loss.

Pixels of each map become points of the world that its view alone observes. So the maps take the path of COLMAP's points
through all steps (`core.step.depth_loss`). A pixel is lifted along its ray through the photograph's own lens.
So maps are not resampled: their size may differ from the photograph's, and lenses and downscaling make no difference.
"""

import json
import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import cv2
import numpy as np
import torch
from nerfstudio.cameras.cameras import CameraType
from nerfstudio.data.dataparsers.base_dataparser import DataparserOutputs
from nerfstudio.data.dataparsers.colmap_dataparser import ColmapDataParserConfig
from nerfstudio.data.dataparsers.nerfstudio_dataparser import NerfstudioDataParserConfig
from nerfstudio.data.utils.data_utils import get_image_mask_tensor_from_path
from nerfstudio.utils.rich_utils import CONSOLE
from numpy.typing import NDArray
from scipy.interpolate import LinearNDInterpolator
from scipy.spatial import KDTree, QhullError
from torch import Tensor

from ns_multigpu.core.dist.collectives import all_gather_objects
from ns_multigpu.core.dist.world import World
from ns_multigpu.core.random import keyed_generator
from ns_multigpu.plugin.capture.checks import raise_together
from ns_multigpu.plugin.capture.image_files import aspect_problem, missing_file, read_sky
from ns_multigpu.plugin.capture.seed_points import some_seeds
from ns_multigpu.plugin.capture.tracks import Tracks, scene_scale, training_tracks
from ns_multigpu.plugin.launch.run_parts import run_parts

OPTION = "--pipeline.model.depth-maps"
Kind = Literal["metric", "relative", "inverse", "off"]
"""Kind of maps: see the option."""
Floats = NDArray[np.float64]

SAMPLES = 2**14
"""Largest number of a map's pixels that are compared."""
_ALL_SAMPLES = 2**26
"""Largest number of pixels of all maps: 1 GiB on each device."""
_THREADS = 8
_WRONG_UNIT, _OTHER_UNIT = 10.0, 1.5
"""Factors between depths of maps and of seed points from which metric maps are refused, and noted."""
_LEAST_POINTS = 20
"""Smallest number of COLMAP's points in a map to which it is fitted."""
_FAR = 1000.0
"""Largest depth of a fitted map, in sizes of the scene."""
_LOGS = np.arange(-160.5, 161) / 10
"""Borders of the bins of logarithms of ratios of depths; one bin is around 0."""
_SEEDS = 20_000
"""Number of seed points that metric maps are compared with."""
_HEADLINE = f"{OPTION}: {{count}} problem(s) with the capture's depth maps:"


@dataclass(frozen=True)
class MapSamples:
    """Valid pixels of one view's map.

    Attributes:
        values: [n] the file's values, above 0; of normal maps [n, 3].
        pose: [3, 4] the camera's, OpenGL's axes, world units.
        rays: [n, 3] from its position to depth 1 through each pixel's centre.
        spacing: mean distance between neighbouring places.
        panorama: whether depths are distances; otherwise they are along the axis, also a fisheye's.
    """

    values: Floats
    pose: Floats
    rays: Floats
    spacing: float
    panorama: bool = False

    @property
    def places(self) -> Floats:
        """Positions [n, 2] of the rays in the plane at z-depth 1, along the camera's axes; of a panorama longitudes and
        latitudes."""
        return self._place(self.rays @ self.pose[:, :3])

    def _place(self, seen: Floats) -> Floats:
        x, y, z = seen.T
        if self.panorama:
            return np.stack([np.arctan2(x, -z), np.arctan2(y, np.hypot(x, z))], axis=1)
        return np.stack([x, y], axis=1) / -z[:, None]

    def project(self, points: Floats) -> tuple[Floats, Floats, NDArray[np.int64]]:
        """Return the places [k, 2], depths [k] and rows [k] of those points [m, 3] that lie in front of the camera, or
        anywhere around a panorama's."""
        seen = (points - self.pose[:, 3]) @ self.pose[:, :3]
        depths = np.linalg.norm(seen, axis=1) if self.panorama else -seen[:, 2]
        rows = np.flatnonzero(depths > 0)
        return self._place(seen[rows]), depths[rows], rows

    def nearest(self, places: Floats) -> tuple[Floats, NDArray[np.int64]]:
        """Return the distance of each place [k, 2] to the nearest sample, and that sample's row."""
        off, rows = KDTree(self.places).query(places)
        return np.asarray(off), np.asarray(rows)


def needs_tracks(datamanager: Any, model: Any) -> bool:
    """Return True if the depth loss is known, before the capture is read, to need COLMAP's tracks.

    Args:
        datamanager: the configuration of a datamanager. model: that of the model.
    """
    if model.depth_loss <= 0:
        return False
    if model.depth_maps != "metric":
        return True
    parser = datamanager.dataparser
    if isinstance(parser, ColmapDataParserConfig):
        return parser.depths_path is None
    if isinstance(parser, NerfstudioDataParserConfig):
        data = Path(datamanager.data or parser.data)
        path = data if data.suffix == ".json" else data / "transforms.json"
        try:
            return not any("depth_file_path" in frame for frame in json.loads(path.read_text("utf8"))["frames"])
        except (OSError, ValueError, KeyError, TypeError):
            return True  # the first look reports it
    return False


def training_observations(datamanager: Any, kind: Kind, world: World) -> Tracks:
    """Return the observations of the training views: of the capture's depth maps, else of COLMAP's points.

    Args:
        datamanager: a `DistributedDataManager`, its capture checked.
        kind: of the maps.
        world: the ranks. Every rank calls it; each reads a part of the maps.

    Raises:
        InputError: on every rank, with all problems of the maps, or of COLMAP's model where it is needed.
    """
    outputs = datamanager.train_dataparser_outputs
    has_maps = bool(outputs.metadata.get("depth_filenames"))
    if kind == "off" or (kind == "metric" and not has_maps):
        return training_tracks(datamanager, world)
    missing = [
        "the capture has none: give depth_file_path for each frame of transforms.json, or --depths-path (behind "
        f"colmap), or leave {OPTION} out"
    ]
    raise_together([] if has_maps else missing, world, _HEADLINE)
    tracks = training_tracks(datamanager, world) if kind != "metric" else None
    found = read_maps(outputs, kind, world, tracks, datamanager.sky)
    run_parts().done("depth maps")
    return found


def read_maps(
    outputs: DataparserOutputs, kind: Kind, world: World, tracks: Tracks | None = None,
    sky: Sequence[Path] | None = None,
) -> Tracks:  # fmt: skip
    """Read the depth maps of a split's views. Every rank calls it.

    Args:
        outputs: the dataparser's outputs of the split, with `depth_filenames` and `depth_unit_scale_factor`.
        kind: of the maps. world: the ranks.
        tracks: COLMAP's points that the views observe, to which maps that are not metric are fitted.
        sky: see `MapReader`.

    Raises:
        InputError: on every rank, with all problems.
    """
    count = len(outputs.image_filenames)
    scale = scene_scale(outputs.cameras.camera_to_worlds.double().cpu().numpy())
    samples, problems = MapReader(outputs, outputs.metadata["depth_filenames"], sky).read_part(world)
    if scale == 0:
        problems.append("all training views are taken from one place, so that the scene has no size: add views")
    raise_together(problems, world, _HEADLINE)
    unit = float(outputs.metadata["depth_unit_scale_factor"])
    seeds = some_seeds(outputs, _SEEDS)
    ends = np.cumsum([0, *(tracks.counts if tracks else ())])
    points: dict[int, Tensor] = {}
    fits: list[Any] = []  # counts of `unit_counts`, or fitted scales
    for index, some in samples.items():
        if tracks is None:
            depths = some.values * unit * float(outputs.dataparser_scale)
            fits.append(unit_counts(some, depths, seeds))
        else:
            own = tracks.points[tracks.ids[int(ends[index]) : int(ends[index + 1])].long()]
            depths, found = fitted_depths(some, own.double().numpy(), kind, _FAR * scale)
            fits += [] if found is None else [found]
        ahead = depths > 0
        lifted = some.pose[:, 3] + some.rays[ahead] * depths[ahead, None]
        points[index] = torch.from_numpy(lifted.astype(np.float32))
    merged: dict[int, Tensor] = {}
    for part in all_gather_objects(points, world):
        merged.update(part)
    parts = [merged[index] for index in range(count)]
    fits = [fit for part in all_gather_objects(fits, world) for fit in part]
    file = str(outputs.metadata["depth_filenames"][0])
    problems = unit_problems(np.sum(fits, axis=0), file, unit) if tracks is None else _fit_problems(fits, file, kind)
    raise_together(problems, world, _HEADLINE)
    total, seen = sum(map(len, parts)), sum(len(part) > 0 for part in parts)
    if not total:
        raise_together([f"{file}: masks hide all depth of this map and all others"], world, _HEADLINE)
    CONSOLE.print(f"Depth loss: {total:,} pixels of {seen} of {count} depth maps ({kind}).", soft_wrap=True)
    return Tracks(torch.cat(parts), torch.arange(total, dtype=torch.int32), [len(part) for part in parts], scale)


def fitted_depths(samples: MapSamples, points: Floats, kind: Kind, far: float) -> tuple[Floats, float | None]:
    """Return the depths [n] of a map that is known up to a scale and shift of its disparities, and that scale.

    Scale and shift minimise the sum of |scale disparity + shift - 1 / depth| over the points, which is the depth loss
    of the map itself. Between samples their disparities are interpolated, which is exact on planes. Points farther from
    a sample than the samples' spacing do not count.
    The sum of absolute differences withstands outliers, as Ranftl et al. 2020 (section 5) ask of such an alignment.

    Args:
        samples: of the map. points: [k, 3] points that its view observes.
        kind: "inverse" for disparities, "relative" for depths.
        far: depth from which on a depth is 0, no observation.

    Returns:
        depths of 0, which are no observations, where the scale is not above 0; also, with None, if fewer than
        `_LEAST_POINTS` points are in the map.
    """
    nothing = np.zeros(len(samples.values))
    if len(samples.values) < _LEAST_POINTS:
        return nothing, None
    at, depths, _ = samples.project(points)
    x = samples.values if kind == "inverse" else 1 / samples.values
    try:
        interpolated = LinearNDInterpolator(samples.places, x)(at)
    except QhullError:  # all samples lie on one line, and no point lies between them
        return nothing, None
    near = (samples.nearest(at)[0] < samples.spacing) & np.isfinite(interpolated)
    if near.sum() < _LEAST_POINTS:
        return nothing, None
    scale, shift = line_through(interpolated[near], 1 / depths[near])
    disparities = scale * x + shift
    ahead = (disparities > 1 / far) & (scale > 0)
    return np.where(ahead, 1 / np.where(ahead, disparities, 1.0), 0.0), scale


def line_through(x: Floats, y: Floats) -> tuple[float, float]:
    """Return the scale and shift that minimise the sum of |scale x + shift - y|, by reweighted least squares."""
    weights = np.ones_like(y)
    slope, centre, height = 0.0, 0.0, 0.0
    for _ in range(50):
        centre, height = float(np.average(x, weights=weights)), float(np.average(y, weights=weights))
        away = x - centre
        slope = float((weights * away * (y - height)).sum()) / max(float((weights * away**2).sum()), 1e-300)
        weights = 1 / np.maximum(np.abs(slope * away + height - y), 1e-4 * float(np.abs(y).mean()))
    return slope, height - slope * centre


def pixels_of(height: int, width: int, wanted: int, index: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return rows and columns of up to `wanted` pixels of a map; of all if there are no more.

    Of each cell of a grid one pixel is drawn, by the view's number.
    """
    if height * width <= wanted:
        rows, columns = np.divmod(np.arange(height * width), width)
        return rows, columns
    down = min(height, max(1, int((wanted * height / width) ** 0.5)))
    across = min(width, wanted // down)
    drawn = torch.rand(2, down, across, generator=keyed_generator("depth map", index), dtype=torch.float64).numpy()
    tops, lefts = np.arange(down + 1) * height // down, np.arange(across + 1) * width // across
    rows = tops[:-1, None] + (drawn[0] * np.diff(tops)[:, None]).astype(np.int64)
    columns = lefts[None, :-1] + (drawn[1] * np.diff(lefts)).astype(np.int64)
    return rows.reshape(-1), columns.reshape(-1)


def read_map(path: Path) -> NDArray[np.float32]:
    """Read a map [h, w]: float or integer numbers of a .npy file, or those of a picture of one channel.

    Raises:
        ValueError: the file is missing, unreadable or not of one channel.
    """
    if not path.exists():
        raise ValueError(
            f"{missing_file(path)}. Maps of any size will do, so a folder for a downscale factor may be a link to the "
            "full one"
        )
    values: Any
    try:
        values = np.load(path) if path.suffix == ".npy" else cv2.imread(str(path), cv2.IMREAD_UNCHANGED)
        values = None if values is None else np.squeeze(values).astype(np.float32)
    except (ValueError, OSError, EOFError, TypeError, cv2.error) as error:
        raise ValueError(f"{path}: it is no depth map that can be read ({error}): write it again") from error
    if values is None or values.ndim != 2:
        what = "is no picture" if values is None else f"has the shape {list(values.shape)}"
        raise ValueError(f"{path}: it {what}: give one number for each pixel, as 16-bit png or float32 npy")
    return values


class MapReader:
    """Reader of the depth maps of a split's views.

    Args:
        outputs: the dataparser's. files: the map of each view.
        sky: masks of the views' sky, which has no depth; None to read none.
    """

    nothing = f"it has no depth, as all of it is 0, negative, NaN or infinite: {{}}, or all maps by {OPTION} off"
    """Message about a map without a valid pixel."""

    def __init__(self, outputs: DataparserOutputs, files: Sequence[Any], sky: Sequence[Path] | None = None) -> None:
        self._sky, self._files, self._masks, self._cameras = (
            sky,
            files,
            outputs.mask_filenames,
            outputs.cameras.to("cpu"),
        )
        self._wanted = min(SAMPLES, _ALL_SAMPLES // len(files))

    def values(self, path: Path) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
        """Return the numbers [h, w] or [h, w, 3] of a file, and which pixels [h, w] are valid.

        Raises:
            ValueError: the file is missing or no map.
        """
        values = read_map(path)
        return values, np.isfinite(values) & (values > 0)

    def read_part(self, world: World) -> tuple[dict[int, MapSamples], list[str]]:
        """Return the samples of this rank's part of the maps, by view, and the problems of the others."""
        mine = range(world.rank, len(self._files), world.size)
        with ThreadPoolExecutor(_THREADS) as pool:
            found = dict(zip(mine, pool.map(self._read, mine), strict=True))
        problems = [some for some in found.values() if isinstance(some, str)]
        return {index: some for index, some in found.items() if not isinstance(some, str)}, problems

    def _read(self, index: int) -> MapSamples | str:
        """Return the samples of a view's map, or its problem."""
        try:
            return self._samples(index)
        except ValueError as error:
            return str(error)

    def _samples(self, index: int) -> MapSamples:
        path, camera = Path(self._files[index]), self._cameras[index : index + 1]
        values, valid = self.values(path)
        (height, width), size = valid.shape, (int(camera.width.item()), int(camera.height.item()))
        if (problem := aspect_problem(path, (width, height), size)) is not None:
            raise ValueError(problem)
        if not valid.any():
            raise ValueError(f"{path}: {self.nothing.format('write it again, or leave out its view')}")
        rows, columns = pixels_of(height, width, self._wanted, index)
        at = np.stack([(rows + 0.5) / height, (columns + 0.5) / width], axis=1)
        kept = valid[rows, columns] & self._unmasked(index, at)
        coords = torch.from_numpy(at * [size[1], size[0]]).float()
        found = camera.generate_rays(torch.zeros(len(at), 1, dtype=torch.long), coords=coords)
        pose, directions = camera.camera_to_worlds[0].double(), found.directions.double()
        panorama = int(camera.camera_type.item()) == CameraType.EQUIRECTANGULAR.value
        cosines = directions.norm(dim=1) if panorama else directions @ -pose[:, 2]
        kept &= (cosines > 0.01).numpy()
        rays = (directions / cosines[:, None]).numpy()[kept]
        # nerfstudio's focal lengths of a panorama are pixels per half turn.
        side = (math.pi if panorama else 1.0) * (
            size[0] / float(camera.fx) * size[1] / float(camera.fy) / len(at)
        ) ** 0.5
        own = values[rows, columns][kept].astype(np.float64)
        return MapSamples(own, pose.numpy(), rays, side, panorama)

    def _unmasked(self, index: int, at: Floats) -> NDArray[np.bool_]:
        """Return which positions [n, 2], y and x as parts of the photograph's size, its masks keep."""
        kept = np.ones(len(at), dtype=bool)
        masks = [get_image_mask_tensor_from_path(Path(self._masks[index]))[..., 0].numpy()] if self._masks else []
        for mask in [*masks, *([~read_sky(self._sky[index])] if self._sky else [])]:
            rows, columns = (at * mask.shape).astype(np.int64).T
            kept &= mask[rows, columns]
        return kept


def unit_counts(samples: MapSamples, depths: Floats, seeds: Floats) -> NDArray[np.int64]:
    """Return the histogram of log(depth of a view's map / depth of a seed point in it), over `_LOGS`.

    Hidden points spread over it. Visible ones have one value, which is the unit of the map in that of the capture.
    """
    if len(depths) == 0:
        return np.zeros(len(_LOGS) - 1, np.int64)
    at, far, _ = samples.project(seeds)
    off, rows = samples.nearest(at)
    near = off < samples.spacing
    return np.histogram(np.log(depths[rows[near]] / far[near]), _LOGS)[0]


def unit_problems(counts: NDArray[np.int64], file: str, unit: float) -> list[str]:
    """Compare the unit of metric maps with the capture's: return a line if it is wrong, print a note if it may be."""
    if counts.sum() < _LEAST_POINTS:
        return []
    mode = int(counts.argmax())
    ratio = float(np.exp((_LOGS[mode] + _LOGS[mode + 1]) / 2))
    line = (
        f"depths of the maps are about {ratio:.2g} times those of the capture's points. Maps in another unit take "
        f"--depth-unit-scale-factor {unit / ratio:.2g} (behind the dataparser's name; now {unit:g}), maps known up to "
        f"scale {OPTION} relative"
    )
    if not 1 / _WRONG_UNIT < ratio < _WRONG_UNIT:
        return [f"{file}: {line}"]
    if not 1 / _OTHER_UNIT < ratio < _OTHER_UNIT:
        CONSOLE.print(f"[yellow]Note: {line}.", soft_wrap=True)
    return []


def _fit_problems(scales: Sequence[float], file: str, kind: Kind) -> list[str]:
    """Return a line if no map was fitted, or if most of them fall where COLMAP's points rise."""
    if not scales:
        return [
            f"{file}: this map and all others show fewer than {_LEAST_POINTS} of the points that COLMAP observes in "
            f"their views, and cannot be fitted to them: give metric maps, or {OPTION} off"
        ]
    if 2 * sum(scale > 0 for scale in scales) <= len(scales):
        what, other = ("larger", "relative") if kind == "inverse" else ("smaller", "inverse")
        return [
            f"{file}: in most maps, not only this one, {what} values lie farther away, so that they are not {kind}: "
            f"give {OPTION} {other}"
        ]
    return []
