"""Seed points of a capture: invalid ones, equal ones, and the number of points that each view sees.

Lens distortion is ignored: the count shows only whether cameras and points lie in the same frame.
"""

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from nerfstudio.data.dataparsers.base_dataparser import DataparserOutputs
from numpy.typing import NDArray
from torch import Tensor

_VIEWS, _POINTS, _POINTS_IN_DOUBT = 100, 1000, 50_000
"""Largest numbers of views and points that a count samples; more points are counted before a capture is refused."""
_AT_ONCE = 200_000
"""Number of pairs of a view and a point that are counted at once."""
_FEW_VIEWS = 0.1
"""Share of views that see a seed point, below which a capture is refused."""
_EMPTY = 0.1
"""Share of views that see no seed point, above which a note is printed."""
_LEAST = 100
"""Number of seed points from which on it is: views may miss fewer by chance."""
_BETTER = 2.0
"""Factor by which another reading of the poses must show more points for a capture to be refused."""
_PLAUSIBLE = 0.5
"""Share of views that must see a seed point with another reading."""
_SEVERAL, _DOT = 5, 0.03
"""Number of points that are expected to spread over more than this share of an image's width or height."""
FLIP = np.diag([1.0, -1.0, -1.0, 1.0])
"""OpenCV's axes (y down, z forward) from OpenGL's (y up, z back), and back."""

_Floats = NDArray[np.float64]

_TRANSFORMS = (
    "the poses have OpenCV's axes: negate columns 2 and 3 of each transform_matrix",
    "the poses are world-to-camera: invert each transform_matrix",
    "the poses are world-to-camera with OpenCV's axes: invert each transform_matrix, then negate its columns 2 and 3",
)
_COLMAP = (
    "the poses have OpenGL's axes: negate rows 2 and 3 of each world-to-camera matrix",
    "the poses are camera-to-world: invert each",
    "the poses are camera-to-world with OpenGL's axes: negate columns 2 and 3 of each, then invert it",
    "the translations are the cameras' places c: COLMAP's are -R c",
)


@dataclass(frozen=True)
class CaptureViews:
    """Views of a capture, without distortion.

    Attributes:
        poses: [n, 4, 4] camera-to-world, OpenGL's axes (x right, y up, z back).
        lenses: [n, 4] focal lengths fx, fy and principal point cx, cy in pixels.
        sizes: [n, 2] width and height in pixels.
        is_colmap: True if the file holds world-to-camera poses with OpenCV's axes.
        is_panorama: True if the images are equirectangular, with focal lengths in pixels per half turn.
    """

    poses: _Floats
    lenses: _Floats
    sizes: _Floats
    is_colmap: bool = False
    is_panorama: bool = False


