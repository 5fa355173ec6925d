"""A reconstruction with tracks in COLMAP's files, of cameras that look at a cloud of points, and what they see."""

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import cv2
import numpy as np
from nerfstudio.data.utils import colmap_parsing_utils as colmap
from numpy.typing import NDArray
from PIL import Image
from scipy.spatial.transform import Rotation

WIDTH, HEIGHT, FOCAL = 48, 36, 40.0
LENS = (-0.12, 0.03, 0.004, -0.006)
EIGHT = (*LENS, 0.01, 0.2, -0.06, 0.04)
"""Coefficients in OpenCV's order: k1, k2, p1, p2, and k3 to k6."""
Table = NDArray[np.float64]


@dataclass
class Scene:
    """Cameras and points, in COLMAP's world.

    Attributes:
        poses: [n, 4, 4] world-to-camera, OpenCV's axes.
        points: [P, 3], and of each the images whose numbers are in its track: from 1 on, some twice.
        lens: k1, k2, p1, p2, or these and k3, k4, k5, k6.
    """

    poses: Table
    points: Table
    tracks: list[list[int]]
    lens: tuple[float, ...] = (0.0, 0.0, 0.0, 0.0)
    names: list[str] = field(default_factory=list[str])

    @property
    def intrinsics(self) -> Table:
        return np.array([[FOCAL, 0, WIDTH / 2 + 1], [0, FOCAL * 1.1, HEIGHT / 2 - 0.5], [0, 0, 1]])

    def seen(self, image: int) -> tuple[Table, Table]:
        """Return the pixels [K, 2] of its track's points in the image of this number, and their depths [K]."""
        rows = [row for row, track in enumerate(self.tracks) if image in track]
        pose = self.poses[image - 1]
        if not rows:
            return np.zeros((0, 2)), np.zeros(0)
        depths = (self.points[rows] @ pose[:3, :3].T + pose[:3, 3])[:, 2]
        turned, _ = cv2.Rodrigues(pose[:3, :3])
        places, _ = cv2.projectPoints(self.points[rows], turned, pose[:3, 3], self.intrinsics, np.array(self.lens))
        return places[:, 0], depths


def make_scene(views: int = 9, points: int = 60, lens: Any = (0.0, 0.0, 0.0, 0.0), seed: int = 3) -> Scene:
    """Cameras on a circle around the points, all of it turned, moved and made larger at random.

    Some points lie behind a camera of their track, and some outside of its image.
    """
    rng = np.random.default_rng(seed)
    turn, shift, size = Rotation.random(random_state=seed).as_matrix(), rng.normal(size=3), 3.7
    poses = np.tile(np.eye(4), (views, 1, 1))
    for i in range(views):
        around = Rotation.from_euler("yx", [360 * i / views, 10 + 3 * i], degrees=True).as_matrix()
        poses[i, :3, :3] = around @ turn.T
        poses[i, :3, 3] = size * np.array([0, 0, 2.0]) - poses[i, :3, :3] @ shift
    cloud = rng.uniform(-1, 1, (points, 3))
    cloud[::7] *= 4
    tracks = [sorted(rng.choice(views, rng.integers(2, 6), replace=False) + 1) for _ in range(points)]
    tracks = [[int(n) for n in track] for track in tracks]
    tracks[1].append(tracks[1][0])  # an image that has found a point twice
    names = [f"shots/{i:02d}.jpg" if i % 2 else f"{i:02d}.jpg" for i in range(views)]
    return Scene(poses, size * cloud @ turn.T + shift, tracks, tuple(lens), names)


def moved(scene: Scene, place: Any) -> Scene:
    """Return the scene with the origin moved to `place` [3]."""
    poses = scene.poses.copy()
    poses[:, :3, 3] -= poses[:, :3, :3] @ np.array(place)
    return replace(scene, poses=poses, points=scene.points + place)


