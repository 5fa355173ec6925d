"""COLMAP's files: what is read of them is what nerfstudio reads, and none that was cut short passes for whole."""

import shutil
import struct
from pathlib import Path

import pytest
from nerfstudio.data.utils import colmap_parsing_utils as nerfstudio

from ns_multigpu.plugin.capture.colmap import ColmapView, look_at, names_in_text, point_count
from tests.lib.colmap_files import SIZE, Shot, shots, write_binary, write_text

FOX = Path(__file__).parents[4] / "shared" / "data" / "fox" / "sparse" / "0"


@pytest.mark.parametrize("write", [write_binary, write_text])
def test_complete_reconstruction_has_no_problem(tmp_path: Path, write: object) -> None:
    images = [Shot(7, 1, "b.jpg"), Shot(3, 1, "a.jpg"), Shot(9, 1, "c.jpg")]
    write(tmp_path, images)  # type: ignore[operator]
    found = look_at(tmp_path)
    assert found.problems == []
    assert found.views == [ColmapView(name, *SIZE) for name in ("a.jpg", "b.jpg", "c.jpg")], "by image id"
    assert found.points == 20 == point_count(tmp_path)
    tracks = nerfstudio.read_points3D_binary if write is write_binary else nerfstudio.read_points3D_text
    file = next(tmp_path.glob("points3D.*"))
    assert found.observations == sum(len(point.image_ids) for point in tracks(file).values())


@pytest.mark.skipif(not FOX.is_dir(), reason=f"the fox capture is not at {FOX}")
def test_a_real_reconstruction() -> None:
    found = look_at(FOX)
    images = nerfstudio.read_images_binary(FOX / "images.bin")
    points = nerfstudio.read_points3D_binary(FOX / "points3D.bin")
    assert found.problems == [] and found.points == len(points)
    assert found.observations == sum(len(point.image_ids) for point in points.values())
    assert [view.name for view in found.views] == [images[number].name for number in sorted(images)]


@pytest.mark.parametrize("file", ["cameras.bin", "images.bin", "points3D.bin"])
def test_a_binary_file_cut_anywhere_is_named(tmp_path: Path, file: str) -> None:
    write_binary(tmp_path, shots(4), points=5)
    whole = (tmp_path / file).read_bytes()
    for length in range(len(whole)):
        (tmp_path / file).write_bytes(whole[:length])
        (problem,) = look_at(tmp_path).problems
        assert file in problem and ("truncated" in problem or "empty" in problem), f"{length} bytes: {problem}"
    (tmp_path / file).write_bytes(whole)
    assert look_at(tmp_path).problems == []


@pytest.mark.parametrize(("file", "keep"), [("cameras.txt", 4), ("images.txt", 7), ("points3D.txt", 5)])
def test_a_text_file_whose_last_line_is_cut_is_named(tmp_path: Path, file: str, keep: int) -> None:
    write_text(tmp_path, shots(4))
    lines = [line for line in (tmp_path / file).read_text().splitlines() if line.split() and line[0] != "#"]
    last = " ".join(lines[-1].split()[:keep])
    (tmp_path / file).write_text("\n".join([*lines[:-1], last]))
    assert any(file in problem for problem in look_at(tmp_path).problems)


@pytest.mark.parametrize("kind", ["bin", "txt"])
@pytest.mark.parametrize("file", ["cameras", "images"])
def test_a_file_that_is_missing_or_lists_nothing(tmp_path: Path, file: str, kind: str) -> None:
    (write_binary if kind == "bin" else write_text)(tmp_path, shots(4))
    path = tmp_path / f"{file}.{kind}"
    path.write_bytes(struct.pack("<Q", 0) if kind == "bin" else b"# nothing\n")
    assert any(f"lists no {file}" in problem for problem in look_at(tmp_path).problems)
    path.unlink()
    (problem,) = look_at(tmp_path).problems
    assert "no such file" in problem or "no cameras.bin and no cameras.txt" in problem


