"""Depth maps as observations: their pixels' points lie where the photograph's lens and the map have them."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch
from nerfstudio.cameras.camera_optimizers import CameraOptimizerConfig
from nerfstudio.data.dataparsers.colmap_dataparser import ColmapDataParserConfig
from PIL import Image

from ns_multigpu.core.dist.world import World
from ns_multigpu.core.step.depth_loss import depth_loss
from ns_multigpu.plugin.capture.city_dataparser import CityDataParserConfig
from ns_multigpu.plugin.capture.datamanager import DistributedDataManagerConfig
from ns_multigpu.plugin.faults.errors import InputError
from ns_multigpu.plugin.model.options import SplatModelConfig
from ns_multigpu.plugin.splats.depth_maps import (
    MapSamples,
    fitted_depths,
    line_through,
    needs_tracks,
    pixels_of,
    read_maps,
    training_observations,
    unit_counts,
    unit_problems,
)
from tests.lib.captures import read_by
from tests.lib.ranks import run_ranks
from tests.lib.reconstruction import EIGHT, HEIGHT, LENS, WIDTH, Scene, add_model, make_scene, write_images, write_model
from tests.lib.resuming import start
from tests.lib.training_run import TinyDataParserConfig, add_maps, write_capture

UNIT = 2e-3
WEIGHT = 0.3
KINDS = ("depth", "masks")


@pytest.fixture
def scene(tmp_path: Path, request: pytest.FixtureRequest) -> Scene:
    """Return a capture of COLMAP's with a random map for each view, of half the photograph's size, and masks."""
    scene = make_scene(lens=getattr(request, "param", LENS))
    write_model(tmp_path / "sparse/0", scene)
    write_images(tmp_path / "images", scene)
    random = np.random.default_rng(0)
    for name in scene.names:
        for folder, low, high, size in (("depth", 2500, 4500, 2), ("masks", 0, 2, 6)):
            path = (tmp_path / folder / name).with_suffix(".png")
            path.parent.mkdir(parents=True, exist_ok=True)
            values = random.integers(low, high, (HEIGHT // size, WIDTH // size), dtype=np.uint16)
            values[3] = 0 if folder == "depth" else 1
            Image.fromarray(values if folder == "depth" else values.astype(np.uint8) * 255).save(path)
    return scene


def parser_of(folder: Path, **options: Any) -> ColmapDataParserConfig:
    options = {"depths_path": Path("depth"), "depth_unit_scale_factor": UNIT, "downscale_factor": 1, **options}
    return ColmapDataParserConfig(data=folder, colmap_path=Path("sparse/0"), eval_interval=4, **options)


@pytest.mark.parametrize("scene", [LENS, EIGHT], ids=["four", "eight"], indirect=True)
def test_points_lie_on_their_pixels_rays_at_the_maps_depth(scene: Scene, tmp_path: Path) -> None:
    """For a map of another size, through a lens, with holes and a mask of a third size."""
    outputs = read_by(parser_of(tmp_path, masks_path=Path("masks"))).train_dataparser_outputs
    found = read_maps(outputs, "metric", World.single())
    to_world = outputs.dataparser_transform.double().numpy()
    points = found.points.double().numpy() / outputs.dataparser_scale
    points = (points - to_world[:, 3]) @ to_world[:, :3]
    end = 0
    for count, path in zip(found.counts, outputs.image_filenames, strict=True):
        number = next(i for i, name in enumerate(scene.names) if Path(name).name == path.name)
        maps = [cv2.imread(str(tmp_path / kind / scene.names[number]).replace(".jpg", ".png"), -1) for kind in KINDS]
        rows, columns = np.mgrid[: HEIGHT // 2, : WIDTH // 2]
        kept = (maps[0] > 0) & (maps[1][rows // 3, columns // 3] > 0)
        own, end = points[end : end + count], end + count
        assert count == kept.sum() and 100 < count < kept.size * 0.7
        pose = scene.poses[number]
        turned, _ = cv2.Rodrigues(pose[:3, :3])
        at, _ = cv2.projectPoints(own, turned, pose[:3, 3], scene.intrinsics, np.array(scene.lens))
        expected = np.stack([columns[kept], rows[kept]], axis=1) * 2 + 1
        np.testing.assert_allclose(at[:, 0], expected, atol=5e-3)
        np.testing.assert_allclose((own @ pose[:3, :3].T + pose[:3, 3])[:, 2], maps[0][kept] * UNIT, rtol=1e-4)
    assert end == len(points) and found.ids.tolist() == list(range(end))
    assert found.scale == pytest.approx(1.1 * distance(outputs.cameras.camera_to_worlds[:, :, 3]))


def distance(places: torch.Tensor) -> float:
    return float((places - places.mean(0)).norm(dim=1).max())


def read_on(world: World, outputs: Any) -> Any:
    found = read_maps(outputs, "metric", world)
    return found.points, list(found.counts)


def test_every_rank_has_the_points_of_all(scene: Scene, tmp_path: Path) -> None:
    outputs = read_by(parser_of(tmp_path)).train_dataparser_outputs
    points, counts = read_on(World.single(), outputs)
    for other, others in run_ranks(read_on, 2, outputs):
        assert others == counts and torch.equal(other, points)


def test_pixels_are_spread_and_never_twice() -> None:
    rows, columns = pixels_of(50, 90, 1000, 3)
    assert 900 < len(rows) <= 1000 and len(set(zip(rows, columns, strict=True))) == len(rows)
    assert rows.min() >= 0 and columns.min() >= 0 and rows.max() < 50 and columns.max() < 90
    assert np.histogram2d(rows, columns, (5, 9))[0].min() > 10
    assert not np.array_equal(rows, pixels_of(50, 90, 1000, 4)[0])
    assert [len(part) for part in pixels_of(5, 9, 45, 0)] == [45, 45]


POSE: Any = np.array([[1.0, 0, 0, 3], [0, 0.8, 0.6, 1], [0, 0.6, -0.8, 2]])


@pytest.mark.parametrize("kind", ["relative", "inverse"])
def test_maps_up_to_scale_are_fitted_to_points(kind: Any) -> None:
    """With an eighth of the points wrong."""
    random = np.random.default_rng(1)
    x, y = (part.reshape(-1) for part in np.mgrid[-1:1:40j, -1:1:40j])
    rays: Any = np.stack([x, y, -np.ones_like(x)], axis=1) @ POSE[:, :3].T
    depths = 3 + x + 0.5 * np.sin(3 * y)
    values = (1 / depths + 0.2) / 0.03 if kind == "inverse" else 7 * depths
    samples = MapSamples(values, POSE, rays, 0.05)
    chosen = random.permutation(1600)[:200]
    points = POSE[:, 3] + rays[chosen] * depths[chosen, None]
    points[::8] = POSE[:, 3] + rays[chosen[::8]]
    found, scale = fitted_depths(samples, points, kind, 100.0)
    np.testing.assert_allclose(found, depths, rtol=1e-3)
    assert scale == pytest.approx(0.03 if kind == "inverse" else 7, rel=1e-3)
    assert fitted_depths(samples, points, kind, 3.5)[0].max() < 3.5, "what is too far is none"
    away, fell = fitted_depths(replace(samples, values=1 / values), points, kind, 100.0)
    assert fell is not None and fell < 0 and not away.any()
    assert fitted_depths(samples, points[:19], kind, 100.0)[1] is None
    outside = POSE[:, 3] + 2 * (points - POSE[:, 3]) + 30 * POSE[:, 1]
    assert fitted_depths(samples, outside, kind, 100.0)[1] is None, "in no pixel"
    hole = (np.abs(x) < 0.5) & (np.abs(y) < 0.5)
    there = POSE[:, 3] + rays[(np.abs(x) < 0.4) & (np.abs(y) < 0.4)] * 4
    around = replace(samples, values=values[~hole], rays=rays[~hole])
    assert len(there) > 50 and fitted_depths(around, there, kind, 100.0)[1] is None, "in a hole"
    line = replace(samples, values=values[:40], rays=rays[:40])  # of one row
    assert fitted_depths(line, points, kind, 100.0)[1] is None, "on a line"
    assert line_through(np.linspace(0, 4, 5), np.linspace(-3, 5, 5)) == pytest.approx((2, -3))


def test_units_are_compared_with_visible_seed_points() -> None:
    """In a street: nine tenths of the points in a view are behind the fronts that its map shows."""
    random = np.random.default_rng(2)
    x, y = (part.reshape(-1) for part in np.mgrid[-1:1:40j, -1:1:40j])
    samples = MapSamples(np.full(1600, 5.0), POSE, np.stack([x, y, -np.ones_like(x)], axis=1) @ POSE[:, :3].T, 0.05)
    far = np.where(np.arange(1600) % 10 == 0, 5.0, random.uniform(5, 500, 1600))
    seeds = POSE[:, 3] + samples.rays * far[:, None]
    assert unit_problems(unit_counts(samples, samples.values, seeds), "a.png", 0.01) == []
    (line,) = unit_problems(unit_counts(samples, 1000 * samples.values, seeds), "a.png", 1.0)
    assert re.match(r"a.png: .* about 9.9e\+02 times .* --depth-unit-scale-factor 0.001 .*; now 1\)", line)
    assert unit_problems(unit_counts(samples, 1000 * samples.values, seeds[:19]), "a.png", 1.0) == [], "too few"


def spoil(name: str, values: Any) -> Any:
    def apply(folder: Path) -> None:
        Image.fromarray(values).save(folder / "depth" / name)

    return apply


RGB, ZEROS = np.ones((18, 24, 3), np.uint8), np.zeros((18, 24), np.uint16)
WIDE, NAN = np.ones((18, 30), np.uint16), np.full((18, 24), np.nan, np.float32)


@pytest.mark.parametrize(
    ("change", "options", "said"),
    [
        (lambda folder: (folder / "depth/02.png").unlink(), {}, r"depth/02.png: there is no such file.*of any size"),
        (lambda folder: (folder / "depth/02.png").write_bytes(b"no"), {}, r"depth/02.png: it is no picture.*16-bit"),
        (spoil("02.png", RGB), {}, r"depth/02.png: it has the shape \[18, 24, 3\].*one number for each pixel"),
        (spoil("02.png", WIDE), {}, r"depth/02.png: it has 30x18 pixels and its photograph 48x36: .*same aspect"),
        (spoil("02.png", ZEROS), {}, r"depth/02.png: it has no depth, as all of it is 0.*leave out"),
        (lambda _: None, {"depth_unit_scale_factor": 2.0}, r"depth/.*about \d.*e\+02 times .*-factor 0.00\d+ .*now 2"),
        (lambda _: None, {"depth_unit_scale_factor": 1e-5}, r"depth/.*about 0.00\d+ times .*-factor 0.00\d+ .*1e-05"),
    ],
)  # fmt: skip
def test_bad_maps_are_named_before_training(scene: Scene, tmp_path: Path, change: Any, options: Any, said: str) -> None:
    data = read_by(parser_of(tmp_path, **options))
    change(tmp_path)
    with pytest.raises(InputError, match=rf"--pipeline.model.depth-maps: 1 problem.*\n .*{said}"):
        training_observations(data, "metric", World.single())


def test_maps_of_nans_or_of_two_channels_are_named(scene: Scene, tmp_path: Path) -> None:
    data = read_by(parser_of(tmp_path))
    outputs = data.train_dataparser_outputs
    outputs.metadata["depth_filenames"] = [tmp_path / f"{i}.npy" for i in range(len(outputs.image_filenames))]
    for path in outputs.metadata["depth_filenames"]:
        np.save(path, NAN)
    with pytest.raises(InputError, match=r"6 problem(.|\n)*0.npy: it has no depth(.|\n)*5.npy"):
        training_observations(data, "metric", World.single())
    for path in outputs.metadata["depth_filenames"]:
        np.save(path, NAN[:, :, None].repeat(2, 2))
    with pytest.raises(InputError, match=r"0.npy: it has the shape \[18, 24, 2\]"):
        training_observations(data, "metric", World.single())
    with pytest.raises(InputError, match="the capture has none: give depth_file_path"):
        training_observations(read_by(parser_of(tmp_path, depths_path=None)), "inverse", World.single())


@pytest.mark.parametrize("kind", ["inverse", "relative"])
def test_kinds_that_are_mistaken_for_another_are_refused(tmp_path: Path, kind: Any) -> None:
    data = read_by(
        plane(tmp_path, (lambda depth: 2e3 * depth) if kind == "inverse" else (lambda depth: 1e5 / depth - 2e3))
    )
    other: Any = {"inverse": "relative", "relative": "inverse"}[kind]
    with pytest.raises(InputError, match=rf"depth/01.png: in most maps, .*give --pipeline.model.depth-maps {other}"):
        training_observations(data, kind, World.single())
    found = training_observations(data, other, World.single())
    exact = training_observations(read_by(plane(tmp_path, lambda depth: depth / UNIT)), "metric", World.single())
    assert found.counts == exact.counts
    torch.testing.assert_close(found.points, exact.points, rtol=0, atol=0.01 * exact.scale)
    assert len(training_observations(data, "off", World.single()).points) == 300 < len(exact.points)


def plane(folder: Path, stored: Any) -> Any:
    """Write views of a plane, with COLMAP's points on it, and maps of what is `stored` of its depths."""
    scene = make_scene(points=300)
    middle, normal = scene.points.mean(0), scene.poses[:, 2, :3].mean(0)
    normal /= np.linalg.norm(normal)
    spread = 0.5 * (scene.points - middle)
    scene.points[:] = middle + spread - (spread @ normal)[:, None] * normal
    scene.tracks[:] = [list(range(1, 10)) for _ in scene.tracks]
    scene.names[:] = [f"{i:02d}.png" for i in range(9)]
    write_model(folder / "sparse/0", scene)
    write_images(folder / "images", scene)
    (folder / "depth").mkdir(exist_ok=True)
    y, x = np.mgrid[:HEIGHT, :WIDTH] + 0.5
    rays = np.stack([x, y, np.ones_like(x)], axis=-1) @ np.linalg.inv(scene.intrinsics).T
    for name, pose in zip(scene.names, scene.poses, strict=True):
        facing = pose[:3, :3] @ normal
        depths = facing @ (pose[:3, :3] @ middle + pose[:3, 3]) / (rays @ facing)
        values = np.where((depths > 2) & (depths < 20), stored(np.abs(depths)), 0)
        values[3] = 0
        Image.fromarray(values.astype(np.uint16)).save(folder / "depth" / name)
    return parser_of(folder)


