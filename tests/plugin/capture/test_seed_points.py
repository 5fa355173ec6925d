"""Seed points: .ply files are read in full or refused, and views that do not see them are explained."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from nerfstudio.data.dataparsers.colmap_dataparser import ColmapDataParserConfig
from nerfstudio.data.dataparsers.nerfstudio_dataparser import NerfstudioDataParserConfig
from numpy.typing import NDArray

from ns_multigpu.core.dist.world import World
from ns_multigpu.plugin.capture.colmap import Damaged
from ns_multigpu.plugin.capture.datamanager import DistributedDataManagerConfig
from ns_multigpu.plugin.capture.first_look import Findings, first_look
from ns_multigpu.plugin.capture.parsing import parsed_together
from ns_multigpu.plugin.capture.ply import read_ply, sample_ply
from ns_multigpu.plugin.capture.quick_colmap import QuickColmap
from ns_multigpu.plugin.capture.seed_points import FLIP, CaptureViews, seen_points, unseen_note, unseen_problem
from tests.lib import captures, colmap_files

XYZ = np.random.default_rng(5).normal(size=(400, 3)) * 0.4
RGB = np.random.default_rng(6).integers(0, 256, (400, 3), dtype=np.uint8)


def write_ply(path: Path, order: str = "ascii", xyz: NDArray[np.float64] = XYZ, more: str = "") -> Path:
    head = f"ply\nformat {order} 1.0\ncomment made here\nelement vertex {len(xyz)}\nproperty double x\n"
    head += "property double y\nproperty double z\n" + "".join(
        f"property uchar {c}\n" for c in ("red", "green", "blue")
    )
    head += f"{more}end_header\n"
    if order == "ascii":
        rows = [" ".join(map(repr, [*map(float, p), *map(int, c)])) for p, c in zip(xyz, RGB, strict=False)]
        path.write_text(head + "\n".join(rows) + "\n")
        return path
    sign = "<" if "little" in order else ">"
    body = np.empty(len(xyz), [("xyz", f"{sign}f8", 3), ("rgb", "u1", 3)])
    body["xyz"], body["rgb"] = xyz, RGB[: len(xyz)]
    path.write_bytes(head.encode() + body.tobytes())
    return path


@pytest.mark.parametrize("order", ["ascii", "binary_little_endian", "binary_big_endian"])
def test_ply_files(tmp_path: Path, order: str) -> None:
    path = write_ply(tmp_path / "a.ply", order, more="element face 0\nproperty list uchar int vertex_index\n")
    xyz, rgb = read_ply(path)
    assert np.array_equal(xyz, XYZ) and np.array_equal(rgb, RGB)
    whole = path.read_bytes()
    for length in (0, 2, 30, len(whole) // 2, len(whole) - 20):
        path.write_bytes(whole[:length])
        with pytest.raises(Damaged, match=r"a.ply: .*truncated"):
            read_ply(path)


def test_colours_of_ply_files(tmp_path: Path) -> None:
    path = tmp_path / "a.ply"
    head = "ply\nformat ascii 1.0\nelement vertex 1\n" + "".join(f"property float {axis}\n" for axis in "xyz")
    path.write_text(head + "end_header\n1 2 3\n")
    assert read_ply(path)[0].tolist() == [[1, 2, 3]] and read_ply(path)[1].shape == (0, 3)
    colours = "".join(f"property float {name}\n" for name in ("red", "green", "blue"))
    path.write_text(head + colours + "end_header\n1 2 3 0.5 1 0\n")
    assert read_ply(path)[1].tolist() == [[128, 255, 0]]
    path.write_text(head + colours + "end_header\n1 2 3 128 255 0\n")
    assert read_ply(path)[1].tolist() == [[128, 255, 0]], "numbers up to 255"
    path.write_text((head + colours).replace("float red", "ushort red") + "end_header\n1 2 3 32896 65535 0\n")
    assert read_ply(path)[1].tolist() == [[128, 255, 0]], "numbers of 16 bits"
    path.write_text(head + colours.replace("float ", "ushort diffuse_") + "end_header\n1 2 3 1 255 0\n")
    assert read_ply(path)[1].tolist() == [[1, 255, 0]], "whole numbers are no fractions"
    path.write_text(head.replace("vertex 1", "vertex 0") + colours + "end_header\n")
    assert [len(part) for part in read_ply(path)] == [0, 0]


def _views(**changes: Any) -> CaptureViews:
    angles = np.linspace(0, 6, 9)
    poses = np.tile(np.eye(4), (9, 1, 1))
    poses[:, 0, 0] = poses[:, 2, 2] = np.cos(angles)
    poses[:, 0, 2], poses[:, 2, 0] = np.sin(angles), -np.sin(angles)
    poses[:, :3, 3] = 3 * poses[:, :3, 2] + [0, 0.3, 0.5]  # they look at the origin, nearly
    return CaptureViews(**{"poses": poses, "lenses": np.full((9, 4), 50.0), "sizes": np.full((9, 2), 100.0), **changes})


def test_points_in_front_of_a_camera_and_inside_its_image() -> None:
    one = CaptureViews(np.eye(4)[None], np.array([[50.0, 50, 20, 50]]), np.array([[100.0, 60]]))
    for point, seen in (((0, 0, -1), 1), ((0, 0, 1), 0), ((1.5, 0, -1), 1), ((-0.5, 0, -1), 0), ((0, 0.9, -1), 1),
                        ((0, -0.9, -1), 0), ((1.7, 0, -1), 0), ((0, 1.1, -1), 0), ((0, 0, 0), 0)):  # fmt: skip
        assert seen_points(one, np.array([point], float)).tolist() == [seen], point
    dot = np.array([[0, 0, -1]]) + np.random.default_rng(1).normal(size=(20, 3)) * 1e-3
    assert seen_points(one, dot).tolist() == [0], "a scene that is a dot in the image"


def test_panoramas_see_all_around() -> None:
    lens = np.array([[50.0, 100, 50, 50]])
    one = CaptureViews(np.eye(4)[None], lens, np.array([[100.0, 100]]), is_panorama=True)
    around = np.random.default_rng(1).normal(size=(50, 3))
    assert seen_points(one, around).tolist() == [50]
    half = CaptureViews(np.eye(4)[None], lens, np.array([[50.0, 100]]), is_panorama=True)  # the left half
    assert seen_points(half, around).tolist() == [np.count_nonzero(around[:, 0] < 0)]
    below = CaptureViews(np.eye(4)[None], lens - [0, 0, 0, 50], np.array([[100.0, 50]]), is_panorama=True)
    assert seen_points(below, around).tolist() == [np.count_nonzero(around[:, 1] < 0)]


@pytest.mark.parametrize(
    ("is_colmap", "mistake", "said"),
    [
        (False, lambda c: c @ FLIP, "negate columns 2 and 3 of each transform_matrix"),
        (False, lambda c: np.linalg.inv(c), "world-to-camera: invert each transform_matrix"),
        (False, lambda c: np.linalg.inv(c @ FLIP), "then negate its columns 2 and 3"),
        (True, lambda c: c @ FLIP, "negate rows 2 and 3 of each world-to-camera"),
        (True, lambda c: np.linalg.inv(c @ FLIP) @ FLIP, "the poses are camera-to-world: invert each"),
        (True, lambda c: np.linalg.inv(c) @ FLIP, "negate columns 2 and 3 of each, then invert it"),
    ],
)
def test_mistaken_poses_are_named(is_colmap: bool, mistake: Any, said: str) -> None:
    views = _views(is_colmap=is_colmap)
    assert unseen_problem(views, XYZ) is None
    problem = unseen_problem(_views(is_colmap=is_colmap, poses=mistake(views.poses)), XYZ)
    assert problem is not None and said in problem and "100% of the views" in problem


def test_points_of_another_frame_are_named() -> None:
    problem = unseen_problem(_views(), XYZ + np.array([5e5, 4e6, 300]))
    assert problem is not None and "another frame" in problem and "4e+06" in problem
    assert unseen_problem(_views(), np.full((3, 3), np.nan)) is None
    assert unseen_problem(_views(poses=np.zeros((9, 4, 4))), XYZ) is None


def test_few_points_in_many_are_counted_in_full() -> None:
    """Every view of a large capture sees its own few points, which a sample misses."""
    far = np.random.default_rng(2).normal(size=(40_000, 3)) * 0.1 + [0, 500, 0]
    some = np.concatenate([far[:1], XYZ[:30], far[1:]])
    assert not seen_points(_views(), some[::41]).any()
    assert unseen_problem(_views(), some) is None


def test_views_that_see_no_point_are_counted() -> None:
    poses = _views().poses
    poses[:4, :3, 3] += 1e4
    views = _views(poses=poses)
    assert unseen_problem(views, XYZ) is None
    assert (unseen_note(views, XYZ) or "").startswith("44% of the views, of 9 looked at, see no seed point")
    assert unseen_note(_views(), XYZ) is None and unseen_note(views, XYZ[:50]) is None


# ---- whole captures ----


def _transforms(folder: Path, xyz: NDArray[np.float64] = XYZ, allow: bool = False) -> Findings:
    if not folder.exists():
        captures.write_capture(folder, ply_file_path="points.ply")
        write_ply(folder / "points.ply", xyz=xyz)
    config = DistributedDataManagerConfig(data=folder, dataparser=NerfstudioDataParserConfig(load_3D_points=True))
    return first_look(config, allow_unseen_points=allow)


def test_unseen_points_are_refused_unless_allowed(tmp_path: Path) -> None:
    assert _transforms(tmp_path / "good") == Findings()
    half = _transforms(tmp_path / "half", np.tile(XYZ[XYZ[:, 0] > 0.55] + [1.2, 0, 0], (9, 1)))
    assert half.problems == [] and "of the views, of" in "".join(half.notes)
    (problem,) = _transforms(tmp_path / "far", XYZ + 1e5).problems
    assert "another frame" in problem and problem.endswith("--allow-unseen-points True")
    found = _transforms(tmp_path / "far", allow=True)
    assert found.problems == [] and "another frame" in found.notes[0]


def test_colmap_poses_are_looked_at(tmp_path: Path) -> None:
    colmap_files.write_capture(tmp_path, points=40)
    config = DistributedDataManagerConfig(
        data=tmp_path, dataparser=ColmapDataParserConfig(colmap_path=Path("sparse/0"))
    )
    assert first_look(config).problems == []
    data = bytearray((tmp_path / "sparse/0/points3D.bin").read_bytes())
    place = 8
    for number in range(40):
        z = np.frombuffer(data, "<f8", 1, place + 24)[0]
        data[place + 24 : place + 32] = np.float64(-8 - z).tobytes()  # behind all cameras
        place += 51 + 8 * (number % 4)
    (tmp_path / "sparse/0/points3D.bin").write_bytes(data)
    (problem,) = first_look(config).problems
    assert problem.startswith("0% of the views see") and "Likely the poses" in problem


def test_a_ply_that_is_missing_or_truncated_is_refused(tmp_path: Path) -> None:
    assert _transforms(tmp_path / "good").problems == []
    path = tmp_path / "good/points.ply"
    path.write_bytes(path.read_bytes()[:-40])
    (problem,) = _transforms(tmp_path / "good").problems
    assert "points.ply: it is truncated or no number: it ends in point" in problem
    path.unlink()
    (problem,) = _transforms(tmp_path / "good").problems
    assert "ply_file_path of" in problem and "points.ply" in problem


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("count", [1, 3])
def test_points_that_are_no_numbers_are_named(tmp_path: Path, value: float, count: int) -> None:
    wrong = XYZ.copy()
    wrong[7 : 7 + count, 1] = value
    (problem,) = _transforms(tmp_path / "wrong", wrong).problems
    said = "point 8 of 400 is NaN" if count == 1 else "point 8 and 2 more of 400 are NaN"
    assert f"points.ply: {said} or infinite" in problem


def test_points_at_one_place(tmp_path: Path) -> None:
    (problem,) = _transforms(tmp_path / "one", np.full((9, 3), 0.25)).problems
    assert "all 9 points lie at one place" in problem
    assert _transforms(tmp_path / "single", np.full((1, 3), 0.0)).problems == []


def test_equal_points_are_merged(tmp_path: Path) -> None:
    twice = np.concatenate([XYZ[:30], XYZ[10:35]])
    found = _transforms(tmp_path / "twice", twice)
    assert found.problems == []
    assert found.notes == ["20 of 55 seed points lie where another one is, and are merged with it"]
    outputs = _parsed(tmp_path / "twice")
    assert len(outputs["points3D_xyz"]) == 35
    assert outputs["points3D_rgb"].numpy().tolist() == np.concatenate([RGB[:30], RGB[50:55]]).tolist()
    single = _transforms(tmp_path / "single", XYZ[:35])
    assert single.notes == []
    assert torch.equal(_parsed(tmp_path / "single")["points3D_xyz"], outputs["points3D_xyz"])


def _parsed(folder: Path) -> dict[str, torch.Tensor]:
    parser: Any = NerfstudioDataParserConfig(data=folder, load_3D_points=True)
    config = SimpleNamespace(data=None, dataparser=parser)
    with parsed_together(config, World.single(), trains=True):
        return config.dataparser.setup().get_dataparser_outputs("train").metadata


def test_a_ply_is_read_as_nerfstudio_reads_it(tmp_path: Path) -> None:
    """nerfstudio's colours lose one where a fraction of 255 is rounded down."""
    _transforms(tmp_path / "a")
    theirs = (
        NerfstudioDataParserConfig(data=tmp_path / "a", load_3D_points=True).setup().get_dataparser_outputs("train")
    )
    ours = _parsed(tmp_path / "a")
    assert torch.equal(ours["points3D_xyz"], theirs.metadata["points3D_xyz"])
    assert (ours["points3D_rgb"].int() - theirs.metadata["points3D_rgb"].int()).abs().max() <= 1


