"""Cameras with OpenCV's eight coefficients: read, and their photographs undistorted."""

from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch
from nerfstudio.cameras.cameras import Cameras, CameraType
from PIL import Image

from ns_multigpu.core.dist.world import World
from ns_multigpu.plugin.capture.opencv_cameras import OpenCVCameras, opencv_cameras, undistorted
from tests.lib.captures import edit, manager, transforms, write_capture
from tests.lib.reconstruction import EIGHT

NAMES = ("k1", "k2", "p1", "p2", "k3", "k4", "k5", "k6")
LENS: dict[str, Any] = dict(zip(NAMES, EIGHT, strict=True))
ORDER = ("k1", "k2", "k3", "k4", "p1", "p2", "k5", "k6")
PARAMS = torch.tensor([LENS[name] for name in ORDER], dtype=torch.float64)


def test_undistorted_places_are_projected_back_by_opencv() -> None:
    places = torch.rand(40, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64) * 1.4 - 0.7
    found = undistorted(places, PARAMS)
    rays = torch.cat([found, torch.ones(40, 1)], dim=1).numpy()
    back, _ = cv2.projectPoints(rays, np.zeros(3), np.zeros(3), np.eye(3), np.array(EIGHT))
    np.testing.assert_allclose(back[:, 0], places.numpy(), atol=1e-9)
    assert (found - places).abs().max() > 0.02


def _read(folder: Path) -> dict[str, Cameras]:
    """Return the cameras of a capture's training and held-out views as they are in the file."""
    data = manager(folder, World.single())
    return {split: data.dataparser.get_dataparser_outputs(split).cameras for split in ("train", "val")}


def test_a_transforms_json_has_one_lens_for_all_or_one_for_each(tmp_path: Path) -> None:
    for cameras in _read(write_capture(tmp_path / "one", **LENS)).values():
        assert isinstance(cameras, OpenCVCameras)
        torch.testing.assert_close(cameras.distortion_params, PARAMS.float().expand(len(cameras), 8))
    folder = write_capture(tmp_path / "each")
    with transforms(folder) as meta:
        for number, frame in enumerate(meta["frames"]):
            frame |= {"k2": 0.1, "k6": number / 100}
    found = {name: cameras.distortion_params for name, cameras in _read(folder).items()}
    assert found["val"] is not None and found["train"] is not None
    assert found["val"][:, 7].tolist() == pytest.approx([0.0, 0.04, 0.08])
    assert found["train"][:, 7].tolist() == pytest.approx([n / 100 for n in range(12) if n % 4])
    assert found["train"][0].tolist() == pytest.approx([0, 0.1, 0, 0, 0, 0, 0, 0.01])
    edit(folder, None, k4=0.3)  # one for all replaces all
    torch.testing.assert_close(
        _read(folder)["train"].distortion_params, torch.tensor([[0, 0, 0, 0.3, 0, 0, 0, 0]]).expand(9, 8)
    )


@pytest.mark.parametrize("lens", [{}, {"k1": 0.1, "k4": 0.0}, {"camera_model": "OPENCV_FISHEYE", "k4": 0.1}], ids=str)
def test_other_cameras_are_nerfstudios(tmp_path: Path, lens: dict[str, Any]) -> None:
    for cameras in _read(write_capture(tmp_path / "a", **lens)).values():
        assert type(cameras) is Cameras and cameras.distortion_params is not None
        assert cameras.distortion_params.shape[1] == 6
        assert cameras.distortion_params[:, 3].tolist() == pytest.approx([lens.get("k4", 0)] * len(cameras))


def test_cameras_of_a_part_are_of_the_same_kind() -> None:
    poses = torch.eye(4)[None, :3].repeat(2, 1, 1)
    plain = Cameras(poses, 50.0, 50.0, 40.0, 30.0, 80, 60, PARAMS[:6].float(), CameraType.PERSPECTIVE)
    cameras = opencv_cameras(plain, PARAMS[6:].float().repeat(2, 1))
    for part in (cameras[1:].to("cpu"), cameras[0].reshape(()), cameras.flatten()):
        assert isinstance(part, OpenCVCameras)
    rays = cameras.generate_rays(0, disable_distortion=True)
    assert torch.equal(rays.directions, plain.generate_rays(0, disable_distortion=True).directions)
    assert rays.shape == cameras[0:1].generate_rays(0, keep_shape=True).shape == (60, 80)


def test_photographs_show_directions_after_undistortion_as_before(tmp_path: Path) -> None:
    """Red and green are the direction's x and y; the mask keeps what lies on the right."""
    width, height = 96, 72
    lens = {**LENS, "w": width, "h": height, "fl_x": 80.0, "fl_y": 85.0, "cx": 50.0, "cy": 34.0}
    folder = write_capture(tmp_path / "a", masks=True, **lens)
    rows, columns = torch.meshgrid(torch.arange(height) + 0.5, torch.arange(width) + 0.5, indexing="ij")
    ahead = undistorted(torch.stack([(columns - 50) / 80, (rows - 34) / 85], -1), PARAMS.float())
    colours = torch.cat([128 + 170 * ahead, torch.zeros(height, width, 1)], -1).round().byte().numpy()
    for number in range(12):
        Image.fromarray(colours).save(folder / f"images/photo_{number:02d}.png")
        Image.fromarray((ahead[..., 0] > 0.1).byte().numpy() * 255).save(folder / f"images/mask_{number:02d}.png")
    data = manager(folder, World.single())
    data.check_capture()
    camera, image = data.train_dataset.cameras[4], data.train_share.image(4, torch.device("cpu"))
    assert image["image"].shape[:2] == (int(camera.height), int(camera.width))
    assert camera.distortion_params is not None and not camera.distortion_params.any()
    rows, columns = torch.meshgrid(*(torch.arange(n) + 0.5 for n in image["image"].shape[:2]), indexing="ij")
    x, y = (columns - camera.cx) / camera.fx, (rows - camera.cy) / camera.fy
    found = (image["image"].float() - 128) / 170
    for one, other in ((found[..., 0], x), (found[..., 1], y)):  # half a pixel is 0.006
        assert (one - other).abs().max() < 0.009 and (one - other).mean().abs() < 0.001
    assert (image["mask"][..., 0] != (x > 0.1)).float().mean() < 0.03


def test_lenses_of_fewer_coefficients_among_them_are_undistorted_by_nerfstudio(tmp_path: Path) -> None:
    folders = [write_capture(tmp_path / name, masks=True) for name in ("plain", "mixed")]
    for folder in folders:
        with transforms(folder) as meta:
            for frame in meta["frames"]:
                frame |= {"k1": 0.05, "k2": -0.01, "p1": 0.01, "p2": -0.02, "k3": 0.01}
    edit(folders[1], 1, k4=0.1)
    shares = [manager(folder, World.single()).train_share for folder in folders]
    images = [[share.image(index, torch.device("cpu")) for index in range(9)] for share in shares]
    same = [all(torch.equal(one[key], other[key]) for key in one) for one, other in zip(*images, strict=True)]
    assert same == [False] + [True] * 8
