"""Checks of a capture before training starts; each problem is reported with its fix.

The check functions return lines. `raise_together` raises on every rank with the lines of all ranks.
"""

import json
import math
import re
from collections import defaultdict
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import torch
from nerfstudio.cameras.cameras import CAMERA_MODEL_TO_TYPE, Cameras, CameraType
from torch import Tensor

from ns_multigpu.core.assign.balanced_views import depths_seen
from ns_multigpu.core.dist.collectives import all_gather_objects, broadcast_object
from ns_multigpu.core.dist.world import World
from ns_multigpu.core.types import SSIM_HALO, View
from ns_multigpu.plugin.capture.image_files import FRAME_FILES
from ns_multigpu.plugin.capture.opencv_cameras import DISTORTIONS, OpenCVCameras
from ns_multigpu.plugin.capture.split_lists import missing_list
from ns_multigpu.plugin.faults.errors import InputError

RENDERED = (CameraType.PERSPECTIVE, CameraType.FISHEYE, CameraType.FISHEYE624)
"""Camera models whose images can be undistorted to a pinhole camera's."""

DIFFERENT = "The ranks have read different captures. Copy one to all machines, or put it where all of them can read it:"
"""Headline of the list of differences between ranks."""

_ROUNDING = 1e-4
"""Relative tolerance between numbers that machines compute from the same files."""

_SIMILAR = 0.05
"""Relative tolerance between focal lengths that are given twice."""

_NUMBERS = ("fl_x", "fl_y", "cx", "cy", "w", "h")
"""Intrinsics of a transforms.json besides `DISTORTIONS`."""

_FULL, _NAMED, _MOST_LINES = 3, 8, 30
"""Number of problems of one kind that are printed in full, of those that are named instead, and of lines."""

RIGID = 1e-2
"""Largest difference of an entry of R^T R from the identity's; poses written with three digits stay well below."""


def raise_together(problems: Sequence[str], world: World, headline: str) -> None:
    """Raise on every rank, with the problems of all ranks, if any rank has one. Every rank calls it.

    Args:
        problems: this rank's problems, a line each.
        headline: first line of the message; "{count}" in it is replaced by the number of problems.

    Raises:
        InputError: a rank has a problem. The message names the machines if not all of them have it.
    """
    seen: defaultdict[str, set[int]] = defaultdict(set)
    for rank, part in enumerate(all_gather_objects(list(problems), world)):
        for line in part:
            seen[line].add(world.machine_of(rank))
    if seen:
        lines = [
            line + ("" if len(seen[line]) == world.machines else f" (seen on {_machines(seen[line], world)})")
            for line in sorted(seen, key=_natural)
        ]
        raise listed(headline, lines)


def listed(headline: str, problems: Sequence[str]) -> InputError:
    """Return the error that lists problems: of many of one kind the first, and names of some others.

    Problems are of one kind if they differ only in what stands before their first ": ", and in numbers.

    Args:
        headline: first line; "{count}" in it is replaced by the number of problems.
        problems: a line each.
    """
    kinds: defaultdict[str, list[str]] = defaultdict(list)
    for line in problems:
        name, _, fault = line.partition(": ")
        word, kind, whole = (re.sub(r"\d+", "", text) for text in (Path(name).stem, fault, line))
        kinds[kind.replace(word, "") or whole].append(line)
    lines: list[str] = []
    for same in kinds.values():
        if len(same) <= _FULL:
            lines += same
            continue
        names = sorted(Path(line.partition(": ")[0]).name for line in same[1:])
        more = ", ..." if len(names) > _NAMED else ""
        lines += [same[0], f"  and {len(names):,} more like it: {', '.join(names[:_NAMED])}{more}"]
    if len(lines) > _MOST_LINES:
        lines[_MOST_LINES:] = [f"and {len(lines) - _MOST_LINES:,} more lines"]
    return InputError("\n  ".join([headline.replace("{count}", str(len(problems))), *lines]))


