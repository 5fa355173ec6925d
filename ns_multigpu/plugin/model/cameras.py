"""From nerfstudio's cameras to the core's views."""

import torch
from nerfstudio.cameras.cameras import Cameras
from torch import Tensor

from ns_multigpu.core.types import View


def view_from_camera(camera: Cameras, camera_to_world: Tensor, index: int, downscale: int = 1) -> View:
    """A view of one pinhole camera.

    Args:
        camera: a single camera; its distortion must have been taken out of its image.
        camera_to_world: [3, 4] pose to use, OpenGL axes; gradients flow to it.
        index: the view's number in its capture.
        downscale: renders at 1/downscale of the size, rounded down, as nerfstudio does.
    """
    scale = 1.0 / downscale
    width, height = int(int(camera.width.item()) * scale), int(int(camera.height.item()) * scale)
    fx, fy, cx, cy = (float(v.item()) * scale for v in (camera.fx, camera.fy, camera.cx, camera.cy))
    device = camera_to_world.device
    K = torch.tensor([[fx, 0.0, cx], [0.0, fy, cy], [0.0, 0.0, 1.0]], device=device)
    moment = float(camera.times.item()) if camera.times is not None else 0.0
    return View(world_to_camera(camera_to_world), K, width, height, index=index, time=moment)


def world_to_camera(camera_to_world: Tensor) -> Tensor:
    """[3, 4] camera-to-world with OpenGL axes -> [4, 4] world-to-camera with OpenCV axes; differentiable."""
    flip = camera_to_world.new_tensor([1.0, -1.0, -1.0])
    rotation = (camera_to_world[:3, :3] * flip).transpose(0, 1)
    # A product of batches, as nerfstudio's: on some processors that of plain matrices rounds otherwise.
    translation = -torch.bmm(rotation[None], camera_to_world[None, :3, 3:4])[0]
    last = camera_to_world.new_tensor([[0.0, 0.0, 0.0, 1.0]])
    return torch.cat([torch.cat([rotation, translation], dim=1), last], dim=0)