def some_seeds(outputs: DataparserOutputs, most: int) -> _Floats:
    """Return about `most` of a capture's seed points, evenly chosen, [n, 3] in world units; all if they are fewer."""
    known = outputs.metadata.get("points3D_xyz")
    return np.zeros((0, 3)) if known is None else known[:: max(1, len(known) // most)].double().cpu().numpy()


def invalid_points(file: Path, xyz: _Floats) -> str | None:
    """Return the problem of seed points [n, 3] that are no numbers or lie at one place; None if there is none."""
    wrong = np.flatnonzero(~np.isfinite(xyz).all(axis=1))
    if len(wrong):
        more = f" and {len(wrong) - 1} more of {len(xyz)} are" if len(wrong) > 1 else f" of {len(xyz)} is"
        return f"{file}: point {wrong[0] + 1}{more} NaN or infinite: remove them"
    if len(xyz) > 1 and (xyz == xyz[0]).all():
        return f"{file}: all {len(xyz)} points lie at one place. Give the points of the scene"
    return None


def rounded_points(file: Path, xyz: _Floats) -> str | None:
    """Return a note if the seed points [n, 3] of a capture far from the origin have been rounded to float32."""
    if len(xyz) == 0 or not (xyz == xyz.astype(np.float32)).all():
        return None
    step = np.spacing(np.abs(xyz).max().astype(np.float32))
    return f"{file}: its points are rounded to float32, in steps of {step:.2g}. Write coordinates as text or double"


def distinct_rows(xyz: NDArray[np.float32]) -> NDArray[np.int64] | None:
    """Return the first row of each position of `xyz` [n, 3], in order; None if no two rows are equal."""
    # 64-bit keys are quicker to sort than rows.
    words = np.ascontiguousarray(xyz + np.float32(0)).view(np.uint32).astype(np.uint64)  # + 0: -0 is 0
    keys = (words * np.array([0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9], np.uint64)).sum(axis=1)
    rows = np.sort(np.unique(keys, return_index=True)[1])
    return None if len(rows) == len(xyz) else rows


def merged(points: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return a dataparser's seed points without those at the position of an earlier one.

    Splats begin with the distance of the next points, which would be zero.
    """
    xyz = points.get("points3D_xyz")
    rows = None if xyz is None else distinct_rows(xyz.numpy())
    if xyz is None or rows is None:
        return points
    return {name: values[rows] if len(values) == len(xyz) else values for name, values in points.items()}


def seen_points(views: CaptureViews, xyz: _Floats) -> NDArray[np.int64]:
    """Return for each view the number of points [n] in front of its camera and inside its image.

    Several points within a dot of the image count as none: they are a scene far away.

    Args:
        views: n views.
        xyz: [m, 3] positions in the poses' frame.
    """
    to_camera, at_once = np.linalg.inv(views.poses), max(1, _AT_ONCE // len(xyz))
    parts = [slice(first, first + at_once) for first in range(0, len(to_camera), at_once)]
    return np.concatenate([_seen(views, part, to_camera[part], xyz) for part in parts])


def _seen(views: CaptureViews, part: slice, to_camera: _Floats, xyz: _Floats) -> NDArray[np.int64]:
    x, y, z = np.moveaxis(to_camera[:, :3, :3] @ xyz.T + to_camera[:, :3, 3:], 1, 0)
    fx, fy, cx, cy = views.lenses[part].T[:, :, None]
    width, height = views.sizes[part].T[:, :, None]
    with np.errstate(divide="ignore", invalid="ignore"):
        if views.is_panorama:
            x, y, z = np.arctan2(x, -z) / np.pi, np.arctan2(y, np.hypot(x, z)) / np.pi, np.full_like(z, -1.0)
        u, v = (cx - fx * x / z) / width, (cy + fy * y / z) / height
    seen = (z < 0) & (u >= 0) & (u < 1) & (v >= 0) & (v < 1)
    counts = np.count_nonzero(seen, axis=1)
    extent = [np.where(seen, at, 0).max(axis=1) - np.where(seen, at, 1).min(axis=1) for at in (u, v)]
    return np.where((counts < _SEVERAL) | (np.maximum(*extent) > _DOT), counts, 0)


def unseen_problem(views: CaptureViews, xyz: _Floats) -> str | None:
    """Return the reason why cameras and seed points do not fit together, and the likely fix; None if they do.

    Args:
        views: the capture's views.
        xyz: [m, 3] the seed points in the poses' frame.
    """
    some, xyz = _countable(views, xyz)
    if len(xyz) == 0:
        return None
    problem = _problem(some, _sample(xyz, _POINTS))
    return problem if problem is None or len(xyz) <= _POINTS else _problem(some, _sample(xyz, _POINTS_IN_DOUBT))


def unseen_note(views: CaptureViews, xyz: _Floats) -> str | None:
    """Return a note if many views see no seed point; arguments as in `unseen_problem`."""
    some, xyz = _countable(views, xyz)
    if len(xyz) < _LEAST:
        return None
    seen = seen_points(some, _sample(xyz, _POINTS))
    if np.mean(seen == 0) > _EMPTY:
        seen = seen_points(some, _sample(xyz, _POINTS_IN_DOUBT))
    if np.mean(seen == 0) <= _EMPTY:
        return None
    return (
        f"{_share(seen == 0)} of the views, of {len(seen)} looked at, see no seed point, so training begins without "
        "anything in them. If they are of another scene, leave them out"
    )


def _countable(views: CaptureViews, xyz: _Floats) -> tuple[CaptureViews, _Floats]:
    """Return a sample of the views, and the finite points; no points if a pose is invalid, which other checks name."""
    xyz = xyz[np.isfinite(xyz).all(axis=1)]
    if not np.isfinite(views.poses).all() or np.any(np.linalg.det(views.poses) == 0):
        xyz = xyz[:0]
    step = -(-len(views.poses) // _VIEWS)
    return replace(views, poses=views.poses[::step], lenses=views.lenses[::step], sizes=views.sizes[::step]), xyz


def _sample(xyz: _Floats, most: int) -> _Floats:
    return xyz[:: -(-len(xyz) // most)]


def _problem(views: CaptureViews, xyz: _Floats) -> str | None:
    poses, back = views.poses, np.linalg.inv(views.poses)
    others = [poses @ FLIP, FLIP @ back @ FLIP, FLIP @ back] if views.is_colmap else [poses @ FLIP, back, back @ FLIP]
    if views.is_colmap:
        placed = poses.copy()
        placed[:, :3, 3] = (FLIP @ back)[:, :3, 3]
        others.append(placed)
    usual, *counts = (seen_points(replace(views, poses=reading), xyz) for reading in (poses, *others))
    best = max(range(len(counts)), key=lambda k: counts[k].sum())
    is_better = counts[best].sum() > _BETTER * usual.sum() and np.mean(counts[best] > 0) >= _PLAUSIBLE
    if np.mean(usual > 0) >= _FEW_VIEWS and not (is_better and len(xyz) >= 10):
        return None
    line = f"{_share(usual > 0)} of the views see a seed point, and a view sees {_share(usual / len(xyz))} of them"
    if is_better:
        reason = (_COLMAP if views.is_colmap else _TRANSFORMS)[best]
        seen, share = _share(counts[best] > 0), _share(counts[best] / len(xyz))
        return f"{line}. Likely {reason}. Then {seen} of the views see one, and a view sees {share} of them"
    return (
        f"{line}. Likely the points lie in another frame than the cameras: the median of the points is "
        f"{_place(xyz)}, of the cameras {_place(poses[:, :3, 3])}. Give points in the cameras' frame. If they are, the "
        "rotations or the intrinsics are wrong"
    )


def _share(values: NDArray[np.generic]) -> str:
    share = float(np.mean(values.astype(float)))
    return f"{share:.0%}" if share == 0 or share >= 0.01 else "less than 1%"


def _place(xyz: _Floats) -> str:
    return "(" + ", ".join(f"{value:.6g}" for value in np.median(xyz, axis=0)) + ")"
