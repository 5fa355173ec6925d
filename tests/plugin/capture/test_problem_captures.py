"""Captures as people have them: the first look names what is wrong, and what to do."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from ns_multigpu.plugin.capture.first_look import Findings
from tests.lib import captures
from tests.lib.colmap_files import SIZE, Shot, shots, write_binary, write_capture, write_images, write_text
from tests.plugin.capture.test_first_look import look as look_at_colmap
from tests.plugin.capture.test_first_look import look_at_transforms as look

Change = Callable[[Path], object]


def _whole(**values: Any) -> Change:
    return lambda folder: captures.edit(folder, None, **values)


def _frame(**values: Any) -> Change:
    return lambda folder: captures.edit(folder, 3, **values)


def _text(change: Callable[[str], bytes]) -> Change:
    def apply(folder: Path) -> None:
        path = folder / "transforms.json"
        path.write_bytes(change(path.read_text()))

    return apply


def _of_another_machine(folder: Path) -> None:
    with captures.transforms(folder) as meta:
        for frame in meta["frames"]:
            frame["file_path"] = f"/of/another/machine/{frame['file_path']}"


def _without_a_path(folder: Path) -> None:
    with captures.transforms(folder) as meta:
        del meta["frames"][3]["file_path"]


COLUMNS = [[1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0], [1, 2, 3, 1]]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (_whole(k1=float("nan")), "transforms.json: its k1 is nan"),
        (_whole(w=float("inf")), "transforms.json: its w is Infinity, and must be a whole number"),
        (_frame(fl_x=0), "images/photo_03.png: its fl_x is 0"),
        (
            _whole(distortion_params=[0, 0, 0, 0]),
            "its distortion_params is [0, 0, 0, 0], and must have 6 or 12 numbers",
        ),
        (_whole(applied_transform=[[1, 0]]), "its applied_transform is [[1, 0]], and must have 3 rows of 4 numbers"),
        (_frame(mask_path="a.png"), "11 of 12 frames have no mask_path (images/photo_00.png first): give it to all or"),
        (_frame(depth_file_path="a.png"), "11 of 12 frames have no depth_file_path"),
        (
            _frame(transform_matrix=COLUMNS),
            "photo_03.png: the last row of its transform_matrix is [1, 2, 3, 1], not [0",
        ),
        (_frame(transform_matrix=None), "photo_03.png: its transform_matrix is not a table of 4 x 4 numbers"),
        (_frame(transform_matrix=[*(2 * np.eye(4)).tolist()[:3], [0, 0, 0, 1]]), "photo_03.png: its pose is not rigid"),
        (_frame(file_path="images/photo_04.png"), "photo_04.png: listed 2 times, with different poses"),
        (_whole(frames=["a.png"]), "its list of frames holds something else than frames"),
        (_text(lambda text: text.encode("utf-16")), "transforms.json: it is not in UTF-8: save it so"),
        (_text(lambda text: text.encode("utf-8-sig")), "it begins with a byte order mark (Windows): save it as UTF-8"),
        (
            _of_another_machine,
            "machine/images: there is no such folder. photo_00.png is in images: make the paths relative",
        ),
        (_frame(file_path=""), ": it is a folder, and a picture is needed"),
        (_without_a_path, "frame 3: it has no file_path"),
        (_text(lambda _: b"{"), "transforms.json: not valid JSON"),
        (_text(lambda _: b"[]"), "transforms.json: it has no list of frames"),
        (_whole(frames=[]), "transforms.json: it has no list of frames"),
        (_whole(w="24.0"), 'its w is "24.0", and must be a whole number'),
        (_whole(fl_y=None), "its fl_y is null, and must be a number"),
        (
            _whole(k6=0.1, camera_model="OPENCV_FISHEYE"),
            "its k6 is 0.1, and lenses of the camera_model have none: remove it",
        ),
        (_whole(camera_model="FOV"), "camera model FOV is unknown; SIMPLE_PINHOLE, PINHOLE"),
        (_frame(h="tall"), 'photo_03.png: its h is "tall", and must be a whole number'),
        (_frame(transform_matrix=[[1, 2], [3]]), "its transform_matrix is not a table of 4 x 4 numbers"),
        (_frame(transform_matrix=np.eye(4).tolist()[:3]), "has 3 rows of 4 numbers: add the row [0, 0, 0, 1]"),
    ],
)
def test_what_is_wrong_with_a_transforms_json(tmp_path: Path, change: Change, said: str) -> None:
    captures.write_capture(tmp_path, w="24", fl_x="20.0", k5=0.0)
    assert look(tmp_path).problems == []
    change(tmp_path)
    (problem,) = look(tmp_path).problems
    assert said in problem
    assert look(tmp_path / "transforms.json").problems == [problem]


def test_missing_intrinsics_are_listed(tmp_path: Path) -> None:
    captures.write_capture(tmp_path)
    with captures.transforms(tmp_path) as meta:
        del meta["fl_y"], meta["cx"]
        meta["frames"][0]["cx"] = 1.0
    for angle in (None, 0.7):
        if angle is not None:
            captures.edit(tmp_path, None, camera_angle_x=angle)
        (problem,) = look(tmp_path).problems
        assert "it has no fl_y, cx, and needs them for all frames or for each" in problem
        assert ("camera_angle_x, which is not read" in problem) == (angle is not None)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (_whole(cx=0), "principal point of 12 of 12 views lies outside of the image, such as (0, 8) of 24x16 pixels"),
        (_frame(cy=16.0), None),  # those for all frames are used
        (_whole(camera_angle_x=0.2), "camera_angle_x would be fl_x = 119.6, and fl_x is 20.0, which is used"),
        (_whole(camera_angle_x=1.08), None),
    ],
)
def test_notes_on_a_transforms_json(tmp_path: Path, change: Change, said: str | None) -> None:
    captures.write_capture(tmp_path)
    change(tmp_path)
    found = look(tmp_path)
    assert found.problems == [] and any(said in note for note in found.notes) if said else len(found.notes) <= 1


def test_without_held_out_views_there_is_no_score(tmp_path: Path) -> None:
    captures.write_capture(tmp_path / "json")
    write_capture(tmp_path / "colmap")
    assert look(tmp_path / "json").notes == look_at_colmap(tmp_path / "colmap").notes == []
    assert "No view is held out" in look(tmp_path / "json", train_split_fraction=1.0).notes[0]
    every = look_at_colmap(tmp_path / "colmap", eval_mode="fraction", train_split_fraction=1.0)
    assert "No view is held out" in every.notes[0]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("clip.mp4", "it has no poses yet: ns-process-data video --data"),
        ("scan.ZIP", "Unpack it, and give the folder"),
        ("a.jpg", "it has no poses yet: ns-process-data images --data"),
        ("notes.txt", "and a capture is a folder."),
    ],
)
@pytest.mark.parametrize("look_at", [look, look_at_colmap])
def test_a_file_is_no_capture(tmp_path: Path, name: str, said: str, look_at: Callable[[Path], Findings]) -> None:
    (tmp_path / name).touch()
    (problem,) = look_at(tmp_path / name).problems
    assert f"--data {tmp_path / name}: it is a file" in problem and said.lower() in problem.lower()


@pytest.mark.parametrize(("folder", "name"), [("keyframes", "polycam"), ("EXR_RGBD", "record3d")])
def test_exports_of_telephones_are_to_be_converted(tmp_path: Path, folder: str, name: str) -> None:
    (tmp_path / folder).mkdir()
    assert f"ns-process-data {name} --data {tmp_path} --output-dir FOLDER" in look(tmp_path).problems[0]


PLY = "ply\nformat ascii 1.0\nelement vertex {}\nproperty float x\nproperty float y\nproperty float z\n{}end_header\n"
BYTES = "".join(f"property uchar {name}\n" for name in ("red", "green", "blue"))


@pytest.mark.parametrize(
    ("header", "colour", "said"),
    [
        ("", "", "its points have no colours"),
        (BYTES, " 0 0 0", "its points have one colour, [0, 0, 0]"),
        (BYTES, " 0 0 {}", None),
    ],
)
def test_seed_points_without_colours_are_noted(tmp_path: Path, header: str, colour: str, said: str | None) -> None:
    captures.write_capture(tmp_path, ply_file_path="points.ply")
    rows = [f"0.{n} 0.1 0.2{colour.format(n)}\n" for n in range(8)]
    (tmp_path / "points.ply").write_text(PLY.format(8, header) + "".join(rows))
    found = look(tmp_path, load_3D_points=True)
    assert len(found.notes) == (said is not None) and (said or "") in "".join(found.notes)
    (tmp_path / "points.ply").write_text(PLY.format(0, header))
    (problem,) = look(tmp_path, load_3D_points=True).problems
    assert "points.ply: it has no points. Take ply_file_path out" in problem


# ---- COLMAP's layout ----


def test_images_in_another_folder_are_found(tmp_path: Path) -> None:
    write_text(tmp_path, shots(9))
    write_images(tmp_path, [Shot(k, 1, shot.name.replace(" ", "_")) for k, shot in enumerate(shots(9))])
    (problem,) = look_at_colmap(tmp_path, colmap_path=Path()).problems
    assert problem.endswith("images: there is no such folder. shot_00.jpg is in .: --images-path .")
    assert look_at_colmap(tmp_path, colmap_path=Path(), images_path=Path()).problems == []
    write_capture(tmp_path / "nested")
    (tmp_path / "nested/images").rename(tmp_path / "nested/all")
    (tmp_path / "nested/images").mkdir()
    (tmp_path / "nested/all").rename(tmp_path / "nested/images/more")
    assert (
        "shot 00.jpg: there is no such file, but more/shot 00.jpg is there"
        in look_at_colmap(tmp_path / "nested").problems[0]
    )


def test_links_folders_and_empty_files_are_no_images(tmp_path: Path) -> None:
    write_capture(tmp_path)
    link, folder, empty = (tmp_path / "images" / shot.name for shot in shots(3))
    for path in (link, folder, empty):
        path.unlink()
    link.symlink_to("/mnt/gone.jpg")
    folder.mkdir()
    empty.touch()
    assert [problem.partition(".jpg: ")[2] for problem in look_at_colmap(tmp_path).problems] == [
        "it is a link to /mnt/gone.jpg, and there is no such file",
        "it is a folder, and a picture is needed",
        "it is truncated or unreadable (it is empty); copy it again, or leave its view out",
    ]


def test_files_that_macos_adds_are_no_photographs(tmp_path: Path) -> None:
    write_capture(tmp_path)
    for number in range(30):
        (tmp_path / f"images/._{number}.jpg").touch()
    assert look_at_colmap(tmp_path).notes == []


@pytest.mark.parametrize("alpha", [0, 1])
def test_images_that_are_all_transparent_are_noted(tmp_path: Path, alpha: int) -> None:
    images = [Shot(shot.image, 1, shot.name.replace("jpg", "png")) for shot in shots()]
    write_capture(tmp_path, images)
    for shot in images:
        Image.new("RGBA", SIZE, (1, 2, 3, alpha)).save(tmp_path / "images" / shot.name)
    notes = look_at_colmap(tmp_path).notes
    assert len(notes) == (not alpha) and all("Images whose alpha channel is zero everywhere: shot" in n for n in notes)


@pytest.mark.parametrize("turn", [0.0, 1e-9])
def test_views_from_one_place(tmp_path: Path, turn: float) -> None:
    write_text(tmp_path / "sparse/0", shots())
    write_images(tmp_path / "images", [Shot(k, 1, shot.name.replace(" ", "_")) for k, shot in enumerate(shots())])
    path = tmp_path / "sparse/0/images.txt"
    rows = [line.split() for line in path.read_text().splitlines()]
    for number, row in enumerate(rows):
        row[5:8] = [str(turn * number), "0", "2"] if len(row) == 10 else row[5:8]
    path.write_text("\n".join(" ".join(row) for row in rows))
    assert (
        "All views are taken from one place, so the scene has no depth: add views" in look_at_colmap(tmp_path).problems
    )


@pytest.mark.parametrize(
    ("file", "old", "new", "said"),
    [
        ("cameras.txt", "1 PINHOLE", "1 PINHOLE 40 30 30 31 20 15\n1 PINHOLE", "camera 1 is listed twice"),
        ("cameras.txt", "40 30 30", "40.0 30 30", "an id, width or height is no whole number: '1 PINHOLE 40.0"),
        ("cameras.txt", "30 31", "-30 31", "camera 1 has a focal length of -30 pixels"),
        ("cameras.txt", "30 31", "30 nan", "a camera's parameter is NaN or infinite"),
        ("images.txt", "2 1 0 0 0 ", "1 1 0 0 0 ", "image 1 is listed twice"),
        ("images.txt", "2 1 0 0 0 ", "2 2 0 0 0 ", "shot_01.jpg: its rotation is a quaternion of length 2, not 1"),
        ("images.txt", "shot_00.jpg\n\n", "shot_00.jpg\n", "no line of keypoints, which may be empty: that of shot_00"),
        ("images.txt", "shot_00.jpg\n\n2 1", "shot_00.jpg\n2 1", "that of shot_00.jpg is '2 1 0 0 0 0.1"),
    ],
)
def test_what_is_wrong_with_a_text_model(tmp_path: Path, file: str, old: str, new: str, said: str) -> None:
    write_text(tmp_path / "sparse/0", shots())
    path = tmp_path / "sparse/0" / file
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new, 1))
    assert any(said in problem for problem in look_at_colmap(tmp_path).problems)


def test_a_name_with_spaces_is_not_taken_for_keypoints(tmp_path: Path) -> None:
    """Such a line has a multiple of three words; every other view would be lost."""
    write_text(tmp_path / "sparse/0", shots())
    path = tmp_path / "sparse/0/images.txt"
    lines = [line for line in path.read_text().splitlines() if "shot" in line]
    path.write_text("\n".join(line.replace("shot_", "a b ") for line in lines))
    assert "no line of keypoints, which may be empty: that of a b 00.jpg" in look_at_colmap(tmp_path).problems[0]


@pytest.mark.parametrize("write", [write_binary, write_text])
def test_names_in_gbk_are_shown(tmp_path: Path, write: Any) -> None:
    write(tmp_path / "sparse/0", shots())
    path = next((tmp_path / "sparse/0").glob("images.*"))
    path.write_bytes(path.read_bytes().replace(b"shot", "照片".encode("gbk")))
    assert "in GBK '照片" in look_at_colmap(tmp_path).problems[0]


def test_centres_in_place_of_translations(tmp_path: Path) -> None:
    """`images.txt` holds -R c for a camera at c; here it holds c."""
    rng = np.random.default_rng(0)
    folder = write_text(tmp_path / "sparse/0", shots(12))
    lines = ["# images"]
    for number in range(12):
        angle = 0.5 * number
        w, y = np.cos(angle / 2), np.sin(angle / 2)
        centre = (3 * np.sin(angle), 0.3, -3 * np.cos(angle))  # it looks at the origin
        lines += [f"{number + 1} {w} 0 {y} 0 {' '.join(map(str, centre))} 1 shot_{number:02d}.jpg", ""]
    (folder / "images.txt").write_text("\n".join(lines))
    points = [" ".join(map(str, [n, *rng.normal(0, 0.3, 3), 1, 2, 3, 0.5])) for n in range(200)]
    (folder / "points3D.txt").write_text("\n".join(points))
    write_images(tmp_path / "images", [Shot(k, 1, f"shot_{k:02d}.jpg") for k in range(12)])
    (problem,) = look_at_colmap(tmp_path).problems
    assert "Likely the translations are the cameras' places c: COLMAP's are -R c. Then 100% of the views" in problem