def check_far_plane(far: float, points: Tensor, views: Sequence[View], world: World) -> None:
    """Raise if no seed point is within the far plane for most views that see any. Every rank calls it.

    Args:
        far: depth of the plane. points: [N, 3]. Both in world units.

    Raises:
        InputError: on every rank; rank 0 decides.
    """
    nearest: list[float] = []
    if world.is_main:
        nearest = sorted(float(depths.min()) for depths in depths_seen(points.cpu(), views) if len(depths))
    nearest = broadcast_object(nearest, 0, world)
    empty = sum(depth > far for depth in nearest)
    if 2 * empty > len(nearest):
        raise InputError(
            f"--pipeline.model.far-plane {far:g}: {empty} of {len(nearest)} training views see no seed point within. "
            f"Half of the views see none nearer than {nearest[len(nearest) // 2]:.3g}. Give a larger depth, in the "
            "same units, or leave the option out."
        )


def _machines(numbers: Collection[int], world: World) -> str:
    return ", ".join(map(world.machine_name, sorted(numbers)))


def camera_problems(cameras: Cameras, names: Sequence[str], *, undistort: bool = True) -> list[str]:
    """Check poses, intrinsics and camera models.

    Args:
        cameras: [n], as the dataset has them (distortion still in).
        names: [n] image names, which identify views in the messages.
        undistort: False if images are drawn through their lenses.

    Returns:
        A line for each faulty view and reason.
    """
    if len(cameras) != len(names):
        return [f"{len(names)} images for {len(cameras)} cameras: the lists must be equally long"]
    found: dict[str, Tensor] = {}
    poses = cameras.camera_to_worlds.detach().double().cpu()
    finite = poses.isfinite().flatten(1).all(1)
    found["its pose is NaN or infinite"] = ~finite
    rotation = torch.where(finite[:, None, None], poses[:, :3, :3], torch.eye(3, dtype=poses.dtype))
    off = (rotation.transpose(1, 2) @ rotation - torch.eye(3, dtype=poses.dtype)).abs().flatten(1).amax(1)
    found["its pose is not rigid: the rotation's columns are not of length 1 and at right angles"] = off > RIGID
    found["its pose is mirrored: the rotation has determinant -1; flip one axis"] = (off <= RIGID) & (
        torch.linalg.det(rotation) < 0
    )
    focal = torch.cat([cameras.fx, cameras.fy], dim=-1).cpu()
    found["its focal length is zero, negative, NaN or infinite"] = ~(focal.isfinite() & (focal > 0)).all(1)
    found["its principal point is NaN or infinite"] = ~torch.cat([cameras.cx, cameras.cy], -1).cpu().isfinite().all(1)
    found["its width or height is below 1"] = (torch.cat([cameras.width, cameras.height], -1).cpu() < 1).any(1)
    if cameras.times is not None:
        found["its time is NaN or infinite"] = ~cameras.times.cpu().isfinite().reshape(-1)
    if cameras.distortion_params is not None:
        found["a distortion parameter is NaN or infinite"] = ~cameras.distortion_params.cpu().isfinite().all(1)
    lines = [f"{names[i]}: {what}" for what, wrong in found.items() for i in wrong.nonzero().flatten().tolist()]
    if not bool(finite.any()) and len(names) > 1:
        lines.append("(Where a dataparser centres the cameras, one bad pose spoils all: look for NaN in its file.)")
    return lines + _model_problems(cameras, names, undistort)


def _model_problems(cameras: Cameras, names: Sequence[str], undistort: bool) -> list[str]:
    usable = ", ".join(kind.name for kind in (*RENDERED, *([] if undistort else [CameraType.EQUIRECTANGULAR])))
    lines: list[str] = []
    for number, name in zip(cameras.camera_type.flatten().tolist(), names, strict=True):
        kind = CameraType(number)
        if kind is CameraType.EQUIRECTANGULAR:
            if undistort:
                option = "--pipeline.datamanager.undistort False"
                lines.append(f"{name}: camera model EQUIRECTANGULAR cannot be undistorted; draw it as it is: {option}")
        elif kind not in RENDERED:
            lines.append(f"{name}: camera model {kind.name} cannot be splatted; {usable} can")
        elif kind is CameraType.FISHEYE624 and "fisheye_crop_radius" not in (cameras.metadata or {}):
            lines.append(f"{name}: camera model FISHEYE624 needs a fisheye_crop_radius")
    if cameras.distortion_params is not None and not isinstance(cameras, OpenCVCameras):
        fourth = (cameras.camera_type.flatten() == CameraType.PERSPECTIVE.value) & (
            cameras.distortion_params[:, 3] != 0
        )
        lines += [
            f"{names[i]}: distortion parameter k4 of a perspective camera is read from COLMAP's model and from "
            "transforms.json only; undistort the images"
            for i in fourth.nonzero().flatten().tolist()
        ]
    return lines


