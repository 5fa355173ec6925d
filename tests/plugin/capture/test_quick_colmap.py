"""Points of COLMAP's are nerfstudio's to the bit, and read once."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from nerfstudio.cameras.cameras import CameraType
from nerfstudio.data.dataparsers.colmap_dataparser import ColmapDataParser, ColmapDataParserConfig
from nerfstudio.data.utils import colmap_parsing_utils as colmap

from ns_multigpu.core.dist.world import World
from ns_multigpu.plugin.capture import quick_colmap
from ns_multigpu.plugin.capture.colmap import Damaged
from ns_multigpu.plugin.capture.opencv_cameras import OpenCVCameras
from ns_multigpu.plugin.capture.parsing import parsed_together
from ns_multigpu.plugin.capture.quick_colmap import QuickColmap
from tests.lib.colmap_files import Shot, write_text

TURNED = torch.tensor([[0.0, -1.0, 0.0, 0.3], [1.0, 0.0, 0.0, -2.0], [0.0, 0.0, 1.0, 0.1]])


def _written(folder: Path, count: int = 50) -> Path:
    """Return a folder with points whose tracks differ in length; some have none."""
    rng = np.random.default_rng(3)
    points = {
        7 * n + 1: colmap.Point3D(
            7 * n + 1, rng.normal(size=3), rng.integers(0, 256, 3), float(rng.random()),
            rng.integers(0, 9, tracks := int(rng.integers(0, 6))), rng.integers(0, 99, tracks),
        )
        for n in rng.permutation(count).tolist()
    }  # fmt: skip
    colmap.write_points3D_binary(points, folder / "points3D.bin")
    return folder


def _parsers(folder: Path, **more: Any) -> tuple[ColmapDataParser, ColmapDataParser]:
    """Return nerfstudio's, and ours."""
    parsers: tuple[Any, ...] = (ColmapDataParser, QuickColmap)
    theirs, ours = (ColmapDataParserConfig(_target=kind, data=folder, **more).setup() for kind in parsers)
    return theirs, ours


def _same(theirs: dict[str, torch.Tensor], ours: dict[str, torch.Tensor]) -> None:
    assert list(theirs) == list(ours)
    for name, values in theirs.items():
        assert values.dtype == ours[name].dtype and torch.equal(values, ours[name]), name


