"""Each kind of bad capture is refused before an image is decoded, with all that is wrong named."""

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from nerfstudio.cameras.cameras import Cameras, CameraType
from nerfstudio.data.dataparsers.nerfstudio_dataparser import NerfstudioDataParserConfig
from PIL import Image

from ns_multigpu.core.dist.world import World
from ns_multigpu.plugin.capture.checks import (
    camera_problems,
    different_captures,
    list_problems,
    listed,
)
from ns_multigpu.plugin.capture.image_files import missing_file, read_header
from ns_multigpu.plugin.capture.opencv_cameras import opencv_cameras
from ns_multigpu.plugin.capture.parsing import unreadable
from ns_multigpu.plugin.faults.errors import InputError
from tests.lib.captures import manager, transforms, write_capture
from tests.lib.ranks import run_ranks


def _cameras(views: int = 4, **changes: object) -> Cameras:
    poses = torch.eye(4)[:3].repeat(views, 1, 1)
    poses[:, 0, 3] = torch.arange(views)
    values = {"fx": torch.full((views, 1), 20.0), "fy": torch.full((views, 1), 20.0), "cx": 12.0, "cy": 8.0}
    values |= {"width": 24, "height": 16, "camera_type": CameraType.PERSPECTIVE, **changes}
    return Cameras(camera_to_worlds=poses, **values)  # type: ignore[arg-type]


NAMES = [f"photo_{i}" for i in range(4)]


def test_good_cameras_pass() -> None:
    assert camera_problems(_cameras(), NAMES) == []
    turned = _cameras()
    turned.camera_to_worlds[:, :, :3] = torch.linalg.qr(torch.rand(4, 3, 3))[0]
    turned.camera_to_worlds[:, :, :3] *= torch.linalg.det(turned.camera_to_worlds[:, :, :3])[:, None, None]
    turned.camera_to_worlds = (turned.camera_to_worlds * 1000).round() / 1000
    assert camera_problems(turned, NAMES) == [], "a pose written with three digits is rigid enough"


def _pose(row: int, column: int, value: float) -> Callable[[Cameras], None]:
    def change(cameras: Cameras) -> None:
        cameras.camera_to_worlds[1, row, column] = cameras.camera_to_worlds[3, row, column] = value

    return change


def _field(name: str, value: float) -> Callable[[Cameras], None]:
    def change(cameras: Cameras) -> None:
        column = getattr(cameras, name).clone()
        column[1] = column[3] = value
        setattr(cameras, name, column)

    return change


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (_pose(0, 3, math.nan), "its pose is NaN or infinite"),
        (_pose(2, 2, math.inf), "its pose is NaN or infinite"),
        (_pose(0, 0, 2.0), "its pose is not rigid"),
        (_pose(0, 1, 0.1), "its pose is not rigid"),
        (_pose(1, 1, -1.0), "its pose is mirrored"),
        (_field("fx", 0.0), "its focal length is zero, negative"),
        (_field("fy", -20.0), "its focal length is zero, negative"),
        (_field("fx", math.nan), "its focal length is zero, negative, NaN"),
        (_field("cy", math.inf), "its principal point is NaN or infinite"),
        (_field("width", 0), "its width or height is below 1"),
    ],
)
def test_every_bad_camera_is_named_once(change: Callable[[Cameras], None], said: str) -> None:
    cameras = _cameras()
    change(cameras)
    lines = camera_problems(cameras, NAMES)
    assert [line.split(":")[0] for line in lines] == ["photo_1", "photo_3"] and all(said in line for line in lines)


@pytest.mark.parametrize("kind", [k for k in CameraType if k.name not in ("PERSPECTIVE", "FISHEYE", "FISHEYE624")])
def test_camera_models_that_cannot_be_splatted_are_named(kind: CameraType) -> None:
    [first, *_] = camera_problems(_cameras(camera_type=kind), NAMES)
    if kind is CameraType.EQUIRECTANGULAR:
        assert first.startswith("photo_0: camera model EQUIRECTANGULAR cannot be undistorted; ")
        assert camera_problems(_cameras(camera_type=kind), NAMES, undistort=False) == []
    else:
        assert first == f"photo_0: camera model {kind.name} cannot be splatted; PERSPECTIVE, FISHEYE, FISHEYE624 can"


def test_distortions_that_nerfstudio_cannot_take_out() -> None:
    cameras = _cameras(distortion_params=torch.tensor([0, 0, 0, 0.1, 0, 0]).repeat(4, 1))
    lines = camera_problems(cameras, NAMES)
    assert len(lines) == 4 and "k4 of a perspective camera" in lines[0]
    assert camera_problems(opencv_cameras(cameras, torch.zeros(4, 2)), NAMES) == []
    lines = camera_problems(_cameras(distortion_params=torch.full((4, 6), math.nan)), NAMES)
    assert any("a distortion parameter is NaN" in line for line in lines)
    lines = camera_problems(_cameras(camera_type=CameraType.FISHEYE624), NAMES)
    assert "needs a fisheye_crop_radius" in lines[0]


