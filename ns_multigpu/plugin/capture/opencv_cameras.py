"""Perspective cameras with OpenCV's lens of eight coefficients. nerfstudio's cameras hold six."""

from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import torch
from nerfstudio.cameras.cameras import Cameras, CameraType
from nerfstudio.cameras.rays import RayBundle
from torch import Tensor

DISTORTIONS = ("k1", "k2", "k3", "k4", "k5", "k6", "p1", "p2")
"""Coefficients in a transforms.json. One for all frames replaces all of the frames'."""
_STEPS, _LEAST = 10, 1e-3
"""Newton steps of `undistorted`, and the least determinant to step by; nerfstudio's."""


@dataclass(init=False)
class OpenCVCameras(Cameras):
    """Cameras whose `distortion_params` are k1, k2, k3, k4, p1, p2, k5, k6, all of them OpenCV's.

    nerfstudio's k4 is a fourth power in the numerator. OpenCV's begins the denominator.
    """

    def _generate_rays_from_coords(
        self, camera_indices: Tensor, coords: Tensor, camera_opt_to_camera: Tensor | None = None,
        distortion_params_delta: Tensor | None = None, disable_distortion: bool = False,
    ) -> RayBundle:  # fmt: skip
        """Return nerfstudio's rays through the pixels where a pinhole camera sees what these cameras see at `coords`.

        Args: nerfstudio's, without `distortion_params_delta`.
        """
        assert distortion_params_delta is None
        rays = partial(super()._generate_rays_from_coords, camera_indices, camera_opt_to_camera=camera_opt_to_camera)
        if disable_distortion or self.distortion_params is None:
            return rays(coords=coords, disable_distortion=True)
        views = camera_indices.unbind(-1)
        focal, centre = torch.cat([self.fy, self.fx], -1)[views], torch.cat([self.cy, self.cx], -1)[views]
        params = self.distortion_params[views]

        def through(row: int, column: int) -> RayBundle:
            """Return the rays through the pixels so many rows and columns further on."""
            places = (coords + coords.new_tensor([row, column]) - centre) / focal
            seen = undistorted(places.flip(-1), params).flip(-1)
            return rays(coords=seen * focal + centre, disable_distortion=True)

        result = through(0, 0)
        wide, high = (
            torch.linalg.vector_norm(result.directions - other.directions, dim=-1, keepdim=True)
            for other in (through(0, 1), through(1, 0))
        )
        result.pixel_area = wide * high
        return result


def opencv_cameras(cameras: Cameras, more: Tensor) -> Cameras:
    """Return cameras with OpenCV's k5 and k6 [n, 2]: the same ones unless a perspective one has k4, k5 or k6."""
    assert cameras.distortion_params is not None
    params = torch.cat([cameras.distortion_params[:, :6], more], dim=-1)
    bent = (cameras.camera_type == CameraType.PERSPECTIVE.value) & (params[:, [3, 6, 7]] != 0)
    if not bool(bent.any()):
        return cameras
    kept: dict[str, Any] = {field.name: getattr(cameras, field.name) for field in fields(cameras)}
    kept["distortion_params"] = params
    return OpenCVCameras(**kept)


def undistorted(places: Tensor, params: Tensor) -> Tensor:
    """Return where a pinhole camera sees what a lens shows at `places` [..., 2]: x and y in focal lengths.

    Args:
        params: [..., 8] as those of `OpenCVCameras`.
    """
    k1, k2, k3, k4, p1, p2, k5, k6 = params.unbind(-1)
    x, y = places.unbind(-1)
    for _ in range(_STEPS):
        r = x * x + y * y
        below = 1 + r * (k4 + r * (k5 + r * k6))
        d = (1 + r * (k1 + r * (k2 + r * k3))) / below
        by_r = 2 * (k1 + r * (2 * k2 + 3 * r * k3) - d * (k4 + r * (2 * k5 + 3 * r * k6))) / below
        right = d * x + 2 * p1 * x * y + p2 * (r + 2 * x * x) - places[..., 0]
        down = d * y + 2 * p2 * x * y + p1 * (r + 2 * y * y) - places[..., 1]
        mixed = by_r * x * y + 2 * (p1 * x + p2 * y)
        right_x, down_y = d + by_r * x * x + 2 * p1 * y + 6 * p2 * x, d + by_r * y * y + 2 * p2 * x + 6 * p1 * y
        determinant = right_x * down_y - mixed * mixed
        scale = torch.where(determinant.abs() > _LEAST, 1 / determinant, 0.0)
        x, y = x - scale * (right * down_y - down * mixed), y - scale * (down * right_x - right * mixed)
    return torch.stack([x, y], dim=-1)