def test_points_are_nerfstudios(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ns_multigpu.plugin.capture.colmap._AT_ONCE", 7)
    theirs, ours = _parsers(_written(tmp_path))
    _same(theirs._load_3D_points(tmp_path, TURNED, 0.7), ours._load_3D_points(tmp_path, TURNED, 0.7))


def test_a_file_is_read_once_and_again_for_another_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs, ours = _parsers(_written(tmp_path))
    read, plain = list[Path](), quick_colmap.read_points
    monkeypatch.setattr(quick_colmap, "read_points", lambda file: (read.append(file), plain(file))[1])
    for _ in range(2):
        ours._load_3D_points(tmp_path, TURNED, 0.7)["more"] = torch.zeros(1)  # what a caller adds is its own
    _same(theirs._load_3D_points(tmp_path, TURNED, 0.7), ours._load_3D_points(tmp_path, TURNED, 0.7))
    assert len(read) == 1
    for place in ((TURNED, 0.5), (TURNED.roll(1, 0), 0.5)):
        _same(theirs._load_3D_points(tmp_path, *place), ours._load_3D_points(tmp_path, *place))
    assert len(read) == 3


def test_views_are_read_once_and_given_as_they_were(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, ours = _parsers(_written(tmp_path))
    read = list[Path]()

    def views(_: Any, folder: Path) -> dict[str, Any]:
        read.append(folder)
        return {"frames": [{"transform_matrix": np.eye(4), "k4": 0.5, "file_path": "a.png"}]}

    monkeypatch.setattr(ColmapDataParser, "_get_all_images_and_cameras", views)
    for _ in range(2):
        found = ours._get_all_images_and_cameras(tmp_path)
        assert found == {"frames": [{"transform_matrix": pytest.approx(np.eye(4)), "file_path": "a.png"}]}
        assert ours._last.tolist() == [[0.5, 0, 0]]
        found["frames"][0]["transform_matrix"][:] = 7
    ours._get_all_images_and_cameras(tmp_path / "other")
    assert read == [tmp_path, tmp_path / "other"]


def test_of_two_points_with_one_id_the_last_counts(tmp_path: Path) -> None:
    file = _written(tmp_path) / "points3D.bin"
    data = bytearray(file.read_bytes())
    second = 8 + 51 + 8 * int.from_bytes(data[8 + 43 : 8 + 51], "little")
    data[second : second + 8] = data[8:16]
    file.write_bytes(data)
    theirs, ours = _parsers(tmp_path)
    expected = theirs._load_3D_points(tmp_path, TURNED, 1.0)
    assert len(expected["points3D_xyz"]) == 49
    _same(expected, ours._load_3D_points(tmp_path, TURNED, 1.0))


def _text(folder: Path) -> None:
    colmap.write_points3D_text(colmap.read_points3D_binary(folder / "points3D.bin"), folder / "points3D.txt")
    (folder / "points3D.bin").unlink()


@pytest.mark.parametrize(("change", "more"), [(_text, {}), (lambda _: None, {"max_2D_matches_per_3D_point": -1})])
def test_other_formats_are_left_to_nerfstudio(
    tmp_path: Path, change: Callable[[Path], None], more: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    change(_written(tmp_path))
    _, ours = _parsers(tmp_path, **more)
    monkeypatch.setattr(ColmapDataParser, "_load_3D_points", lambda *_: {"theirs": torch.ones(1)})
    assert list(ours._load_3D_points(tmp_path, TURNED, 1.0)) == ["theirs"]


@pytest.mark.parametrize("cut", [3, 60])
def test_a_file_that_ends_too_early_is_an_error(tmp_path: Path, cut: int) -> None:
    file = _written(tmp_path) / "points3D.bin"
    file.write_bytes(file.read_bytes()[:-cut])
    with pytest.raises(Damaged, match=r"points3D.bin: it is truncated: it ends in point 50 of 50"):
        quick_colmap.read_points(file)


FISHEYES = {1: "OPENCV_FISHEYE 40 30 30 31 20 15 .1 .02 .003 .0004", 2: "OPENCV_FISHEYE 40 30 30 31 20 15 .2 0 0 -.5"}
EIGHTS = {
    1: "FULL_OPENCV 40 30 30 31 20 15 .1 .2 .03 .04 .5 .6 .7 .8",
    2: "FULL_OPENCV 40 30 30 31 20 15 0 0 0 0 0 0 0 -.5",
}


@pytest.mark.parametrize(
    ("models", "lenses"),
    [
        (FISHEYES, ([0.1, 0.02, 0.003, 0.0004, 0, 0], [0.2, 0, 0, -0.5, 0, 0])),
        (EIGHTS, ([0.1, 0.2, 0.5, 0.6, 0.03, 0.04, 0.7, 0.8], [0, 0, 0, 0, 0, 0, 0, -0.5])),
    ],
    ids=["fisheye", "eight"],
)
def test_each_view_of_a_split_has_its_own_lens(tmp_path: Path, models: dict[int, str], lenses: Any) -> None:
    write_text(tmp_path / "sparse/0", [Shot(20 - number, 1 + number % 2, f"{number:02d}.jpg") for number in range(10)])
    (tmp_path / "sparse/0/cameras.txt").write_text("\n".join(f"{k} {model}" for k, model in models.items()))
    kind: Any = QuickColmap
    parser = ColmapDataParserConfig(kind, data=tmp_path, colmap_path=Path("sparse/0"), downscale_factor=1).setup()
    views = 0
    for split in ("train", "val"):
        outputs = parser.get_dataparser_outputs(split)
        kind = CameraType.FISHEYE if models is FISHEYES else CameraType.PERSPECTIVE
        assert bool((outputs.cameras.camera_type == kind.value).all())
        assert isinstance(outputs.cameras, OpenCVCameras) == (models is EIGHTS)
        for path, found in zip(outputs.image_filenames, outputs.cameras.distortion_params, strict=True):
            assert found.tolist() == pytest.approx(lenses[int(path.stem) % 2])
            views += 1
    assert views == 10


def test_quick_parser_replaces_only_the_colmap_parser(tmp_path: Path) -> None:
    class Another(ColmapDataParser):
        pass

    found: list[Any] = []
    for kind in (ColmapDataParser, Another):
        parser: Any = ColmapDataParserConfig(_target=kind, data=_written(tmp_path), colmap_path=Path())
        config = SimpleNamespace(data=None, dataparser=parser)
        with parsed_together(config, World.single(), trains=False):
            found.append(config.dataparser._target)
    assert found == [QuickColmap, Another]
