"""Messages about a capture before any worker starts."""

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from nerfstudio.data.dataparsers.colmap_dataparser import ColmapDataParserConfig
from nerfstudio.data.dataparsers.nerfstudio_dataparser import NerfstudioDataParserConfig
from PIL import Image

from ns_multigpu.plugin.capture.checks import small_problems
from ns_multigpu.plugin.capture.datamanager import DistributedDataManager, DistributedDataManagerConfig
from ns_multigpu.plugin.capture.first_look import PLACES, Findings, find_reconstruction, first_look
from ns_multigpu.plugin.faults.errors import InputError
from ns_multigpu.plugin.model.options import SplatModelConfig
from ns_multigpu.plugin.radiance.field.model import NerfactoXLModelConfig
from tests.lib import captures
from tests.lib.colmap_files import SIZE, Shot, shots, write_binary, write_capture, write_images, write_text


def look(data: Path, **options: Any) -> Findings:
    parser = ColmapDataParserConfig(**{"colmap_path": Path("sparse/0"), **options})
    return first_look(DistributedDataManagerConfig(data=data, dataparser=parser))


def manager(data: Path, **options: Any) -> DistributedDataManager:
    return captures.read_by(ColmapDataParserConfig(colmap_path=Path("sparse/0"), data=data, **options))


@pytest.fixture
def colmap(tmp_path: Path) -> Path:
    """Return a capture of COLMAP's without a fault."""
    return write_capture(tmp_path)


@pytest.fixture
def transforms(tmp_path: Path) -> Path:
    """Return a capture of nerfstudio's without a fault."""
    return captures.write_capture(tmp_path)


def test_a_good_capture(colmap: Path) -> None:
    found = look(colmap)
    assert found.problems == found.notes == []


@pytest.mark.parametrize(("name", "value"), [("scale_factor", 0.0), ("scene_scale", -1.0), ("scale_factor", math.nan)])
def test_scales_of_zero_are_refused(colmap: Path, name: str, value: float) -> None:
    assert look(colmap, **{name: value}).problems == [f"--{name.replace('_', '-')} {value}: give a number above 0"]


