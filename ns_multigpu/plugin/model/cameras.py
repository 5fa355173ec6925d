"""From nerfstudio's cameras to the core's views."""

from typing import NamedTuple

import torch
from nerfstudio.cameras.cameras import Cameras
from torch import Tensor

from ns_multigpu.core.types import View


def view_from_camera(camera: Cameras, camera_to_world: Tensor, index: int, downscale: int = 1) -> View:
    """Return the view of one pinhole camera.

    Args:
        camera: a single camera; its distortion must have been taken out of its image.
        camera_to_world: [3, 4] pose to use, OpenGL axes; gradients flow to it.
        index: the view's number in its capture.
        downscale: renders at 1/downscale of the size, rounded down, as nerfstudio does.
    """
    return view_at(intrinsics_of(camera)[0], world_to_camera(camera_to_world), index, downscale)


class Intrinsics(NamedTuple):
    """Intrinsics of a camera in pixels, and the time of its photograph in [0, 1]."""

    fx: float
    fy: float
    cx: float
    cy: float
    width: int
    height: int
    time: float


def intrinsics_of(cameras: Cameras) -> list[Intrinsics]:
    """Of each of these cameras. To take one camera out of nerfstudio's costs a third of a millisecond."""
    tensors = (cameras.fx, cameras.fy, cameras.cx, cameras.cy, cameras.width, cameras.height)
    columns = [x.reshape(-1).tolist() for x in tensors]
    times = cameras.times.reshape(-1).tolist() if cameras.times is not None else [0.0] * len(columns[0])
    return [Intrinsics(*row) for row in zip(*columns, times, strict=True)]


def view_at(camera: Intrinsics, viewmat: Tensor, index: int, downscale: int = 1) -> View:
    """Return a view by its intrinsics and world-to-camera matrix [4, 4]; see `view_from_camera`."""
    scale = 1.0 / downscale
    fx, fy, cx, cy = (x * scale for x in camera[:4])
    K = torch.tensor([[fx, 0.0, cx], [0.0, fy, cy], [0.0, 0.0, 1.0]], device=viewmat.device)
    width, height = int(camera.width * scale), int(camera.height * scale)
    return View(viewmat, K, width, height, index=index, time=camera.time)


def views_of(cameras: Cameras) -> list[View]:
    """Return the views of all these cameras, on the host, with their poses."""
    poses, lenses = world_to_cameras(cameras.camera_to_worlds.reshape(-1, 3, 4)), intrinsics_of(cameras)
    Ks = torch.eye(3, device=poses.device).repeat(len(lenses), 1, 1)
    Ks[:, [0, 1, 0, 1], [0, 1, 2, 2]] = torch.tensor([lens[:4] for lens in lenses], device=poses.device).view(-1, 4)
    return [
        View(pose, K, lens.width, lens.height, index=index, time=lens.time)
        for index, (pose, K, lens) in enumerate(zip(poses.unbind(), Ks.unbind(), lenses, strict=True))
    ]


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