def test_a_model_without_points(tmp_path: Path) -> None:
    write_binary(tmp_path, shots(4), points=0)
    assert look_at(tmp_path).points == 0 == point_count(tmp_path)
    (tmp_path / "points3D.bin").unlink()
    assert look_at(tmp_path).points is None and point_count(tmp_path) is None
    shutil.copy(write_text(tmp_path / "text", shots(4)) / "points3D.txt", tmp_path)
    assert look_at(tmp_path).points == 20 == point_count(tmp_path), "as nerfstudio does, where there is no .bin"


def test_invalid_values_are_named(tmp_path: Path) -> None:
    write_binary(tmp_path, [*shots(3), Shot(9, 77, "lost.jpg")], model=10)
    problems = look_at(tmp_path).problems
    assert any("model THIN_PRISM_FISHEYE" in line and "colmap image_undistorter" in line for line in problems)
    assert any("lost.jpg: its camera 77 is not in cameras.bin" in line for line in problems)
    data = bytearray((tmp_path / "images.bin").read_bytes())
    data[12:20] = struct.pack("<d", float("inf"))
    (tmp_path / "images.bin").write_bytes(data)
    assert any("shot 00.jpg: its pose is NaN or infinite" in line for line in look_at(tmp_path).problems)
    data = bytearray((tmp_path / "cameras.bin").read_bytes())
    data[12:16] = struct.pack("<i", 99)
    (tmp_path / "cameras.bin").write_bytes(data)
    assert any("number 99" in line for line in look_at(tmp_path).problems)


def test_text_that_an_editor_has_changed(tmp_path: Path) -> None:
    write_text(tmp_path, shots(3))
    file = tmp_path / "images.txt"
    file.write_text(file.read_text().rstrip("\n"))
    assert look_at(tmp_path).problems == [] and len(look_at(tmp_path).views) == 3
    file.write_text(file.read_text().replace("shot_01", "my  shot 01"))
    assert names_in_text(file) == {1: "shot_00.jpg", 2: "my  shot 01.jpg", 3: "shot_02.jpg"}
    file.write_bytes(b"\xef\xbb\xbf" + file.read_bytes())
    (problem,) = look_at(tmp_path).problems
    assert "images.txt: it begins with a byte order mark" in problem


def test_names_that_are_not_in_utf8(tmp_path: Path) -> None:
    write_binary(tmp_path, [Shot(1, 1, "image-a.jpg")])
    file = tmp_path / "images.bin"
    file.write_bytes(file.read_bytes().replace(b"image-a", "图像-a".encode("gbk") + b"bb"[:1]))
    (problem,) = look_at(tmp_path).problems
    assert "its names are not in UTF-8" in problem


@pytest.mark.parametrize("write", [write_binary, write_text])
def test_camera_models_of_a_newer_colmap_are_to_be_converted(tmp_path: Path, write: object) -> None:
    write(tmp_path, shots(3))  # type: ignore[operator]
    path = next(tmp_path.glob("cameras.*"))
    path.write_bytes(path.read_bytes().replace(b"PINHOLE", b"DIVISION").replace(b"\1\0\0\0(", b"\x0e\0\0\0("))
    (problem,) = look_at(tmp_path).problems
    assert "camera 1 is of an unknown model, " in problem and "Convert the capture: colmap image_undist" in problem


@pytest.mark.parametrize(("model", "mixed"), [("SIMPLE_RADIAL", False), ("RADIAL_FISHEYE", True)])
def test_fisheye_cameras_are_not_mixed_with_others(tmp_path: Path, model: str, mixed: bool) -> None:
    write_text(tmp_path, [Shot(number, 1 + number % 2, f"{number}.jpg") for number in range(4)])
    with (tmp_path / "cameras.txt").open("a") as file:
        file.write(f"2 {model} 40 30 30 20 15 0.1 0.1\n3 OPENCV_FISHEYE 40 30 30 30 20 15 0 0 0 0\n")
    problems = look_at(tmp_path).problems
    assert len(problems) == mixed and all("some images have fisheye cameras and some have not" in p for p in problems)