def test_equal_points_of_colmap_are_merged(tmp_path: Path) -> None:
    folder = colmap_files.write_binary(tmp_path, colmap_files.shots(3), points=20)
    data = bytearray((folder / "points3D.bin").read_bytes())
    data[8 + 51 + 8 : 8 + 51 + 32] = data[8 + 8 : 8 + 32]
    (folder / "points3D.bin").write_bytes(data)
    parser: Any = ColmapDataParserConfig(_target=QuickColmap, data=tmp_path).setup()
    found = parser._load_3D_points(folder, torch.eye(4)[:3], 1.0)
    assert {len(values) for values in found.values()} == {19} and found["points3D_num_points2D"][:2].tolist() == [0, 2]


@pytest.mark.parametrize(("order", "most"), [("ascii", 100), ("binary_little_endian", 5)])
def test_a_sample_of_a_ply(tmp_path: Path, order: str, most: int) -> None:
    path = write_ply(tmp_path / "a.ply", order)
    whole = read_ply(path)
    xyz, rgb, count = sample_ply(path, most)
    assert count == 400 and np.array_equal(xyz, whole[0][::4]) and np.array_equal(rgb, whole[1][::4])
    assert len(sample_ply(path, 8 * most)[0]) == 400
    write_ply(path, order, np.where(np.arange(400)[:, None] == 7, np.nan, XYZ))
    assert len(sample_ply(path, most)[0]) == 400, "a NaN point must be named"


def test_a_sample_of_a_truncated_ply_is_refused(tmp_path: Path) -> None:
    path = write_ply(tmp_path / "a.ply")
    text = path.read_text().rstrip()
    path.write_text(text[: text.rindex(" ")])
    with pytest.raises(Damaged, match="it ends in point 400 of 400"):
        sample_ply(path, 100)
    path.write_text("\n".join(text.splitlines()[:-3]))
    with pytest.raises(Damaged, match="it ends in point 398 of 400"):
        sample_ply(path, 100)


@pytest.mark.parametrize(("turned", "said"), [(5, "OpenCV's axes"), (4, "the rotations or the intrinsics are wrong")])
def test_another_reading_of_the_poses_must_suit_half_of_the_views(turned: int, said: str) -> None:
    poses = _views().poses
    poses[:turned] = poses[:turned] @ FLIP
    poses[turned:] = poses[turned:] @ np.array([[0.0, 0, 1, 0], [0, 1, 0, 0], [-1, 0, 0, 0], [0, 0, 0, 1]])  # sideways
    assert said in str(unseen_problem(_views(poses=poses), XYZ * 0.1))
