"""From nerfstudio's cameras to the core's views; and its crop boxes."""

import math
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from nerfstudio.cameras.cameras import Cameras, CameraType
from nerfstudio.data.scene_box import OrientedBox
from torch import Tensor

from cuda_ext.ops.project.lens import lens_intrinsics, panorama_intrinsics
from ns_multigpu.core.types import View


def in_box(box: OrientedBox, points: Tensor) -> Tensor:
    """Return [n] True for points [n, 3] in a box, as `OrientedBox.within`, which torch warns of: it copies tensors."""
    local = (points - box.T.to(points)) @ box.R.to(points)
    return (local.abs() < box.S.to(points) / 2).all(dim=-1)


def view_from_camera(camera: Cameras, camera_to_world: Tensor, index: int, downscale: int = 1) -> View:
    """Return the view of one camera, through its lens if it has distortion or is equirectangular.

    Args:
        camera: a single camera. An undistorted image's has no distortion, or only zeros.
        camera_to_world: [3, 4] pose to use, OpenGL axes; gradients flow to it.
        index: the view's number in its capture.
        downscale: renders at 1/downscale of the size, rounded down, as nerfstudio does.
    """
    return view_at(intrinsics_of(camera)[0], world_to_camera(camera_to_world), index, downscale)


class Intrinsics(NamedTuple):
    """Intrinsics of a camera in pixels (of a panorama, pixels per radian), and the time of its photograph in [0, 1].

    Attributes:
        lens: the numbers behind the matrix, see `cuda_ext.ops.project.lens`; none for a pinhole camera.
    """

    fx: float
    fy: float
    cx: float
    cy: float
    width: int
    height: int
    time: float
    lens: tuple[float, ...] = ()


def intrinsics_of(cameras: Cameras) -> list[Intrinsics]:
    """Return the intrinsics of each of these cameras. One camera alone costs a third of a millisecond.

    Raises:
        ValueError: a lens folds back at its axis.
    """
    tensors = (cameras.fx, cameras.fy, cameras.cx, cameras.cy, cameras.width, cameras.height)
    columns = [x.reshape(-1).tolist() for x in tensors]
    times = cameras.times.reshape(-1).tolist() if cameras.times is not None else [0.0] * len(columns[0])
    kinds = cameras.camera_type.reshape(-1).tolist()
    # nerfstudio's focal lengths of a panorama are pixels per half turn.
    columns[:2] = [
        [x / math.pi if kind == CameraType.EQUIRECTANGULAR.value else x for x, kind in zip(column, kinds, strict=True)]
        for column in columns[:2]
    ]
    return [Intrinsics(*row) for row in zip(*columns, times, _lenses(cameras, kinds, columns), strict=True)]


def _lenses(cameras: Cameras, kinds: list[int], columns: list[list[float]]) -> list[tuple[float, ...]]:
    """Return the numbers of each camera's lens behind its matrix; () for all if none has distortion or is a
    panorama."""
    params = cameras.distortion_params
    if CameraType.EQUIRECTANGULAR.value not in kinds and (params is None or not bool(params.any())):
        return [()] * len(columns[0])
    params = torch.zeros(len(kinds), 6) if params is None else params
    numbers: Any = zip(kinds, map(tuple, params.view(len(kinds), -1).tolist()), *columns, strict=True)
    return [_lens(*row) for row in numbers]


@lru_cache(maxsize=1 << 16)
def _lens(
    kind: int, params: tuple[float, ...], fx: float, fy: float, cx: float, cy: float, width: int, height: int
) -> tuple[float, ...]:
    """Return the 12 numbers of a lens, from k1, k2, k3, k4, p1, p2 and, if it has them, k5, k6; a fisheye has four."""
    K = torch.tensor([[fx, 0.0, cx], [0.0, fy, cy], [0.0, 0.0, 1.0]])
    if kind == CameraType.EQUIRECTANGULAR.value:
        return tuple(panorama_intrinsics(K)[3:].flatten().tolist())
    fisheye = kind == CameraType.FISHEYE.value
    given = params[:4] if fisheye else (*params[:4], *(params[6:] or (0.0, 0.0)), *params[4:6])
    return tuple(lens_intrinsics(K, (width, height), given, fisheye=fisheye)[3:].flatten().tolist())


def view_at(camera: Intrinsics, viewmat: Tensor, index: int, downscale: int = 1) -> View:
    """Return a view by its intrinsics and world-to-camera matrix [4, 4]; see `view_from_camera`."""
    scale = 1.0 / downscale
    fx, fy, cx, cy = (x * scale for x in camera[:4])
    numbers = (fx, 0.0, cx, 0.0, fy, cy, 0.0, 0.0, 1.0, *camera.lens)
    K = torch.tensor(numbers, device=viewmat.device).view(-1, 3)
    width, height = int(camera.width * scale), int(camera.height * scale)
    return View(viewmat, K, width, height, index=index, time=camera.time)


def views_of(cameras: Cameras) -> list[View]:
    """Return the views of all these cameras, on the host, with their poses."""
    poses, lenses = world_to_cameras(cameras.camera_to_worlds.reshape(-1, 3, 4)), intrinsics_of(cameras)
    return [view_at(lens, pose, index) for index, (pose, lens) in enumerate(zip(poses.unbind(), lenses, strict=True))]


def world_to_camera(camera_to_world: Tensor) -> Tensor:
    """Convert [3, 4] camera-to-world with OpenGL axes to [4, 4] world-to-camera with OpenCV axes; differentiable."""
    return world_to_cameras(camera_to_world[None])[0]


def world_to_cameras(camera_to_worlds: Tensor) -> Tensor:
    """Convert [N, 3, 4] to [N, 4, 4]; see `world_to_camera`."""
    flip = camera_to_worlds.new_tensor([1.0, -1.0, -1.0])
    rotation = (camera_to_worlds[:, :3, :3] * flip).transpose(1, 2)
    # A product of batches, as nerfstudio's: on some processors that of plain matrices rounds otherwise.
    translation = -torch.bmm(rotation, camera_to_worlds[:, :3, 3:4])
    last = camera_to_worlds.new_tensor([[0.0, 0.0, 0.0, 1.0]]).expand(len(camera_to_worlds), 1, 4)
    return torch.cat([torch.cat([rotation, translation], dim=2), last], dim=1)