def write_model(folder: Path, scene: Scene, *, text: bool = False) -> None:
    """COLMAP's three files, with keypoints that belong to tracks."""
    folder.mkdir(parents=True, exist_ok=True)
    K, end = scene.intrinsics, "txt" if text else "bin"
    params = np.array([K[0, 0], K[1, 1], K[0, 2], K[1, 2], *scene.lens])
    cameras = {1: colmap.Camera(1, "OPENCV" if len(scene.lens) == 4 else "FULL_OPENCV", WIDTH, HEIGHT, params)}
    images, points, found = {}, {}, {row: [] for row in range(len(scene.points))}
    for i, pose in enumerate(scene.poses):
        rows = [row for row, track in enumerate(scene.tracks) for n in track if n == i + 1]
        places = dict(zip(sorted(set(rows)), scene.seen(i + 1)[0], strict=True))
        xys = np.array([places[row] for row in rows]).reshape(-1, 2)
        for k, row in enumerate(rows):
            found[row].append((i + 1, k))
        turned = Rotation.from_matrix(pose[:3, :3]).as_quat()[[3, 0, 1, 2]]
        ids = np.array([row + 5 for row in rows], dtype=np.int64)
        images[i + 1] = colmap.Image(i + 1, turned, pose[:3, 3], 1, scene.names[i], xys, ids)
    for row, place in enumerate(scene.points):
        track = np.array(found[row], dtype=np.int64).reshape(-1, 2)
        points[row + 5] = colmap.Point3D(row + 5, place, np.array([9, 8, 7]), 0.5, track[:, 0], track[:, 1])
    for kind, table in (("cameras", cameras), ("images", images), ("points3D", points)):
        write = getattr(colmap, f"write_{kind}_{'text' if text else 'binary'}")
        write(table, folder / f"{kind}.{end}")


def write_images(folder: Path, scene: Scene, factor: int = 1) -> None:
    for i, name in enumerate(scene.names):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        shape = (HEIGHT // factor, WIDTH // factor, 3)
        Image.fromarray(np.random.default_rng(i).integers(0, 256, shape, dtype=np.uint8)).save(path)


def write_transforms(folder: Path, scene: Scene, applied: Table | None, model: Path) -> None:
    """The same as a nerfstudio capture with COLMAP's model in it.

    Args:
        applied: [3, 4] what its poses were turned by, and the file says so; None for what older files leave unsaid.
    """
    turned = np.array([[0.0, 1, 0, 0], [1, 0, 0, 0], [0, 0, -1, 0]]) if applied is None else applied
    frames = []
    for name, pose in zip(scene.names, scene.poses, strict=True):
        matrix = np.concatenate([turned, [[0, 0, 0, 1]]]) @ np.linalg.inv(pose) @ np.diag([1.0, -1, -1, 1])
        frames.append({"file_path": f"images/{name}", "transform_matrix": matrix.tolist()})
    K = scene.intrinsics
    meta: dict[str, Any] = {"w": WIDTH, "h": HEIGHT, "fl_x": K[0, 0], "fl_y": K[1, 1], "cx": K[0, 2], "cy": K[1, 2]}
    meta |= {**dict(zip(("k1", "k2", "p1", "p2", "k3", "k4", "k5", "k6"), scene.lens, strict=False)), "frames": frames}
    if applied is not None:
        meta["applied_transform"] = applied.tolist()
    write_images(folder / "images", scene)
    (folder / "transforms.json").write_text(json.dumps(meta))
    write_model(folder / model, scene)


def add_model(folder: Path) -> None:
    """Give a nerfstudio capture COLMAP's model: 80 points around the middle of the world, seen by half of its views."""
    frames = json.loads((folder / "transforms.json").read_text())["frames"]
    turned = np.array([[0.0, 1, 0, 0], [1, 0, 0, 0], [0, 0, -1, 0], [0, 0, 0, 1]])  # as files without a word of it are
    poses = [np.linalg.inv(turned @ frame["transform_matrix"] @ np.diag([1.0, -1, -1, 1])) for frame in frames]
    rng = np.random.default_rng(7)
    tracks = [[int(n) + 1 for n in rng.choice(len(frames), len(frames) // 2, replace=False)] for _ in range(80)]
    names = [Path(frame["file_path"]).name for frame in frames]
    scene = Scene(np.stack(poses), rng.uniform(-0.4, 0.4, (80, 3)), tracks, names=names)
    write_model(folder / "colmap/sparse/0", scene)