def test_tracks_are_required_only_without_maps(tmp_path: Path) -> None:
    write_capture(tmp_path / "capture", wide=False)
    tiny, city = TinyDataParserConfig(data=tmp_path / "capture"), CityDataParserConfig()

    def needs(parser: Any, **options: Any) -> bool:
        data = DistributedDataManagerConfig(dataparser=parser)
        return needs_tracks(data, SplatModelConfig(**{"depth_loss": 0.1, **options}))

    assert needs(tiny) and not needs(tiny, depth_loss=0.0)
    add_depths(tmp_path / "capture")
    assert not needs(tiny) and needs(tiny, depth_maps="inverse") and needs(tiny, depth_maps="off")
    assert needs(parser_of(tmp_path, depths_path=None)) and not needs(parser_of(tmp_path)) and not needs(city)


def add_depths(folder: Path) -> None:
    """Give a capture of nerfstudio's maps of 2 m everywhere, where its cameras look at."""
    add_maps(folder, "depth_file_path", lambda _: np.full((12, 14), 2000, np.uint16))


@pytest.mark.parametrize("maps", ["metric", "off"])
def test_a_run_has_the_loss_of_its_maps(tmp_path: Path, maps: str) -> None:
    write_capture(tmp_path / "capture", wide=False)
    add_depths(tmp_path / "capture")
    add_model(tmp_path / "capture")
    options: Any = {"depth_loss": WEIGHT, "depth_maps": maps, "camera_optimizer": CameraOptimizerConfig(mode="off")}
    trainer = start(World.single(), tmp_path / "capture", tmp_path / "run", 1, 2, primitive="3dgs", **options)
    pipeline: Any = trainer.pipeline
    pipeline.train()
    losses = pipeline.get_train_loss_dict(1)[1]
    views, drawn = pipeline.model.views, pipeline.model.rendering.pixels
    assert {len(view.observations.ids) == 12 * 14 for view in views} == {maps == "metric"}
    expected = WEIGHT * sum(float(depth_loss(p, views[p.patch.view]).detach()) for p in drawn) / 2
    assert expected > 0.01 and float(losses["depth_loss"].detach()) == pytest.approx(expected)