def test_many_problems_of_a_kind_are_counted() -> None:
    sizes = [f"/c/{i:04}.jpg: it has {i}x4 pixels; give /c/{i:04}.png" for i in range(5000)]
    lines = str(listed("{count} problems:", [*sizes, "/c/x.jpg: empty", "/c/y.jpg: empty", *NAMES])).split("\n")
    names = ", ".join(f"{i:04}.jpg" for i in range(1, 9))
    assert lines[:3] == ["5006 problems:", f"  {sizes[0]}", f"    and 4,999 more like it: {names}, ..."]
    assert lines[3:5] == ["  /c/x.jpg: empty", "  /c/y.jpg: empty"], "few are listed in full"
    assert lines[5:] == ["  photo_0", "    and 3 more like it: photo_1, photo_2, photo_3"]
    kinds = str(listed("", [f"{letter}: {letter * 3}" for letter in map(chr, range(65, 165))])).split("\n")
    assert len(kinds) == 32 and kinds[-1] == "  and 70 more lines"


def test_lists_of_files() -> None:
    names = [Path(name) for name in ("a", "b", "a", "c")]
    assert list_problems(names, _cameras(), None) == ["a: listed 2 times, with different poses"]
    twice = _cameras()
    twice.camera_to_worlds[2] = twice.camera_to_worlds[0]
    assert list_problems(names, twice, None) == []
    assert list_problems(names[:2], _cameras(2), [Path("m")]) == [
        "1 masks for 2 images: every image needs one, or none has one"
    ]
    assert "3 images for 4 cameras" in camera_problems(_cameras(), NAMES[:3])[0]


def _differ(world: World) -> list[list[str]]:
    moved = _cameras()
    moved.camera_to_worlds[0, 0, 3] += world.rank
    return [
        different_captures(_cameras(), NAMES, world),
        different_captures(_cameras(), NAMES[world.rank :], world),
        different_captures(_cameras(), [f"{name}{world.rank}" for name in NAMES], world),
        different_captures(moved, NAMES, world),
    ]


def test_ranks_that_read_different_captures_are_named() -> None:
    for same, fewer, renamed, moved in run_ranks(_differ, 2):
        assert same == []
        assert fewer == ["rank 1 has 3 views and rank 0 has 4"]
        said = "rank 1 has image files of other names than rank 0, 4 of them: view 0 is photo_01, and photo_00 there"
        assert renamed == [said]
        assert moved == ["rank 1 has other poses than rank 0: of 1 view, photo_0 first"]


# ---- files ----


