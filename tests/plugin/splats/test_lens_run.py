"""Runs with `--pipeline.datamanager.undistort False`: photographs as they are, drawn through their lenses."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from nerfstudio.cameras.cameras import Cameras, CameraType
from numpy.typing import NDArray

from ns_multigpu.core.dist.world import World
from ns_multigpu.core.image_points import image_points
from ns_multigpu.core.types import Patch
from ns_multigpu.plugin.capture.image_reading import through_lenses
from ns_multigpu.plugin.capture.opencv_cameras import opencv_cameras
from ns_multigpu.plugin.faults.errors import InputError
from ns_multigpu.plugin.model.cameras import view_from_camera, views_of
from ns_multigpu.plugin.render.panorama import panorama
from ns_multigpu.plugin.splats.depth_maps import MapReader, read_maps
from ns_multigpu.plugin.splats.lenses import check_lenses
from ns_multigpu.plugin.splats.normal_maps import training_normals
from ns_multigpu.primitives.gaussians.schema import ORDER
from tests.lib.captures import read_by, transforms
from tests.lib.training_run import (
    TinyDataParserConfig,
    add_maps,
    follow,
    sums_over_points,
    write_capture,
)
from tests.strategies.test_law import points_of

UNDISTORT = "pipeline.datamanager.undistort"
CALM: dict[str, Any] = {"pipeline.model.num_downscales": 0} | {
    f"optimizers.{name}.optimizer.eps": 1e-4 for name in ORDER
}


def cameras_of(kind: CameraType, *params: list[float]) -> Cameras:
    poses = torch.eye(4)[:3].repeat(len(params), 1, 1)
    return Cameras(poses, 50.0, 50.0, 40.0, 30.0, 80, 60, torch.tensor(params), kind)


def test_fused_steps_learn_what_others_do(tmp_path: Path) -> None:
    write_capture(tmp_path / "tiny")
    with transforms(tmp_path / "tiny") as meta:
        for frame in meta["frames"]:
            frame |= {"k1": 0.2, "k2": -0.05, "p1": 0.01, "k3": 0.01, "k4": 0.05, "k5": -0.02, "k6": 0.01}
    found: dict[str, Any] = {}
    for name, options in (
        ("fused", {UNDISTORT: False, "fused_steps": "always"}), ("ordinary", {UNDISTORT: False}), ("undistorted", {}),
    ):  # fmt: skip
        trainer = follow(World.single(), tmp_path / "tiny", tmp_path / name, {**CALM, **options}, 8, 2, double=False)
        found[name] = sums_over_points(trainer.pipeline.model, World.single())
        data = trainer.pipeline.datamanager
        sizes = [(shape.width, shape.height) for shape in data.train_shapes]
        as_they_are = [(frame["w"], frame["h"]) for frame in meta["frames"][:8]]
        assert (sizes == as_they_are) == (name != "undistorted")
        rows = {len(view.K) for view in views_of(data.train_dataset.cameras) + views_of(data.eval_dataset.cameras)}
        assert rows == ({3} if name == "undistorted" else {7})
    for name in ORDER:
        apart = (found["fused"][name] - found["ordinary"][name]).abs().max()
        assert apart <= 1e-3 * found["ordinary"][name].abs().max(), name
    assert (found["fused"]["means"] - found["undistorted"]["means"]).abs().max() > 1e-3


def rays_around() -> tuple[Any, Any]:
    """Return longitudes and latitudes downwards [168, 2] of pixels of 12 x 14 panoramas, and their rays [168, 3]."""
    rows, columns = (part.reshape(-1) for part in np.mgrid[:12, :14])
    longitudes, latitudes = 2 * np.pi * ((columns + 0.5) / 14 - 0.5), np.pi * ((rows + 0.5) / 12 - 0.5)
    level = np.cos(latitudes)
    rays = np.stack([np.sin(longitudes) * level, np.sin(latitudes), np.cos(longitudes) * level], axis=1)
    return np.stack([longitudes, latitudes], axis=1), rays


def normals_around(number: int) -> NDArray[np.uint8]:
    normals = np.random.default_rng(number).normal(0, 0.3, (168, 3)) - rays_around()[1]
    normals /= np.linalg.norm(normals, axis=1, keepdims=True)
    return np.round(255 * (normals + 1) / 2).astype(np.uint8).reshape(12, 14, 3)


def distances(number: int) -> NDArray[np.uint16]:
    return np.random.default_rng(number).integers(1500, 2500, (12, 14), dtype=np.uint16)


def write_panoramas(folder: Path) -> None:
    """Write a capture of panoramas with maps of distances and of normals."""
    write_capture(folder, wide=False)
    add_maps(folder, "depth_file_path", distances)
    add_maps(folder, "normal_file_path", normals_around)
    with transforms(folder) as meta:
        meta["camera_model"] = "EQUIRECTANGULAR"
        for frame in meta["frames"]:
            width, height = frame["w"], frame["h"]
            frame |= {"fl_x": width / 2, "fl_y": height, "cx": width / 2, "cy": height / 2}


def test_maps_of_panoramas_are_of_distances_and_look_around(tmp_path: Path) -> None:
    write_panoramas(tmp_path / "tiny")
    outputs = read_by(TinyDataParserConfig(data=tmp_path / "tiny")).train_dataparser_outputs
    found, directed = read_maps(outputs, "metric", World.single()), training_normals(outputs, World.single())
    samples, _ = MapReader(outputs, outputs.metadata["depth_filenames"]).read_part(World.single())
    angles, rays = rays_around()
    assert found.counts == directed.counts == [168] * len(found.counts)
    for number, pose in enumerate(outputs.cameras.camera_to_worlds.double().numpy()):
        own, depths = slice(168 * number, 168 * (number + 1)), distances(number).reshape(-1) * 1e-3
        points = pose[:, 3] + (rays * [1.0, -1.0, -1.0]) @ pose[:, :3].T * depths[:, None] * outputs.dataparser_scale
        np.testing.assert_allclose(found.points[own], points, atol=1e-5)
        np.testing.assert_allclose(directed.points[own], rays, atol=1e-5)
        places, away, kept = samples[number].project(points)
        assert len(kept) == 168 and np.array_equal(samples[number].nearest(places)[1], kept)
        np.testing.assert_allclose(places, angles * [1, -1], atol=1e-5)
        np.testing.assert_allclose(away, depths * outputs.dataparser_scale, rtol=1e-5)
        assert samples[number].spacing == pytest.approx((2 * np.pi / 14 * np.pi / 12) ** 0.5)


@pytest.mark.parametrize(
    ("primitive", "strategy"),
    [("3dgs", "batch"), ("2dgs", "tile"), ("4dgs", "locality"), ("convex", "batch"), ("3dgs", "pixel")],
)
def test_panoramas_are_trained_on_in_fused_steps(tmp_path: Path, primitive: str, strategy: str) -> None:
    """With losses of depth and of normals."""
    write_panoramas(tmp_path / "tiny")
    found: dict[str, Any] = {}
    options = {**CALM, UNDISTORT: False, "pipeline.model.primitive": primitive, "pipeline.model.normal_loss_start": 0}
    options |= {f"pipeline.model.{name}_loss": 0.1 for name in ("depth", "normal_map", "normal")}
    for name in ("always", "never"):
        given = {**options, "fused_steps": name}
        method = f"splatfacto-{strategy}"
        trainer = follow(World.single(), tmp_path / "tiny", tmp_path / name, given, 6, 2, method=method, double=False)
        found[name] = sums_over_points(trainer.pipeline.model, World.single())
        views = views_of(trainer.pipeline.datamanager.eval_dataset.cameras)
        assert all(view.K[3, 0] == 2 and view.K.shape == (7, 3) for view in views)
    for name in ("means", "features_dc", "opacities"):
        apart = (found["always"][name] - found["never"][name]).abs().max()
        assert apart <= 1e-3 * found["never"][name].abs().max(), name


@pytest.mark.parametrize(
    ("kind", "params"),
    [
        (CameraType.PERSPECTIVE, [0.1, -0.02, 0.01, 0.0, 0.004, -0.003]),
        (CameraType.PERSPECTIVE, [0.1, -0.02, 0.01, 0.2, 0.004, -0.003, 0.1, -0.03]),
        (CameraType.FISHEYE, [0.1, -0.02, 0.01, 0.003, 0.0, 0.0]),
    ],
    ids=["perspective", "eight", "fisheye"],
)
def test_nerfstudios_parameters_are_put_in_their_places(kind: CameraType, params: list[float]) -> None:
    """nerfstudio's rays through the pixels where points lie point at the points."""
    cameras = cameras_of(kind, params[:6])
    if len(params) == 8:
        cameras = opencv_cameras(cameras, torch.tensor([params[6:]]))
    view = view_from_camera(cameras, cameras.camera_to_worlds[0], 0)
    assert view.K.shape == (7, 3) and view.K[3, 0] == (kind == CameraType.FISHEYE)
    half = view_from_camera(cameras, cameras.camera_to_worlds[0], 0, 2)
    assert torch.equal(half.K[3:], view.K[3:]) and torch.equal(half.K[:2], view.K[:2] / 2) and half.width == 40
    points = torch.tensor([[0.3, 0.2, -1.0], [-0.5, 0.3, -1.2], [0.0, -0.4, -0.9]])
    x, y, _ = image_points(view, points)
    rays = cameras.generate_rays(0, coords=torch.stack([y, x], -1))
    wanted = torch.nn.functional.normalize(points, dim=-1)
    assert (rays.directions - wanted).abs().max() < 2e-4


