"""Observations of views from COLMAP's tracks: keypoints have the file's positions and their points' depths."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch
from nerfstudio.data.dataparsers.colmap_dataparser import ColmapDataParserConfig
from nerfstudio.data.dataparsers.nerfstudio_dataparser import NerfstudioDataParserConfig

from ns_multigpu.core.dist.world import World
from ns_multigpu.core.step.depth_loss import keypoints
from ns_multigpu.plugin.capture.city_dataparser import CityDataParserConfig
from ns_multigpu.plugin.capture.datamanager import DistributedDataManager, DistributedDataManagerConfig
from ns_multigpu.plugin.capture.device_observations import DeviceObservations
from ns_multigpu.plugin.capture.first_look import first_look
from ns_multigpu.plugin.capture.tracks import images_of, scene_scale, training_tracks
from ns_multigpu.plugin.faults.errors import InputError
from ns_multigpu.plugin.model.cameras import view_from_camera
from tests.lib.captures import read_by
from tests.lib.reconstruction import (
    EIGHT,
    LENS,
    WIDTH,
    Scene,
    make_scene,
    moved,
    write_images,
    write_model,
    write_transforms,
)

FLIPPED = np.array([[0.0, 0, -1, 0.5], [-1, 0, 0, 0], [0, 1, 0, -2]])
ORIGIN, UTM = (0.0, 0.0, 0.0), (512345.0, 5412345.0, 312.0)
HELD_OUT = 4
"""Every so many views one is held out."""


def of_colmap(folder: Path, **options: Any) -> ColmapDataParserConfig:
    return ColmapDataParserConfig(data=folder, colmap_path=Path("sparse/0"), eval_interval=HELD_OUT, **options)


def of_nerfstudio(folder: Path) -> NerfstudioDataParserConfig:
    return NerfstudioDataParserConfig(data=folder, eval_mode="interval", eval_interval=HELD_OUT, downscale_factor=1)


def check_views(data: DistributedDataManager, scene: Scene, factor: int) -> None:
    """Return whether the training views' keypoints are those of the file, undistorted, and no others are there."""
    tracks = training_tracks(data, World.single())
    observed = DeviceObservations("observations", tracks, 2, torch.device("cpu"))
    pinholes = data.train_reader.cameras
    held_out = {path.name for path in data.eval_dataset.image_filenames}
    assert len(held_out) == 3 and len(tracks.counts) == len(scene.poses) - 3
    counted = 0
    for index, path in enumerate(data.train_dataset.image_filenames):
        image = next(i for i, name in enumerate(scene.names) if Path(name).name == path.name) + 1
        camera = pinholes[index : index + 1]
        view = view_from_camera(camera, camera.camera_to_worlds[0], index)
        (view,) = observed.given([view])
        assert view.width in range(WIDTH // factor - 8, WIDTH // factor + 1)
        places, depths, inside = (value.double().numpy() for value in keypoints(view))
        there, far = scene.seen(image)
        assert tracks.counts[index] == len(there) == len(places) > 8, "each point once"
        ends = (cv2.TERM_CRITERIA_COUNT | cv2.TERM_CRITERIA_EPS, 100, 1e-12)
        rays = cv2.undistortPointsIter(there, scene.intrinsics, np.array(scene.lens), np.eye(3), np.eye(3), ends)[:, 0]
        K = view.K.double().numpy()
        expected = rays * K[[0, 1], [0, 1]] + K[:2, 2]
        ahead = (far > 0) & (expected >= 0).all(1) & (expected < [view.width, view.height]).all(1)
        assert np.array_equal(inside.astype(bool), ahead)
        np.testing.assert_allclose(places[ahead], expected[ahead], atol=3e-3)
        scale = float(data.train_dataparser_outputs.dataparser_scale)
        np.testing.assert_allclose(depths[ahead], far[ahead] * scale, rtol=1e-5)
        counted += int(ahead.sum())
    assert 60 < counted < len(tracks.ids) - 10, "some are behind a camera, or outside of its image"


@pytest.mark.parametrize("place", [ORIGIN, UTM], ids=["origin", "utm"])
@pytest.mark.parametrize(
    ("text", "factor", "method", "lens"),
    [(False, 1, "up", LENS), (True, 2, "none", LENS), (False, 2, "none", EIGHT), (True, 1, "up", EIGHT)],
)
def test_a_capture_of_colmaps(tmp_path: Path, text: bool, factor: int, method: Any, lens: Any, place: Any) -> None:
    scene = moved(make_scene(lens=lens), place)
    write_model(tmp_path / "sparse/0", scene, text=text)
    write_images(tmp_path / ("images" if factor == 1 else f"images_{factor}"), scene, factor)
    data = read_by(of_colmap(tmp_path, downscale_factor=factor, orientation_method=method))
    data.check_capture()
    check_views(data, scene, factor)


@pytest.mark.parametrize("place", [ORIGIN, UTM], ids=["origin", "utm"])
@pytest.mark.parametrize(
    ("applied", "lens"), [(None, LENS), (FLIPPED, LENS), (FLIPPED, EIGHT)], ids=["unsaid", "flipped", "eight"]
)
def test_a_capture_of_nerfstudios_with_colmaps_model(tmp_path: Path, applied: Any, lens: Any, place: Any) -> None:
    scene = moved(make_scene(lens=lens, seed=8), place)
    write_transforms(tmp_path, scene, applied, Path("colmap/sparse/0"))
    check_views(read_by(of_nerfstudio(tmp_path)), scene, 1)


def test_step_inputs_of_tracks(tmp_path: Path) -> None:
    """Ids of the batch's views, filled up: also of views that observe fewer than those of the step before."""
    scene = make_scene(points=30)
    for track in scene.tracks:  # the second view observes nothing
        track[:] = [n for n in track if n != 2]
    write_transforms(tmp_path, scene, FLIPPED, Path("colmap/sparse/0"))
    data = read_by(of_nerfstudio(tmp_path))
    tracks = training_tracks(data, World.single())
    names = [path.name for path in data.train_dataset.image_filenames]
    assert [name for name, count in zip(names, tracks.counts, strict=True) if count == 0] == ["01.jpg"]
    observed = DeviceObservations("observations", tracks, 2, torch.device("cpu"))
    place = observed.batch.ids.data_ptr()
    starts = np.cumsum([0, *tracks.counts])
    for indices in ([2, 3], [0, 5], [names.index("01.jpg"), 2]):
        observed.fill(indices)
        for row, index in zip(observed.batch.ids.tolist(), indices, strict=True):
            expected = tracks.ids[starts[index] : starts[index + 1]].tolist()
            assert row == expected + [-1] * (max(tracks.counts) - len(expected))
    assert observed.batch.ids.data_ptr() == place and observed.batch.scale == tracks.scale
    poses = data.train_dataset.cameras.camera_to_worlds[:, :, 3]
    assert tracks.scale == pytest.approx(1.1 * float((poses - poses.mean(0)).norm(dim=1).max()))


def test_files_find_their_images() -> None:
    names = {7: "a.jpg", 3: "left/a.jpg", 0: "b.jpg", 5: "left/c.jpg", 6: "right/c.jpg"}
    files = [Path(name) for name in ("images/left/a.jpg", "images_4/a.jpg", "frames/b.jpg", "x/c.jpg", "images/d.jpg")]
    assert images_of(files, names) == [3, 7, 0, None, None]
    assert images_of([Path("small/c.jpg")], {9: "left/c.jpg"}) == [9], "smaller copies lie in one folder"
    assert scene_scale(np.zeros((2, 3, 4))) == 0


def _no_folder(folder: Path) -> None:
    (folder / "colmap").rename(folder / "other")


def _no_points(folder: Path) -> None:
    (folder / "colmap/sparse/0/points3D.bin").unlink()


def _cut_short(folder: Path) -> None:
    path = folder / "colmap/sparse/0/images.bin"
    path.write_bytes(path.read_bytes()[:-9])


def _no_tracks(folder: Path) -> None:
    scene = make_scene()
    write_model(folder / "colmap/sparse/0", replace(scene, tracks=[[] for _ in scene.points]))


def _held_out_alone(folder: Path) -> None:
    scene = make_scene()
    write_model(folder / "colmap/sparse/0", replace(scene, tracks=[[1, 8, 9] for _ in scene.points]))


def _other_images(folder: Path) -> None:
    scene = make_scene()
    write_model(folder / "colmap/sparse/0", replace(scene, names=[f"other{name[-4:]}" for name in scene.names]))


def _other_place(folder: Path) -> None:
    scene = make_scene()
    scene.poses[2, :3, 3] += 0.2
    write_model(folder / "colmap/sparse/0", scene)


def _other_words(folder: Path) -> None:
    scene, model = make_scene(), folder / "colmap/sparse/0"
    for path in model.iterdir():
        path.unlink()
    write_model(model, scene, text=True)
    path = model / "points3D.txt"
    path.write_text(path.read_text().replace(" 0.5 ", " half "))


LATE = [
    (_held_out_alone, "no view has a part in a point's track: give the model as COLMAP wrote it"),
    (_other_images, "none of its images, such as other.jpg, is one of the views.*give the model of this capture"),
    (_other_place, r"its cameras are not those of the capture: 02.jpg is \d% of the scene's size away"),
    (_other_words, "a file is damaged .*half.*copy it again"),
]
EARLY = [
    (_no_folder, "colmap/sparse/0: there is no such folder: put COLMAP's model"),
    (_no_points, "there are no points in points3D.bin"),
    (_cut_short, "images.bin: it is truncated"),
    (_no_tracks, "no point has a track.*give the model as COLMAP wrote it"),
]
"""Faults that are also found before any worker starts."""


@pytest.mark.parametrize(("spoil", "said"), [*EARLY, *LATE])
def test_a_capture_without_observations(tmp_path: Path, spoil: Any, said: str) -> None:
    write_transforms(tmp_path, make_scene(), FLIPPED, Path("colmap/sparse/0"))
    parser = of_nerfstudio(tmp_path)
    data = read_by(parser)
    spoil(tmp_path)
    with pytest.raises(InputError, match=f"(?s)^--pipeline.model.depth-loss: .*{said}"):
        training_tracks(data, World.single())
    found = [first_look(data.config, tracks=tracks).problems for tracks in (False, True)]
    early = (spoil, said) in EARLY
    assert [len(problems) for problems in found] == [0, int(early)]
    if early:
        assert "--pipeline.model.depth-loss" in found[1][0]


def test_a_capture_of_another_kind(tmp_path: Path) -> None:
    (problem,) = first_look(DistributedDataManagerConfig(dataparser=CityDataParserConfig()), tracks=True).problems
    assert "the dataparser city has no reconstruction of COLMAP's: use colmap, or nerfstudio-data" in problem
    assert "or leave --pipeline.model.depth-loss out" in problem
    scene = make_scene()
    scene.poses[:, :3, 3] = -np.einsum("nij,j->ni", scene.poses[:, :3, :3], np.ones(3))
    write_transforms(tmp_path, scene, FLIPPED, Path("colmap/sparse/0"))
    data = read_by(replace(of_nerfstudio(tmp_path), auto_scale_poses=False))
    with pytest.raises(InputError, match=r"taken from one place.*add views, or leave"):
        training_tracks(data, World.single())