@pytest.mark.parametrize("suffix", [".png", ".jpg", ".webp", ".bmp"])
def test_headers_of_whole_and_of_truncated_files(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"photo{suffix}"
    Image.effect_noise((24, 16), 50).convert("RGB").save(path)
    assert read_header(path, None, (24, 16)).channels == 3
    assert read_header(path, None, (12, 8), scale=0.5).problems == ()
    [line] = read_header(path, None, (24, 17)).problems
    assert line == f"{path}: it has 24x16 pixels and its camera 24x17; " + line.split("; ", 1)[1]
    whole = path.read_bytes()
    for part in (len(whole) - 40, len(whole) // 2, 5, 0):
        path.write_bytes(whole[:part])
        [line] = read_header(path, None, (24, 16)).problems
        assert line.startswith(f"{path}: it is truncated or unreadable") and "; copy it again, or leave" in line
    if suffix in (".png", ".jpg"):
        path.write_bytes(whole + b"what a camera writes behind the picture")
        assert read_header(path, None, (24, 16)).problems == ()


@pytest.mark.parametrize(("mode", "channels"), [("L", 3), ("RGBA", 4), ("P", 0), ("LA", 0), ("1", 0), ("I;16", 0)])
def test_pixel_formats(tmp_path: Path, mode: str, channels: int) -> None:
    path = tmp_path / "my photo.png"
    Image.new(mode, (24, 16)).save(path)
    header = read_header(path, None, (24, 16))
    assert header.channels == channels
    assert bool(header.problems) == (channels == 0) and all(f"of kind {mode}" in line for line in header.problems)
    command = f"convert it to RGB: mogrify -type TrueColor -define png:color-type=2 '{path}'"
    assert all(line.endswith(command) for line in header.problems)


def test_masks(tmp_path: Path) -> None:
    photo, mask = tmp_path / "photo.png", tmp_path / "mask.png"
    Image.new("RGB", (24, 16)).save(photo)
    assert read_header(photo, mask, (24, 16)).problems == (f"{mask}: there is no such file",)
    for mode in ("L", "1", "P"):
        Image.new(mode, (24, 16)).save(mask)
        assert read_header(photo, mask, (24, 16)).problems == ()
    Image.new("L", (12, 16)).save(mask)
    assert read_header(photo, mask, (24, 16)).problems == (f"{mask}: the mask has 12x16 pixels and the camera 24x16",)
    Image.new("RGB", (24, 16)).save(mask)
    said = f"a mask must have one channel and this is RGB; convert it: mogrify -alpha off -colorspace Gray {mask}"
    assert said in read_header(photo, mask, (24, 16)).problems[0]


# ---- whole captures ----


def _refused(world: World, folder: Path) -> str:
    try:
        manager(folder, world).check_capture()
    except InputError as error:
        return str(error)
    return ""


def test_all_bad_files_of_both_splits_are_listed_on_every_rank(tmp_path: Path) -> None:
    folder = write_capture(tmp_path / "capture", masks=True)
    (folder / "images/photo_04.png").unlink()  # of the held-out ones
    (folder / "images/photo_05.png").unlink()
    (folder / "images/photo_07.png").write_bytes((folder / "images/photo_07.png").read_bytes()[:200])
    Image.new("RGB", (20, 16)).save(folder / "images/photo_08.png")
    Image.new("L", (20, 16)).save(folder / "images/mask_10.png")
    (folder / "images/photo_11.png").write_text("not a picture")
    messages = run_ranks(_refused, 2, folder)
    assert messages[0] == messages[1]
    for said in (
        "problems: 6", "photo_04.png: there is no such file", "photo_05.png: there is no such file",
        "photo_07.png: it is truncated", "photo_08.png: it has 20x16 pixels and its camera 24x16",
        "mask_10.png: the mask has 20x16 pixels", "photo_11.png: it is truncated or unreadable",
    ):  # fmt: skip
        assert said in messages[0]


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_pose_that_is_no_number_does_not_blame_the_others(tmp_path: Path, value: float) -> None:
    folder = write_capture(tmp_path / "capture")
    with transforms(folder) as meta:
        for frame in (3, 7):
            meta["frames"][frame]["transform_matrix"][0][3] = value
    message = _refused(World.single(), folder)
    assert "problems: 2" in message and "photo_03.png: its pose is NaN" in message and "photo_07" in message


def test_poses_and_lenses_of_a_whole_capture(tmp_path: Path) -> None:
    folder = write_capture(tmp_path / "capture")
    assert _refused(World.single(), folder) == ""
    with transforms(folder) as meta:
        for frame in (2, 4):
            rotation = meta["frames"][frame]["transform_matrix"]
            rotation[:3] = [[2 * v for v in row[:3]] + row[3:] for row in rotation[:3]]
    message = _refused(World.single(), folder)
    assert "problems: 2" in message and "photo_02.png: its pose is not rigid" in message and "photo_04" in message
    folder = write_capture(tmp_path / "model", camera_model="EQUIRECTANGULAR")
    assert "photo_00.png: camera model EQUIRECTANGULAR cannot be undistorted" in _refused(World.single(), folder)


@pytest.mark.parametrize(
    ("there", "asked", "said"),
    [
        ("0001.JPG", "0001.jpg", "0001.JPG is there"),
        ("0001.png", "0001.jpg", "0001.png is there"),
        ("0001.jpg", "0001", "0001.jpg is there"),
        ("0001.jpg.png", "0001.png", "0001.jpg.png is there"),
        ("Gru\u0308n.jpg", "Gr\u00fcn.jpg", "in another Unicode form"),
        ("a.jpg", "cam0\\a.jpg", "has backslashes, as Windows writes"),
        ("00010.jpg", "0001.jpg", None),
    ],
)
def test_a_file_that_was_probably_meant_is_named(tmp_path: Path, there: str, asked: str, said: str | None) -> None:
    Image.new("RGB", (24, 16)).save(tmp_path / "other.png")
    (tmp_path / there).touch()
    (problem,) = read_header(tmp_path / asked, None, (24, 16)).problems
    if said is None:
        assert problem == f"{tmp_path / asked}: there is no such file"
    else:
        assert said in problem
    assert "there is no such" in missing_file(tmp_path / "nowhere" / asked)


def test_pictures_that_pil_does_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.HEIC"
    path.write_bytes(b"\0\0\0\x18ftypheic\0\0\0\0mif1heic" + bytes(400))
    assert "HEIC pictures cannot be read: convert them" in read_header(path, None, (24, 16)).problems[0]
    Image.new("RGB", (24, 16)).save(path, format="PNG")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    assert "more pixels than PIL reads (200)" in read_header(path, None, (24, 16)).problems[0]


def test_a_dataparser_that_stops_at_the_first_file_is_made_to_name_all(tmp_path: Path) -> None:
    folder = write_capture(tmp_path / "capture")
    for index in (0, 6):
        (folder / f"images/photo_{index:02d}.png").unlink()
    config = NerfstudioDataParserConfig(data=folder, load_3D_points=False)
    with pytest.raises(FileNotFoundError) as caught:
        config.setup().get_dataparser_outputs("train")
    (folder / "images/photo_07.png").write_text("not a picture")
    lines = sorted(unreadable(config, caught.value))
    assert [Path(line.split(":")[0]).name for line in lines] == ["photo_00.png", "photo_06.png", "photo_07.png"]
    assert unreadable(config, NotImplementedError("FOV"))[0].endswith("NotImplementedError: FOV")