def test_panoramas_are_nerfstudios() -> None:
    poses = torch.eye(4)[None, :3]
    cameras = Cameras(poses, 40.0, 40.0, 40.0, 20.0, 80, 40, None, CameraType.EQUIRECTANGULAR)
    view = view_from_camera(cameras, poses[0], 0, 2)
    assert view.K[3, 0] == 2 and (view.width, view.height) == (40, 20)
    points = torch.tensor([[0.3, 0.2, -1.0], [-0.5, 0.3, 1.2], [0.9, -0.4, 0.1], [0.0, 0.9, -0.1]])
    x, y, depth = image_points(view, points)
    rays = cameras.generate_rays(0, coords=2 * torch.stack([y, x], -1))
    assert (rays.directions - torch.nn.functional.normalize(points, dim=-1)).abs().max() < 1e-5
    assert (depth - points.norm(dim=-1)).abs().max() < 1e-6


@pytest.mark.parametrize("primitive", ["gaussians", "4D gaussians", "2dgs", "convex"])
@torch.no_grad()
def test_a_panorama_is_what_six_pinhole_cameras_see(primitive: str) -> None:
    """But near the poles, where splats are wide, and at the seam, where they are cut."""
    kind, points = points_of(primitive, 150, torch.float32)
    g = torch.Generator().manual_seed(3)
    directions = torch.nn.functional.normalize(torch.randn(150, 3, generator=g), dim=-1)
    points.params["means"].copy_(directions * (2 + 3 * torch.rand(150, 1, generator=g)))
    if "scales" in points.params:
        points.params["scales"].sub_(0.7)
    turn = torch.linalg.qr(torch.randn(3, 3, generator=g))[0]
    pose = torch.cat([turn * torch.linalg.det(turn), torch.tensor([[0.2], [0.1], [-0.3]])], 1)[None]
    camera = Cameras(
        pose, 256.0, 256.0, 256.0, 128.0, 512, 256, None, CameraType.EQUIRECTANGULAR, times=torch.zeros(1, 1)
    )

    def draw(one: Cameras) -> dict[str, torch.Tensor]:
        view = view_from_camera(one, one.camera_to_worlds.reshape(-1, 3, 4)[0], 0)
        splats = kind.splat(points, kind.cull(points, [view], [0]), [view])
        (pixels,) = kind.render(splats, [Patch.whole(0, view)], [view])
        assert pixels.depth is not None
        return {
            "rgb": pixels.color, "depth": pixels.depth, "accumulation": pixels.alpha, "background": torch.zeros(3),
        }  # fmt: skip

    found, expected = draw(camera)["rgb"], panorama(camera, draw)
    assert expected is not None
    middle = (slice(40, -40), slice(16, -16))
    apart, shifted = ((found.roll(k, 1) - expected["rgb"])[middle].abs().mean() for k in (0, 3))
    assert 0 < apart < 0.25 * shifted


