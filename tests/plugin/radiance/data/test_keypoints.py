"""Rays at keypoints: they pass through points of the capture's reconstruction, the same on every rank."""

from pathlib import Path
from typing import Any

import pytest
import torch
from nerfstudio.cameras.cameras import CameraType

from ns_multigpu.core.dist.world import World
from ns_multigpu.plugin.capture.tracks import read_tracks
from ns_multigpu.plugin.faults.errors import InputError
from ns_multigpu.plugin.radiance.data.keypoints import find_keypoints
from tests.lib.captures import write_capture
from tests.lib.ranks import run_ranks
from tests.lib.reconstruction import add_model
from tests.plugin.radiance.data.test_radiance_rays import PATCHES, RAYS, different_sizes, manager

CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "masks": ({"masks": True}, {}),
    "masks ignored": ({"masks": True}, {"sampler": {"ignore_mask": True}}),
    "sizes and masks": ({"masks": True}, {}),
    "some images": ({"masks": True}, {"train_num_images_to_sample_from": 3, "train_num_times_to_repeat_images": 0}),
    "lens": ({"k1": 0.1}, {}),
    "fisheye": ({"camera_model": "OPENCV_FISHEYE", "k1": 0.02, "k2": 0.0, "k3": 0.0, "k4": 0.0}, {}),
    "patches": ({}, {"patch_size": 4, **PATCHES}),
}
STEPS = (0, 1, 2, 1)


@pytest.fixture(scope="module")
def captures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("captures")
    written = {name: write_capture(folder / name.replace(" ", "-"), **meta) for name, (meta, _) in CASES.items()}
    different_sizes(written["sizes and masks"])
    for capture in written.values():
        add_model(capture)
    return written


def observed(capture: Path, world: World, **more: Any) -> Any:
    """Return a datamanager that draws rays at keypoints."""
    data = manager(capture, world, **more)
    data.observe(read_tracks(data.dataparser_config, data.train_dataparser_outputs))
    return data


def batches(world: World, captures: dict[str, Path], device_inputs: bool = False) -> dict[str, list[Any]]:
    """Return the rays and batches of some steps, by case."""
    found: dict[str, list[Any]] = {}
    for case, (_, more) in CASES.items():
        data = observed(captures[case], world, **more)
        inputs = data.step_inputs() if device_inputs else None
        if device_inputs and inputs is None:
            continue
        found[case] = []
        for step in STEPS:
            if inputs is None:
                rays, batch = data.next_train(step)
            else:
                inputs.send(step)
                inputs.share()
                rays, batch = inputs.batch()
            found[case].append((rays.origins.clone(), rays.directions.clone(), batch))
    return found


def test_one_ray_in_eight_passes_a_point_that_its_view_observes(captures: dict[str, Path]) -> None:
    for case, steps in batches(World.single(), captures).items():
        data = manager(captures[case], World.single(), **CASES[case][1])
        tracks = read_tracks(data.dataparser_config, data.train_dataparser_outputs)
        observations = tracks.ids.split(list(tracks.counts))
        seen = set[tuple[float, ...]]()
        for origins, directions, batch in steps:
            shown = batch["scales"][:, 0] > 0
            assert shown.nonzero()[:, 0].tolist() == list(range(7, len(origins), 8)), case
            assert batch["scales"][shown].unique().tolist() == pytest.approx([tracks.scale])
            to_point = torch.nn.functional.normalize(batch["points"] - origins, dim=1)
            angles = torch.linalg.cross(to_point, directions)[shown].norm(dim=1)
            assert float(angles.max()) < 0.75 / 20 and float(angles.max()) > 0.2 / 20, "half a pixel across"
            assert bool(((to_point * directions).sum(1) > 0)[shown].all())
            for (view, _, _), point in zip(batch["indices"][shown].tolist(), batch["points"][shown], strict=True):
                assert bool((tracks.points[observations[view].long()] == point).all(1).any())
            seen |= {tuple(row) for row in batch["indices"][shown].tolist()}
            if "mask" in batch:
                assert bool(batch["mask"].all()) == (case != "masks ignored")
        assert len(seen) > 12, case
        assert not all(torch.equal(steps[0][2]["indices"], other[2]["indices"]) for other in steps[1:])


