"""Perspective cameras with OpenCV's lens of eight coefficients. nerfstudio's cameras hold six."""

import math
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import torch
from nerfstudio.cameras.cameras import Cameras, CameraType
from nerfstudio.cameras.rays import RayBundle
from torch import Tensor

from cuda_ext.reference.projection import lens_rays

DISTORTIONS = ("k1", "k2", "k3", "k4", "k5", "k6", "p1", "p2")
"""Coefficients in a transforms.json. One for all frames replaces all of the frames'."""


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
    none, no_limit = torch.zeros_like(k1), torch.full_like(k1, math.inf)
    lens = torch.stack([none, no_limit, no_limit, k1, k2, k3, k4, k5, k6, p1, p2, none], dim=-1)
    return lens_rays(lens.unflatten(-1, (4, 3)), places)[..., :2]
