"""Rays of perspective cameras, made on the device: they are nerfstudio's."""

import pytest
import torch
from nerfstudio.cameras.cameras import Cameras, CameraType
from nerfstudio.model_components.ray_generators import RayGenerator

from ns_multigpu.plugin.radiance.data.pinhole_rays import PinholeRays


def _cameras(lens: bool) -> Cameras:
    g = torch.Generator().manual_seed(8)
    turned = torch.linalg.qr(torch.randn(5, 3, 3, generator=g)).Q
    poses = torch.cat([turned, torch.randn(5, 3, 1, generator=g)], 2)
    bent = 0.1 * torch.randn(5, 6, generator=g) * torch.tensor([[0.0], [1.0], [1.0], [1.0], [1.0]]) if lens else None
    focal = 20 + torch.rand(5, 1, generator=g)
    return Cameras(poses, focal, focal + 1, 8.2, 6.1, 17, 13, bent, CameraType.PERSPECTIVE)


@pytest.mark.parametrize("lens", [False, True])
def test_rays_are_nerfstudios(lens: bool) -> None:
    cameras = _cameras(lens)
    g = torch.Generator().manual_seed(9)
    indices = torch.stack([torch.randint(n, (60,), generator=g) for n in (5, 13, 17)], 1)
    found, expected = PinholeRays(cameras)(indices), RayGenerator(cameras)(indices)
    for name in ("origins", "directions", "pixel_area", "camera_indices"):
        assert torch.equal(getattr(found, name), getattr(expected, name)), name


def test_only_perspective_cameras_fit() -> None:
    cameras = _cameras(False)
    assert PinholeRays.fits(cameras)
    cameras.camera_type[2] = CameraType.FISHEYE.value
    assert not PinholeRays.fits(cameras)
    with pytest.raises(ValueError, match="not perspective"):
        PinholeRays(cameras)
