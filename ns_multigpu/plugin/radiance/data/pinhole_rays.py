"""Rays through pixels of perspective cameras, equal to nerfstudio's, without waiting for the device.

nerfstudio's `RayGenerator` reads the camera types back from the device, and which rays belong to which type.
"""

import torch
from nerfstudio.cameras.camera_utils import radial_and_tangential_undistort
from nerfstudio.cameras.cameras import Cameras, CameraType
from nerfstudio.cameras.rays import RayBundle
from torch import Tensor, nn

from ns_multigpu.plugin.capture.opencv_cameras import undistorted

_LEAST = 4 * torch.finfo(torch.float64).eps
"""Minimum length that a direction is divided by."""


class PinholeRays(nn.Module):
    """Ray generator of perspective cameras. On a CPU, rays are bit-identical to nerfstudio's, except for their
    metadata; those of `OpenCVCameras` are equal to rounding.

    Args:
        cameras: [V] cameras.

    Raises:
        ValueError: not all cameras are perspective ones.
    """

    intrinsics: Tensor
    poses: Tensor
    lens: Tensor | None

    def __init__(self, cameras: Cameras) -> None:
        super().__init__()
        if not self.fits(cameras):
            raise ValueError("cameras that are not perspective ones")
        numbers = [x.reshape(-1) for x in (cameras.fx, cameras.fy, cameras.cx, cameras.cy)]
        self.register_buffer("intrinsics", torch.stack(numbers).contiguous(), persistent=False)
        self.register_buffer("poses", cameras.camera_to_worlds, persistent=False)
        bent = cameras.distortion_params is not None and bool((cameras.distortion_params != 0).any())
        self.register_buffer("lens", cameras.distortion_params if bent else None, persistent=False)

    @staticmethod
    def fits(cameras: Cameras) -> bool:
        """Return True if all cameras are perspective."""
        return bool((cameras.camera_type == CameraType.PERSPECTIVE.value).all())

    def forward(self, indices: Tensor) -> RayBundle:
        """Return rays [R] through the centres of pixels [R, 3] (camera, row, column)."""
        view = indices[:, 0]
        y, x = indices[:, 1] + 0.5, indices[:, 2] + 0.5
        fx, fy, cx, cy = self.intrinsics[:, view]
        # The rays through the right and lower neighbours give the pixel's area.
        right, below = (x - cx + 1) / fx, (y - cy + 1) / fy
        x, y = (x - cx) / fx, (y - cy) / fy
        places = torch.stack([torch.stack([x, y], 1), torch.stack([right, y], 1), torch.stack([x, below], 1)])
        if self.lens is not None:
            undistort = undistorted if self.lens.shape[1] == 8 else radial_and_tangential_undistort
            places = undistort(places, self.lens[view])
        local = torch.stack([places[..., 0], -places[..., 1], torch.full_like(places[..., 0], -1.0)], 2)
        pose = self.poses[view]
        world = torch.sum(local[..., None, :] * pose[:, :3, :3], dim=-1)
        world = world / torch.linalg.vector_norm(world, dim=-1, keepdim=True).clamp_min(_LEAST)
        ahead = world[0]
        wide, high = (torch.sqrt(torch.sum((ahead - other) ** 2, dim=-1)) for other in world[1:])
        return RayBundle(pose[:, :3, 3], ahead, (wide * high)[:, None], view[:, None])