def test_all_cameras_of_a_capture_have_lenses_or_none_has() -> None:
    one = through_lenses(cameras_of(CameraType.PERSPECTIVE, [0.1, 0, 0, 0, 0, 0], [0.0] * 6))
    assert [len(view.K) for view in views_of(one)] == [7, 7]
    none = cameras_of(CameraType.PERSPECTIVE, [0.0] * 6)
    assert through_lenses(none) is none and len(views_of(none)[0].K) == 3
    none.camera_type[:] = CameraType.FISHEYE.value
    none.distortion_params = None
    lens = views_of(through_lenses(none))[0]
    assert len(lens.K) == 7 and lens.K[3, 0] == 1


def test_lenses_without_a_kernel_are_refused() -> None:
    fold = SimpleNamespace(
        cameras=cameras_of(CameraType.PERSPECTIVE, [0.1, 0, 0, 0, 0, 0], [-1e9, 0, 0, 0, 0, 0]),
        image_filenames=[Path("a.png"), Path("b.png")],
    )
    other = SimpleNamespace(cameras=cameras_of(CameraType.FISHEYE624, [0.1] * 12), image_filenames=[Path("c.png")])
    with pytest.raises(InputError, match=r"(?s)2 images.*b.png: .*folds back.*c.png: no kernel .* FISHEYE624") as error:
        check_lenses([fold, other], World.single())  # type: ignore[list-item]
    assert "a.png" not in str(error.value)