def test_keypoints_replace_rays_that_are_drawn_without(captures: dict[str, Path]) -> None:
    """The others are what they are without the loss; of images without a keypoint all are."""
    plain = manager(captures["plain"], World.single()).next_train(1)[1]
    batch = observed(captures["plain"], World.single()).next_train(1)[1]
    others = batch["scales"][:, 0] == 0
    assert torch.equal(batch["indices"][others], plain["indices"][others]) and int(others.sum()) == RAYS * 7 // 8
    assert torch.equal(batch["image"][others], plain["image"][others]) and "points" not in plain
    data = manager(captures["plain"], World.single())
    tracks = read_tracks(data.dataparser_config, data.train_dataparser_outputs)
    found = find_keypoints(tracks, data.train_dataset.cameras)
    data._splits[5].observe(found.where(torch.zeros_like(found.at, dtype=torch.bool)))
    batch = data.next_train(1)[1]
    assert not batch["scales"].any() and torch.equal(batch["indices"], plain["indices"])


def test_rays_at_keypoints_are_independent_of_the_world_size(captures: dict[str, Path]) -> None:
    expected = batches(World.single(), captures)
    ranks = [*run_ranks(batches, 2, captures), batches(World.single(), captures, True)]
    ranks += run_ranks(batches, 3, captures, True)
    for found in ranks:
        for case, steps in found.items():
            for (origins, directions, batch), one in zip(steps, expected[case], strict=True):
                torch.testing.assert_close(origins, one[0], rtol=0, atol=0)
                torch.testing.assert_close(directions, one[1], rtol=1e-5, atol=1e-6)
                assert batch.keys() == one[2].keys()
                assert all(torch.equal(value, one[2][name]) for name, value in batch.items()), case
    assert set(ranks[-1]) == set(CASES) - {"fisheye"}


def test_cameras_of_unknown_projection_are_refused(captures: dict[str, Path]) -> None:
    data = manager(captures["plain"], World.single())
    tracks = read_tracks(data.dataparser_config, data.train_dataparser_outputs)
    cameras = data.train_dataset.cameras
    cameras.camera_type[2] = CameraType.ORTHOPHOTO.value
    with pytest.raises(InputError, match=r"--pipeline\.model\.depth-loss: .*type ORTHOPHOTO"):
        find_keypoints(tracks, cameras)


def test_a_capture_without_colmaps_points_is_refused(tmp_path: Path) -> None:
    from tests.plugin.radiance.run.test_radiance_run import configured, trained

    capture = write_capture(tmp_path / "capture")
    config = configured(capture, tmp_path / "run", depth_loss=0.1)
    assert config.needs_tracks() and not configured(capture, tmp_path / "run").needs_tracks()
    with pytest.raises(InputError, match=r"(?s)--pipeline\.model\.depth-loss: .*there is no such folder.*leave .* out"):
        trained(World.single(), config)
    for weight in (-0.1, float("nan"), float("inf")):
        config.pipeline.model.depth_loss = weight
        with pytest.raises(
            InputError, match=f"--pipeline.model.depth-loss {weight}: give a weight of 0 or more, or auto"
        ):
            config.check_method()
    assert config.pipeline.model.__setstate__({}) is None and config.pipeline.model.depth_loss == 0  # of an older run


@pytest.mark.parametrize(("has_model", "options"), [(False, {}), (True, {}), (True, {"depth_loss": 0.0})])
def test_depths_are_learned_by_default_where_a_capture_has_points(
    tmp_path: Path, has_model: bool, options: dict[str, float], capsys: pytest.CaptureFixture[str]
) -> None:
    from tests.plugin.radiance.run.test_radiance_run import configured, trained

    capture = write_capture(tmp_path / "capture")
    if has_model:
        add_model(capture)
    pipeline = trained(World.single(), configured(capture, tmp_path / "run", **options)).pipeline
    learned = has_model and not options
    assert pipeline.model.depth_weight == (0.01 if learned else 0)
    assert ("scales" in pipeline.datamanager.next_train(0)[1]) == learned
    assert ("Depth loss: none" in capsys.readouterr().out) == (not has_model)
