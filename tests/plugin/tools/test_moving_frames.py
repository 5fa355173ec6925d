"""Frames have times: between views, on paths, in panoramas, and in the key that distinguishes films."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from nerfstudio.cameras.cameras import Cameras, CameraType
from nerfstudio.data.dataparsers.dnerf_dataparser import DNeRFDataParserConfig

from ns_multigpu.city import City, CityCapture, write_dnerf
from ns_multigpu.cli import main
from ns_multigpu.plugin.faults.errors import InputError
from ns_multigpu.plugin.model.cameras import view_from_camera
from ns_multigpu.plugin.render.panorama import faces
from ns_multigpu.plugin.tools.rendering import _digest
from ns_multigpu.plugin.tools.shots import CameraPath, Interpolated, Shots

TIMES = [0.0, 0.5, 0.7]


def cameras(times: list[float] | None) -> Cameras:
    poses = torch.eye(4)[:3].repeat(3, 1, 1)
    poses[:, 0, 3] = torch.tensor([0.0, 2.0, 1.0])
    moments = None if times is None else torch.tensor(times)[:, None]
    return Cameras(poses, fx=8.0, fy=8.0, cx=4.0, cy=4.0, width=8, height=8, times=moments)


def interpolated(times: list[float] | None, ordered: bool) -> Shots:
    data = SimpleNamespace(eval_dataset=SimpleNamespace(cameras=cameras(times)))
    return Interpolated("eval", 3, ordered).shots(SimpleNamespace(datamanager=data))


def times_of(shots: Shots) -> list[float]:
    views = [view_from_camera(s.camera, s.camera.camera_to_worlds[0], 0) for s in shots.frames]
    return [view.time for view in views]


def test_frames_between_views_lie_between_in_time() -> None:
    assert times_of(interpolated(TIMES, False)) == pytest.approx([0.0, 0.25, 0.5, 0.5, 0.6, 0.7])
    assert times_of(interpolated(TIMES, True)) == pytest.approx([0.0, 0.14, 0.28, 0.42, 0.56, 0.7])
    assert times_of(interpolated(None, False)) == [0.0] * 6


def test_another_time_is_another_film() -> None:
    assert _digest(interpolated(TIMES, False)) == _digest(interpolated(TIMES, False))
    assert _digest(interpolated(TIMES, False)) != _digest(interpolated([0.0, 0.5, 0.8], False))


def test_all_faces_of_a_panorama_are_of_its_time() -> None:
    around = Cameras(
        torch.eye(4)[None, :3], fx=32.0, fy=32.0, cx=32.0, cy=16.0, width=64, height=32,
        camera_type=CameraType.EQUIRECTANGULAR, times=torch.tensor([[0.3]]),
    )  # fmt: skip
    assert [float(face.times) for face in faces(around) if face.times is not None] == pytest.approx([0.3] * 6)


def path(file: Path, times: list[object]) -> CameraPath:
    """Return a camera path as nerfstudio 1.1.5's viewer saves it."""
    frames = [
        {"camera_to_world": torch.eye(4).flatten().tolist(), "fov": 60, "aspect": 1, "render_time": t} for t in times
    ]
    content = {"camera_type": "perspective", "render_width": 8, "render_height": 8, "seconds": 1, "camera_path": frames}
    file.write_text(json.dumps(content), "utf8")
    return CameraPath(file)


def test_a_path_from_the_viewer_has_times(tmp_path: Path) -> None:
    good = path(tmp_path / "path.json", [0.25, 1.5])
    assert good.check() == (8, 8) and times_of(good.shots(None)) == [0.25, 1.5]
    with pytest.raises(InputError, match=r"camera 1 has a render_time of 'noon'\. Give a number"):
        path(tmp_path / "path.json", [0.0, "noon"]).check()


def test_nerfstudio_reads_a_city_in_d_nerfs_layout(tmp_path: Path) -> None:
    size = [
        "--views",
        "9",
        "--width",
        "24",
        "--height",
        "16",
        "--samples",
        "1",
        "--blocks",
        "1",
        "--eval-interval",
        "4",
    ]
    main(["city", "--output-path", str(tmp_path / "a"), "--layout", "dnerf", "--time-varying", "--rig", "3", *size])
    made = CityCapture(City(1, 0), views=9, width=24, height=16, samples=1, eval_interval=4, time_varying=True, rig=3)
    parser = DNeRFDataParserConfig(data=tmp_path / "a").setup()
    for split in ("train", "test"):
        found, views = parser.get_dataparser_outputs(split=split), made.split(split).tolist()  # type: ignore[arg-type]
        assert [name.stem for name in found.image_filenames] == [made.name(view) for view in views]
        assert all(name.is_file() for name in found.image_filenames)
        assert found.cameras.times is not None
        torch.testing.assert_close(found.cameras.times.flatten(), made.times[views])
        torch.testing.assert_close(found.cameras.camera_to_worlds[:, :, :3], made.c2w[views][:, :, :3])
        torch.testing.assert_close(found.cameras.fx.flatten().float(), torch.full((len(views),), made.fx))
        assert float(found.cameras.camera_to_worlds[:, :, 3].abs().max()) <= 1.0
    with pytest.raises(ValueError, match="give --time-varying"):
        write_dnerf(CityCapture(City(1, 0), views=9, width=24, height=16), tmp_path / "b")


def test_a_rig_films_the_same_moments() -> None:
    made = CityCapture(City(1, 0, 3.0), views=12, width=48, height=32, samples=1, time_varying=True, rig=3)
    assert made.times.tolist() == pytest.approx([k / 3 for k in range(4) for _ in range(3)])
    assert torch.equal(made.c2w[:3].repeat(4, 1, 1), made.c2w) and not torch.equal(made.c2w[0], made.c2w[1])
    assert not all(torch.equal(made.image(view), made.image(view + 9)) for view in range(3))
    for rig in (1, 7):
        with pytest.raises(ValueError, match=f"rig is {rig}: give 2 cameras or more"):
            CityCapture(City(1, 0), views=12, rig=rig)
