"""Rays of perspective cameras, made on the device: they are nerfstudio's."""

import pytest
import torch
from nerfstudio.cameras.cameras import Cameras, CameraType
from nerfstudio.model_components.ray_generators import RayGenerator

from ns_multigpu.plugin.capture.opencv_cameras import opencv_cameras
from ns_multigpu.plugin.radiance.data.pinhole_rays import PinholeRays


def _cameras(lens: bool) -> Cameras:
    g = torch.Generator().manual_seed(8)
    turned = torch.linalg.qr(torch.randn(5, 3, 3, generator=g)).Q
    poses = torch.cat([turned, torch.randn(5, 3, 1, generator=g)], 2)
    bent = 0.1 * torch.randn(5, 6, generator=g) * torch.tensor([[0.0], [1.0], [1.0], [1.0], [1.0]]) if lens else None
    focal = 20 + torch.rand(5, 1, generator=g)
    return Cameras(poses, focal, focal + 1, 8.2, 6.1, 17, 13, bent, CameraType.PERSPECTIVE)


@pytest.mark.parametrize("lens", [0, 6, 8])
def test_rays_are_nerfstudios(lens: int) -> None:
    cameras = _cameras(lens > 0)
    if lens == 8:
        cameras = opencv_cameras(cameras, 0.1 * torch.randn(5, 2, generator=torch.Generator().manual_seed(7)))
    g = torch.Generator().manual_seed(9)
    indices = torch.stack([torch.randint(n, (60,), generator=g) for n in (5, 13, 17)], 1)
    found, expected = PinholeRays(cameras)(indices), RayGenerator(cameras)(indices)
    for name in ("origins", "directions", "pixel_area", "camera_indices"):
        one, other = getattr(found, name), getattr(expected, name)
        assert torch.allclose(one, other, rtol=1e-4, atol=1e-6) if lens == 8 else torch.equal(one, other), name


def test_only_perspective_cameras_fit() -> None:
    cameras = _cameras(False)
    assert PinholeRays.fits(cameras)
    cameras.camera_type[2] = CameraType.FISHEYE.value
    assert not PinholeRays.fits(cameras)
    with pytest.raises(ValueError, match="not perspective"):
        PinholeRays(cameras)