@pytest.mark.parametrize("auto", [True, False])
def test_folders_of_smaller_images(colmap: Path, auto: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if auto:
        monkeypatch.setattr("ns_multigpu.plugin.capture.first_look.MAX_AUTO_RESOLUTION", 25)
    (colmap / "images_4").mkdir()
    (problem,) = look(colmap, downscale_factor=None if auto else 2).problems
    assert f"{colmap}/images_2: there is no such folder" in problem
    assert "images (colmap --downscale-factor 1), images_4 (colmap --downscale-factor 4)" in problem
    assert ("more than 25 pixels" in problem) == auto
    write_images(colmap / "images_2", shots(), (SIZE[0] // 2, SIZE[1] // 2))
    assert look(colmap, downscale_factor=None if auto else 2).problems == []


def test_only_smaller_images_there(colmap: Path) -> None:
    (colmap / "images").rename(colmap / "images_4")
    for factor in (None, 2):
        (problem,) = look(colmap, downscale_factor=factor).problems
        assert "There is images_4 (colmap --downscale-factor 4)" in problem


@pytest.mark.parametrize(("mode", "size"), [("floor", (13, 10)), ("round", (13, 10)), ("ceil", (14, 10))])
def test_sizes_are_rounded_as_nerfstudio_rounds_them(colmap: Path, mode: str, size: tuple[int, int]) -> None:
    write_images(colmap / "images_3", shots(), size)
    assert look(colmap, downscale_factor=3, downscale_rounding_mode=mode).problems == []
    data = manager(colmap, downscale_factor=3, downscale_rounding_mode=mode)
    data.check_capture()
    assert (int(data.train_dataset.cameras.width[0]), int(data.train_dataset.cameras.height[0])) == size


def test_reconstruction_folder_is_found(colmap: Path) -> None:
    parser = ColmapDataParserConfig(data=colmap)
    (problem,) = first_look(DistributedDataManagerConfig(dataparser=parser)).problems
    assert "--colmap-path colmap/sparse/0" in problem and "give --colmap-path sparse/0" in problem
    (problem,) = first_look(DistributedDataManagerConfig(data=colmap)).problems  # nerfstudio's format is the default
    assert "transforms.json: there is no such file" in problem and problem.endswith("end the command with: colmap")
    (colmap / "sparse/0").rename(colmap / "sparse/1")
    (problem,) = first_look(DistributedDataManagerConfig(data=colmap)).problems
    assert problem.endswith("colmap --colmap-path sparse/1")
    (problem,) = look(colmap / "nowhere").problems
    assert f"--data {colmap}/nowhere" in problem


@pytest.mark.parametrize("there", ["sparse/0", "colmap/sparse/0"])
@pytest.mark.parametrize("given", ["colmap/sparse/0", "sparse/0", "elsewhere"])
def test_the_only_reconstruction_is_found(tmp_path: Path, there: str, given: str) -> None:
    (tmp_path / there).mkdir(parents=True)
    config = DistributedDataManagerConfig(
        data=tmp_path, dataparser=ColmapDataParserConfig(colmap_path=Path(given), load_3D_points=False)
    )
    parser: Any = config.dataparser
    assert find_reconstruction(config) == ""
    assert config.dataparser == dataclasses.replace(parser, colmap_path=Path(there))
    assert parser.colmap_path == Path(given), "a parser that methods may share is unchanged"


@pytest.mark.parametrize("given", ["colmap/sparse/0", "sparse/0"])
def test_of_two_reconstructions_the_one_that_is_used_is_named(tmp_path: Path, given: str) -> None:
    for place in PLACES:
        (tmp_path / place).mkdir(parents=True)
    parser = ColmapDataParserConfig(data=tmp_path, colmap_path=Path(given))
    config = DistributedDataManagerConfig(dataparser=parser)
    (other,) = (place for place in PLACES if place != Path(given))
    note = find_reconstruction(config)
    assert f". {given} is used" in note and note.endswith(f"--colmap-path {other}") and config.dataparser is parser


def test_no_reconstruction_is_looked_for_without_colmap(tmp_path: Path) -> None:
    (tmp_path / "sparse/0").mkdir(parents=True)
    config = DistributedDataManagerConfig(data=tmp_path, dataparser=NerfstudioDataParserConfig())
    assert find_reconstruction(config) == "" and config.dataparser == NerfstudioDataParserConfig()


@pytest.mark.parametrize("write", [write_binary, write_text])
def test_a_larger_reconstruction_is_noted(colmap: Path, write: Any) -> None:
    for number, views in ((1, 10), (2, 9)):
        write(colmap / f"sparse/{number}", shots(views))
    (colmap / "sparse/3").mkdir()
    assert look(colmap).notes == []
    for number, views in ((1, 12), (2, 11)):
        write(colmap / f"sparse/{number}", shots(views))
    (note,) = look(colmap).notes
    assert "sparse/0 holds 10 views and sparse/1 holds 12" in note and note.endswith("--colmap-path sparse/1")


@pytest.mark.parametrize(("write", "colour"), [(write_binary, "[10, 20, 0]"), (write_text, "[1, 2, 0]")])
def test_seed_points_of_one_colour_are_noted(colmap: Path, write: Any, colour: str) -> None:
    for file in (colmap / "sparse/0").iterdir():
        file.unlink()
    write(colmap / "sparse/0", shots(10), colors=1)
    (note,) = look(colmap).notes
    assert f"its points have one colour, {colour}; " in note and note.endswith(
        "`colmap color_extractor` takes them from the photographs"
    )


@pytest.mark.parametrize(("photographs", "noted"), [(20, False), (21, True)])
def test_photographs_that_colmap_could_not_place(colmap: Path, photographs: int, noted: bool) -> None:
    write_images(colmap / "images", shots(photographs))
    (colmap / "images/list.txt").write_text("no photograph")
    notes = look(colmap).notes
    assert len(notes) == noted and all("10 views, fewer than half of the 21 photographs" in note for note in notes)


def test_missing_points_matter_only_if_requested(colmap: Path) -> None:
    (colmap / "sparse/0/points3D.bin").unlink()
    (problem,) = look(colmap).problems
    assert "points3D.bin (or .txt) is missing" in problem and "--load-3D-points False" in problem
    assert look(colmap, load_3D_points=False).problems == []


@pytest.mark.parametrize("count", [0, 1])
def test_damage_is_found_by_workers_too(colmap: Path, count: int) -> None:
    """A user's program makes a datamanager without earlier checks of the capture."""
    path = colmap / "sparse/0/images.bin"
    path.write_bytes(path.read_bytes()[: -count or None][: None if count else 0])
    with pytest.raises(InputError, match=r"images.bin: it is (empty|truncated)"):
        manager(colmap, downscale_factor=1)


def test_dataparser_failure_is_reported_in_its_own_words(colmap: Path) -> None:
    (colmap / "test_list.txt").write_text("none.jpg\n")
    with pytest.raises(InputError, match="train is missing"):
        manager(colmap, downscale_factor=1)


def test_no_points_are_no_obstacle(tmp_path: Path) -> None:
    data = manager(write_capture(tmp_path, points=0), downscale_factor=1)
    assert "points3D_xyz" not in data.train_dataparser_outputs.metadata
    data = manager(write_capture(tmp_path / "some", points=3), downscale_factor=1)
    assert len(data.train_dataparser_outputs.metadata["points3D_xyz"]) == 3


@pytest.mark.parametrize(("views", "left"), [(1, 0), (2, 1), (9, 7)])
def test_views_that_are_left_to_train_with(tmp_path: Path, views: int, left: int) -> None:
    write_capture(tmp_path, shots(views))
    found = look(tmp_path)
    assert len(found.problems) == 2 * (left == 0)
    if left == 0:
        assert "1 view(s), and all are held out" in found.problems[0] and "--eval-mode all" in found.problems[0]
        (problem,) = look(tmp_path, eval_mode="all").problems
        assert "All views are taken from one place" in problem
    else:
        assert len(manager(tmp_path, downscale_factor=1).train_dataset) == left


@pytest.mark.parametrize("twin", [0, 1])
def test_a_frame_that_is_listed_twice(tmp_path: Path, twin: int) -> None:
    images = shots(12)
    write_capture(tmp_path, images)
    write_binary(tmp_path / "sparse/0", [*images, Shot(50, 1, images[twin].name)])
    found = look(tmp_path)
    assert found.problems == [f"{images[twin].name}: listed with 2 different poses"]
    assert found.notes[0].split(". ")[0] == f"Listed more than once: {images[twin].name}"
    assert ("too good" in found.notes[0]) == (twin == 0) and "jpg.." not in found.notes[0], (
        "the first view is held out, its twin is trained with"
    )


def test_alpha_in_some_images_only(colmap: Path) -> None:
    for number in (2, 5):
        path = colmap / "images" / shots()[number].name
        Image.open(path).convert("RGBA").save(path, format="PNG")
    (note,) = look(colmap).notes
    assert note == "2 of 10 images have an alpha channel, unlike the others: shot 02.jpg, shot 05.jpg"
    for shot in shots()[:-1]:
        path = colmap / "images" / shot.name
        Image.open(path).convert("RGBA").save(path, format="PNG")
    (note,) = look(colmap).notes
    assert note == "1 of 10 images have not an alpha channel, unlike the others: shot 09.jpg"


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_that_turns_an_image(colmap: Path, orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    lying = orientation >= 5
    path = colmap / "images" / shots()[3].name
    image = Image.open(path)
    (image.rotate(90, expand=True) if lying else image).save(path, exif=exif)
    found = look(colmap)
    assert len(found.problems) == lying and len(found.notes) == (1 < orientation < 5)
    if lying:
        assert "30x40 pixels and its camera 40x30" in found.problems[0] and "-auto-orient" in found.problems[0]
    for note in found.notes:
        assert "1 image(s) are to be turned" in note and shots()[3].name in note


def test_a_wrong_size_is_not_blamed_on_exif(colmap: Path) -> None:
    path = colmap / "images" / shots()[3].name
    Image.open(path).resize((33, 44)).save(path)
    (problem,) = look(colmap).problems
    assert "33x44" in problem and "EXIF" not in problem


def test_masks_are_checked(colmap: Path) -> None:
    assert look(colmap, masks_path=Path("masks")).problems == [f"{colmap}/masks: there is no such folder"]
    for shot in shots():
        (colmap / "masks").mkdir(exist_ok=True)
        Image.new("L", SIZE).save((colmap / "masks" / shot.name).with_suffix(".png"))
    assert look(colmap, masks_path=Path("masks")).problems == []


def test_a_slow_disk_is_left_to_the_workers(colmap: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (colmap / "images" / shots()[3].name).write_bytes(b"")
    assert look(colmap).problems != []
    monkeypatch.setattr("ns_multigpu.plugin.capture.first_look._PATIENCE", -1.0)
    assert look(colmap).problems == []


# ---- nerfstudio's format ----


def look_at_transforms(folder: Path, **options: Any) -> Findings:
    return first_look(DistributedDataManagerConfig(data=folder, dataparser=NerfstudioDataParserConfig(**options)))


def test_nerfstudios_format(transforms: Path) -> None:
    assert look_at_transforms(transforms).problems == look_at_transforms(transforms).notes == []
    captures.edit(transforms, 3, file_path="images/none.png")
    (problem,) = look_at_transforms(transforms).problems
    assert "images/none.png: there is no such file" in problem
    captures.edit(transforms, 3, file_path="images/photo_04.png")
    assert "Listed more than once" in look_at_transforms(transforms).notes[0]


def test_panoramas_are_drawn_as_they_are(tmp_path: Path) -> None:
    captures.write_capture(tmp_path, camera_model="EQUIRECTANGULAR", fl_x=12.0, fl_y=16.0, ply_file_path="points.ply")
    places = np.random.default_rng(3).normal([0, 30, 0], size=(40, 3))
    head = "\n".join(
        ["ply", "format ascii 1.0", "element vertex 40", *(f"property float {k}" for k in "xyz"), "end_header"]
    )
    (tmp_path / "points.ply").write_text(head + "".join(f"\n{x} {y} {z}" for x, y, z in places) + "\n")
    (*_, problem) = look_at_transforms(tmp_path).problems
    assert "EQUIRECTANGULAR cannot be undistorted; draw it as it is: --pipeline.datamanager.undistort False" in problem
    parser = NerfstudioDataParserConfig(load_3D_points=True)
    found = first_look(DistributedDataManagerConfig(data=tmp_path, dataparser=parser, undistort=False))
    assert found.problems == [] and found.unseen == "", "the points are above all cameras"


def test_nerfstudios_format_with_another_factor(transforms: Path) -> None:
    (transforms / "images_4").mkdir()
    (problem,) = look_at_transforms(transforms, downscale_factor=2).problems
    assert "images_2: there is no such folder" in problem
    assert "images_4 (nerfstudio-data --downscale-factor 4)" in problem


def test_parser_output_is_reported(transforms: Path) -> None:
    captures.edit(transforms, None, train_filenames=["images/photo_00.png"], val_filenames=["images/other.png"])
    (problem,) = look_at_transforms(transforms).problems
    assert "other.png" in problem


def test_other_formats_are_the_workers_affair(tmp_path: Path) -> None:
    from nerfstudio.data.dataparsers.blender_dataparser import BlenderDataParserConfig

    found = first_look(DistributedDataManagerConfig(data=tmp_path / "none", dataparser=BlenderDataParserConfig()))
    assert found.problems == found.notes == []


def test_notes_on_intrinsics_that_contradict_each_other(tmp_path: Path) -> None:
    captures.write_capture(tmp_path, k1=0.01)
    captures.edit(tmp_path, 3, fl_x=20.0, k1=0.01, k2=0)
    assert look_at_transforms(tmp_path).notes == []
    captures.edit(tmp_path, 3, fl_x=21.0, k2=0.1)
    captures.edit(tmp_path, 4, fl_x=22.0)
    (note,) = look_at_transforms(tmp_path).notes
    assert note == "fl_x, k2: 2 frames differ from the values for all frames; those for all are used"


@pytest.mark.parametrize("name", ["transforms_train.json", "images/a.jpg", "a.PNG"])
def test_a_folder_of_another_kind_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / "images").mkdir()
    (problem,) = look_at_transforms(tmp_path).problems
    assert problem.endswith("transforms.json: there is no such file.")
    (tmp_path / name).touch()
    (problem,) = look_at_transforms(tmp_path).problems
    assert ("with: blender-data" if "train" in name else "ns-process-data images") in problem


def test_a_first_image_that_is_missing_does_not_hide_the_others(transforms: Path) -> None:
    for number in (0, 1, 5):
        (transforms / f"images/photo_{number:02d}.png").rename(transforms / f"images/photo_{number:02d}.PNG")
    problems = look_at_transforms(transforms).problems
    assert [problem.split(": ")[0][-6:] for problem in problems] == ["00.png", "01.png", "05.png"]
    assert "photo_01.PNG is there" in problems[1]
    with captures.transforms(transforms) as meta:
        del meta["fl_x"]
    intrinsics, first = look_at_transforms(transforms).problems
    assert "it has no fl_x, and needs them for all frames or for each" in intrinsics
    assert "photo_00.PNG is there" in first


def test_views_from_one_place_are_named(transforms: Path) -> None:
    for frame in range(12):
        captures.edit(transforms, frame, transform_matrix=np.eye(4).tolist())
    (problem,) = look_at_transforms(transforms).problems
    assert "all views are taken from one place" in problem


def test_masks_without_a_white_pixel_are_noted(colmap: Path) -> None:
    (colmap / "masks").mkdir()
    for number, shot in enumerate(shots()):
        mask = np.full(SIZE[::-1], 0 if number == 6 else 1, np.uint8)
        Image.fromarray(mask).save((colmap / "masks" / shot.name).with_suffix(".png"))
    (note,) = look(colmap, masks_path=Path("masks")).notes
    assert note.startswith("Masks that leave out every pixel (inverted?): shot 06.png; ")


@pytest.mark.parametrize(("factor", "size"), [(3, (14, 10)), (4, (10, 8))])
def test_the_rounding_mode_that_fits_is_named(colmap: Path, factor: int, size: tuple[int, int]) -> None:
    write_images(colmap / f"images_{factor}", shots(), size)
    (problem,) = look(colmap, downscale_factor=factor).problems
    assert f"shot 00.jpg has {size[0]}x{size[1]}. Give --downscale-rounding-mode ceil" in problem
    assert look(colmap, downscale_factor=factor, downscale_rounding_mode="ceil").problems == []


def test_names_with_spaces_in_a_text_model(tmp_path: Path) -> None:
    write_images(tmp_path / "images", shots())
    folder = write_text(tmp_path / "sparse/0", shots())
    lines = (folder / "images.txt").read_text()
    (folder / "images.txt").write_text(lines.replace("shot_", "shot "))
    assert look(tmp_path).problems == []
    data = manager(tmp_path, downscale_factor=1)
    data.check_capture()
    assert {path.name for path in data.train_dataset.image_filenames} < {shot.name for shot in shots()}


@pytest.mark.parametrize(
    ("size", "options", "remedy"),
    [
        ((44, 60), {}, None),
        ((60, 43), {}, "num-downscales 1"),
        ((21, 60), {}, "num-downscales 0"),
        ((9, 60), {}, "ssim-lambda 0"),
        ((9, 60), {"ssim_lambda": 0.0}, None),
        ((11, 60), {"num_downscales": 0}, None),
        ((10, 60), {"num_downscales": 0}, "ssim-lambda 0"),
    ],
)
def test_images_smaller_than_ssims_window(size: tuple[int, int], options: dict[str, Any], remedy: str | None) -> None:
    sizes, names = [(100, 100), size], [Path("large.jpg"), Path("small.jpg")]
    problems = small_problems(sizes, names, SplatModelConfig(**options))
    assert [line.rpartition("--pipeline.model.")[2] for line in problems] == ([remedy] if remedy else [])
    assert all(
        "1 image(s) have fewer than" in line and f"small.jpg has {size[0]}x{size[1]}" in line for line in problems
    )
    assert small_problems(sizes, names, NerfactoXLModelConfig()) == []


def test_small_images_are_refused_before_workers_start(colmap: Path) -> None:
    config = DistributedDataManagerConfig(dataparser=ColmapDataParserConfig(data=colmap, colmap_path=PLACES[1]))
    (problem,) = first_look(config, SplatModelConfig()).problems
    assert "num-downscales 2: " in problem and first_look(config, SplatModelConfig(num_downscales=1)).problems == []