def list_problems(names: Sequence[Path], cameras: Cameras, masks: Sequence[Path] | None) -> list[str]:
    """Check the list of image files: number of masks, duplicate files with different poses.

    Args:
        names: image files.
        cameras: one for each image.
        masks: mask files, if there are any.
    """
    lines: list[str] = []
    if masks is not None and len(masks) != len(names):
        lines.append(f"{len(masks)} masks for {len(names)} images: every image needs one, or none has one")
    places: defaultdict[Path, list[int]] = defaultdict(list)
    for index, name in enumerate(names):
        places[name].append(index)
    for name, indices in places.items():
        poses = cameras.camera_to_worlds[indices]
        # A repeated frame only counts double; one picture with two poses is a fault.
        if len(indices) > 1 and not torch.allclose(poses, poses[:1].expand_as(poses), equal_nan=True):
            lines.append(f"{name}: listed {len(indices)} times, with different poses")
    return lines


def small_problems(sizes: Sequence[tuple[int, int]], names: Sequence[Path], model: Any) -> list[str]:
    """Check that images are not smaller than SSIM's window at the resolution that training begins with.

    Args:
        sizes: (width, height) of each image.
        names: of the images.
        model: the model's configuration; the check is for those with SSIM in their loss.
    """
    if getattr(model, "ssim_lambda", 0) == 0:
        return []
    least = (2 * SSIM_HALO + 1) * 2**model.num_downscales
    small = [(*size, name) for size, name in zip(sizes, names, strict=True) if min(size) < least]
    if not small:
        return []
    width, height, name = min(small, key=lambda row: min(row[:2]))
    halvings = (min(width, height) // (2 * SSIM_HALO + 1)).bit_length() - 1
    remedy = "ssim-lambda 0" if halvings < 0 else f"num-downscales {halvings}"
    return [
        f"{len(small)} image(s) have fewer than {least} pixels each way, which the loss (SSIM) needs with "
        f"--pipeline.model.num-downscales {model.num_downscales}: {name} has {width}x{height}. Give larger images, or "
        f"--pipeline.model.{remedy}"
    ]


def transforms_problems(data: Path) -> list[str]:
    """Check the frames of a transforms.json. Run it first: a dataparser's centring spreads one bad pose to all.

    Args:
        data: the file, or its folder; no problem is reported if the file does not exist.
    """
    path = data if data.suffix == ".json" else data / "transforms.json"
    try:
        text = path.read_text("utf8")
        meta: Any = json.loads(text.removeprefix("\ufeff"))
    except FileNotFoundError:
        return []
    except UnicodeDecodeError:
        return [f"{path}: it is not in UTF-8: save it so"]
    except ValueError as error:
        return [f"{path}: not valid JSON ({error})"]
    if text.startswith("\ufeff"):
        return [f"{path}: it begins with a byte order mark (Windows): save it as UTF-8 without one"]
    if not isinstance(meta, dict) or not isinstance(meta.get("frames"), list) or not meta["frames"]:
        return [f"{path}: it has no list of frames"]
    if not all(isinstance(frame, dict) for frame in meta["frames"]):
        return [f"{path}: its list of frames holds something else than frames"]
    lines = [f"{path}: {line}" for line in _partial_problems(meta, meta["frames"])]
    model = CAMERA_MODEL_TO_TYPE.get(meta.get("camera_model", "PINHOLE"))
    if model is None:
        lines.append(
            f"{path}: camera model {meta['camera_model']} is unknown; {', '.join(CAMERA_MODEL_TO_TYPE)} are known"
        )
    lines += _number_problems(str(path), meta, model)
    if missing := missing_list(lambda name: f"{name}_filenames" in meta, "{}_filenames"):
        lines.append(f"{path}: it has {missing}")
    for number, frame in enumerate(meta["frames"]):
        name = frame.get("file_path", f"frame {number}")
        lines += _number_problems(name, frame, model)
        if "file_path" not in frame:
            lines.append(f"{name}: it has no file_path")
        matrix = frame.get("transform_matrix")
        shape = (len(matrix), {len(row) for row in matrix}) if _is_table(matrix) else None
        if shape == (3, {4}):
            lines.append(f"{name}: its transform_matrix has 3 rows of 4 numbers: add the row [0, 0, 0, 1]")
        elif shape != (4, {4}):
            lines.append(f"{name}: its transform_matrix is not a table of 4 x 4 numbers")
        elif matrix[3] != [0, 0, 0, 1] and not any(row[3] for row in matrix[:3]):
            lines.append(f"{name}: the last row of its transform_matrix is {matrix[3]}, not [0, 0, 0, 1]: transpose it")
        elif not all(math.isfinite(value) for row in matrix[:3] for value in row):
            lines.append(f"{name}: its pose is NaN or infinite")
    return lines


def _partial_problems(meta: dict[str, Any], frames: Sequence[dict[str, Any]]) -> list[str]:
    """Check the keys that all frames need, those that all or none may have, and the lengths of lists."""
    lines: list[str] = []
    missing = [key for key in _NUMBERS if key not in meta and not all(key in frame for frame in frames)]
    if missing:
        angle = ". Of camera_angle_x, which is not read: fl_x = w / 2 / tan(camera_angle_x / 2)"
        hint = angle if "camera_angle_x" in meta else ""
        lines.append(f"it has no {', '.join(missing)}, and needs them for all frames or for each{hint}")
    for key in ("mask_path", "depth_file_path", *FRAME_FILES):
        without = [str(frame.get("file_path")) for frame in frames if key not in frame]
        if 0 < len(without) < len(frames):
            lines.append(
                f"{len(without)} of {len(frames)} frames have no {key} ({without[0]} first): give it to all or none"
            )
    for key, lengths, needed in (
        ("distortion_params", (6, 12), "6 or 12 numbers"),
        ("applied_transform", (3,), "3 rows of 4 numbers"),
    ):
        for value in (entry[key] for entry in (meta, *frames) if key in entry):
            if not isinstance(value, list) or len(value) not in lengths:
                lines.append(f"its {key} is {json.dumps(value)[:60]}, and must have {needed}")
    return lines


def _number_problems(name: str, entry: dict[str, Any], model: CameraType | None) -> list[str]:
    """Check the intrinsics of a transforms.json or of one of its frames."""
    lines: list[str] = []
    for key in (*_NUMBERS, *DISTORTIONS):
        if key not in entry:
            continue
        try:
            value = int(entry[key]) if key in ("w", "h") else float(entry[key])
        except (TypeError, ValueError, OverflowError):
            kind = "a whole number" if key in ("w", "h") else "a number"
            lines.append(f"{name}: its {key} is {json.dumps(entry[key])}, and must be {kind}")
            continue
        if not math.isfinite(value) or (key.startswith("fl_") and value <= 0):
            lines.append(f"{name}: its {key} is {value:g}")
        elif key in ("k5", "k6") and value != 0 and model is not CameraType.PERSPECTIVE:
            lines.append(f"{name}: its {key} is {value:g}, and lenses of the camera_model have none: remove it")
    return lines


def transforms_notes(meta: dict[str, Any]) -> list[str]:
    """Return notes about intrinsics of a valid transforms.json that contradict each other."""
    notes: list[str] = []
    if "camera_angle_x" in meta and "fl_x" in meta and "w" in meta:
        focal = float(meta["w"]) / 2 / math.tan(float(meta["camera_angle_x"]) / 2)
        if not math.isclose(focal, float(meta["fl_x"]), rel_tol=_SIMILAR):
            notes.append(
                f"camera_angle_x would be fl_x = {focal:.1f}, and fl_x is {float(meta['fl_x']):.1f}, which is used"
            )
    values = {key: float(meta[key]) for key in _NUMBERS if key in meta}
    if any(key in meta for key in DISTORTIONS):
        values |= {key: float(meta.get(key, 0)) for key in DISTORTIONS}
    other: defaultdict[str, int] = defaultdict(int)
    for frame in meta["frames"]:
        for key, value in values.items():
            other[key] += key in frame and not math.isclose(float(frame[key]), value, rel_tol=_ROUNDING)
    keys = [key for key, count in other.items() if count]
    if keys:
        count = max(other.values())
        notes.append(f"{', '.join(keys)}: {count} frames differ from the values for all frames; those for all are used")
    return notes


def _is_table(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(row, list) and all(isinstance(v, (int, float)) for v in row) for row in value
    )


def different_captures(
    cameras: Cameras, names: Sequence[str], world: World, sizes: Sequence[int] | None = None
) -> list[str]:
    """Compare every rank's capture with rank 0's; return a line for each rank that differs. Every rank calls it.

    Poses and intrinsics may differ by rounding, since processors differ; everything else must be equal.

    Args:
        cameras: as the dataset has them.
        names: of their images.
        sizes: bytes of the image files; None if images are not files.
    """
    poses = cameras.camera_to_worlds.detach().double().cpu()
    numbers = torch.cat([cameras.width, cameras.height, cameras.fx, cameras.fy, cameras.cx, cameras.cy], -1).cpu()
    mine = (list(names), numbers, None if sizes is None else list(sizes), poses)
    first = broadcast_object(mine if world.is_main else None, 0, world)
    return [
        f"{world.machine_name(world.machine_of(rank)) if world.machines > 1 else f'rank {rank}'} has {what}"
        for rank, what in enumerate(all_gather_objects(_difference(mine, first), world))
        if what
    ]


_Read = tuple[list[str], Tensor, list[int] | None, Tensor]
"""One rank's capture: image names, camera sizes and intrinsics, bytes of the files, poses."""


def _difference(mine: _Read, first: _Read) -> str:
    """Describe the first difference between a rank's capture and rank 0's; "" if none."""
    (names, numbers, sizes, poses), (names_0, numbers_0, sizes_0, poses_0) = mine, first
    if len(names) != len(names_0):
        return f"{len(names)} views and rank 0 has {len(names_0)}"
    if unlike := [index for index, name in enumerate(names) if name != names_0[index]]:
        index, count = unlike[0], len(unlike)
        return f"image files of other names than rank 0, {count} of them: view {index} is {names[index]}, and " + (
            f"{names_0[index]} there"
        )
    if len(numbers) != len(numbers_0) or len(numbers) != len(names):
        return ""  # `camera_problems` reports the unequal counts
    scale = poses_0[poses_0.isfinite()].abs().amax().item() if bool(poses_0.isfinite().any()) else 1.0
    other_poses = ~torch.isclose(poses, poses_0, rtol=0, atol=_ROUNDING * scale, equal_nan=True).flatten(1).all(1)
    other_numbers = ~torch.isclose(numbers, numbers_0, rtol=_ROUNDING, atol=0, equal_nan=True).all(1)
    other_files = torch.tensor([one != other for one, other in zip(sizes or names, sizes_0 or names_0, strict=True)])
    for what, wrong in (("sizes or intrinsics", other_numbers), ("poses", other_poses), ("files", other_files)):
        if bool(wrong.any()):
            index = int(wrong.nonzero()[0])
            count = int(wrong.sum())
            return f"other {what} than rank 0: of {count} view{'' if count == 1 else 's'}, {names[index]} first"
    return ""


def different_points(points: tuple[Tensor, Tensor] | None, world: World) -> list[str]:
    """Compare every rank's seed points with rank 0's; return a line for each rank that differs. Every rank calls it.

    Args:
        points: positions [n, 3] and colours [n, 3]; None for none.
    """
    sums = (0, 0.0, 0.0) if points is None else (len(points[0]), *(float(x.double().abs().sum()) for x in points))
    everyone = all_gather_objects(sums, world)
    lines: list[str] = []
    for rank, seeds in enumerate(everyone):
        who = world.machine_name(world.machine_of(rank)) if world.machines > 1 else f"rank {rank}"
        if seeds[0] != everyone[0][0]:
            lines.append(f"{who} has {seeds[0]} seed points and rank 0 has {everyone[0][0]}")
        elif not all(math.isclose(*pair, rel_tol=_ROUNDING) for pair in zip(seeds[1:], everyone[0][1:], strict=True)):
            lines.append(f"{who} has other seed points than rank 0")
    return lines


def _natural(line: str) -> list[tuple[int, str]]:
    """Return a sort key that puts "view 10" after "view 9"."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", line)]
