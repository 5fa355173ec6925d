"""Captures far from the origin are read as exactly as near it, and captures near it as nerfstudio reads them."""

import copy
import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from nerfstudio.data.dataparsers.base_dataparser import DataparserOutputs
from nerfstudio.data.dataparsers.colmap_dataparser import ColmapDataParser, ColmapDataParserConfig
from nerfstudio.data.dataparsers.nerfstudio_dataparser import NerfstudioDataParserConfig
from torch import Tensor

from ns_multigpu.core.dist.world import World
from ns_multigpu.methods import splatfacto_batch
from ns_multigpu.plugin.capture.coordinate_offset import (
    NO_OFFSET,
    Offset,
    OffsetOption,
    offset_for,
    offset_line,
    save_transform,
    saved_offset,
)
from ns_multigpu.plugin.capture.datamanager import DistributedDataManagerConfig
from ns_multigpu.plugin.capture.first_look import first_look
from ns_multigpu.plugin.capture.parsing import parsed_together
from ns_multigpu.plugin.launch.agreement import options_of
from ns_multigpu.plugin.radiance.data.datamanager import RadianceDataManagerConfig
from ns_multigpu.plugin.run.config import RunConfig
from tests.lib.captures import edit
from tests.lib.reconstruction import Scene, make_scene, moved, write_images, write_model, write_transforms

UTM, ECEF = (512345.0, 5412345.0, 312.0), (4177123.4, 855123.4, 4727123.4)
WIDTH = 3898
"""Width at which shifts are given, pixels."""
KINDS = ("bin", "txt", "matches", "ascii", "binary")


def write(folder: Path, kind: str, scene: Scene) -> Any:
    """Write a scene in one of `KINDS`, or "float", and return its dataparser's configuration."""
    if kind in KINDS[:3]:
        write_model(folder / "sparse/0", scene, text=kind == "txt")
        write_images(folder / "images", scene)
        matches = -1 if kind == "matches" else 0
        return ColmapDataParserConfig(
            data=folder, colmap_path=Path("sparse/0"), eval_mode="all", downscale_factor=1,
            max_2D_matches_per_3D_point=matches,
        )  # fmt: skip
    write_transforms(folder, scene, np.eye(4)[:3], Path("colmap/sparse/0"))
    axes = "".join(f"property {'double' if kind == 'binary' else 'float'} {axis}\n" for axis in "xyz")
    order = "ascii" if kind == "ascii" else "binary_little_endian"
    head = f"ply\nformat {order} 1.0\nelement vertex {len(scene.points)}\n{axes}end_header\n"
    rows = "\n".join(" ".join(map(repr, map(float, p))) for p in scene.points).encode()
    numbers = scene.points.astype("<f4" if kind == "float" else "<f8").tobytes()
    (folder / "points.ply").write_bytes(head.encode() + (rows + b"\n" if kind == "ascii" else numbers))
    edit(folder, None, ply_file_path="points.ply")
    return NerfstudioDataParserConfig(data=folder, eval_mode="all", downscale_factor=1, load_3D_points=True)


def parsed(parser: Any, offset: Offset | None = None, **options: Any) -> DataparserOutputs:
    """Return the training views as a run reads them."""
    config: Any = SimpleNamespace(data=None, dataparser=dataclasses.replace(parser, **options), offset=offset)
    found: list[DataparserOutputs] = []
    with parsed_together(config, World.single(), trains=True):
        found.append(config.dataparser.setup().get_dataparser_outputs("train"))
    return found[0]


def pixels(outputs: DataparserOutputs) -> tuple[Tensor, Tensor]:
    """Return the pixels [n, P, 2] of the seed points in the views of a picture `WIDTH` wide, and depths [n, P]."""
    poses, cameras = outputs.cameras.camera_to_worlds.double(), outputs.cameras
    in_camera = (outputs.metadata["points3D_xyz"].double() - poses[:, None, :, 3]) @ poses[:, :, :3]
    depths, focal = -in_camera[..., 2], torch.stack([cameras.fx, -cameras.fy], -1) * WIDTH / cameras.width[:, :, None]
    return in_camera[..., :2] / depths[..., None] * focal, depths


OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"center_method": "none", "auto_scale_poses": False, "orientation_method": "none"},
    {"center_method": "focus", "orientation_method": "vertical"},
)


@pytest.mark.parametrize("options", OPTIONS, ids=["usual", "none", "focus"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("place", [UTM, ECEF], ids=["utm", "ecef"])
def test_points_keep_their_pixels(tmp_path: Path, kind: str, place: Offset, options: dict[str, Any]) -> None:
    scene = make_scene(views=12, points=200)
    here = parsed(write(tmp_path / "here", kind, scene), **options)
    far = moved(scene, place)
    there = parsed(write(tmp_path / "there", kind, far), **options)
    (expected, depths), (found, _) = pixels(here), pixels(there)
    shifts = (found - expected).norm(dim=-1)[depths > 0]
    assert shifts.median() < 0.005 and shifts.quantile(0.95) < 0.05
    # The transform maps the capture's coordinates to the model's.
    transform, xyz = there.dataparser_transform, torch.from_numpy(far.points)
    mapped = (xyz @ transform[:, :3].T + transform[:, 3]) * there.dataparser_scale
    torch.testing.assert_close(there.metadata["points3D_xyz"].double(), mapped, atol=5e-6, rtol=1e-6)
    if options.get("center_method") != "none":  # and the frame is that of the capture near the origin
        torch.testing.assert_close(there.metadata["points3D_xyz"], here.metadata["points3D_xyz"], atol=2e-5, rtol=1e-5)
    centres = there.transform_poses_to_original_space(there.cameras.camera_to_worlds)[:, :, 3]
    order = [far.names.index(str(p.relative_to(tmp_path / "there/images"))) for p in there.image_filenames]
    np.testing.assert_allclose(centres.numpy(), np.linalg.inv(far.poses)[order, :3, 3], atol=1e-5, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("distance", [0.0, 200.0])
def test_captures_near_the_origin_are_nerfstudios_to_the_bit(tmp_path: Path, kind: str, distance: float) -> None:
    parser = write(tmp_path, kind, moved(make_scene(), (distance, 0.0, 0.0)))
    theirs, ours = parser.setup().get_dataparser_outputs("train"), parsed(parser)
    assert type(ours) is DataparserOutputs and ours.dataparser_scale == theirs.dataparser_scale
    assert ours.dataparser_transform.dtype == torch.float32
    for name in ("camera_to_worlds", "fx", "distortion_params"):
        assert torch.equal(getattr(ours.cameras, name), getattr(theirs.cameras, name)), name
    assert torch.equal(ours.dataparser_transform, theirs.dataparser_transform)
    assert torch.equal(ours.metadata["points3D_xyz"], theirs.metadata["points3D_xyz"])


@pytest.mark.parametrize("applied", [None, np.array([[0.0, 0, -1, 7e6], [-1, 0, 0, 3.0], [0, 1, 0, -2e5]])])
def test_the_transform_is_from_the_coordinates_before_the_applied_transform(tmp_path: Path, applied: Any) -> None:
    scene = moved(make_scene(), UTM)
    write_transforms(tmp_path, scene, applied, Path("colmap/sparse/0"))
    parser = NerfstudioDataParserConfig(data=tmp_path, eval_mode="all", downscale_factor=1)
    outputs = parsed(parser)
    centres = outputs.transform_poses_to_original_space(outputs.cameras.camera_to_worlds)[:, :, 3].numpy()
    order = [scene.names.index(str(p.relative_to(tmp_path / "images"))) for p in outputs.image_filenames]
    np.testing.assert_allclose(centres, np.linalg.inv(scene.poses)[order, :3, 3], atol=1e-5, rtol=0)


def test_rule_of_the_offset() -> None:
    around = np.array([[0.0, 0, 0], [12, 80, 5], [3, 9, 30]])
    far = around + UTM
    assert offset_for(far).tolist() == [512350.0, 5412380.0, 330.0], "to tens, as the extent is 80"
    assert offset_for(around / 1000 + UTM).tolist() == [512345.01, 5412345.04, 312.02]
    assert not offset_for(around + np.array([1580, 0, 0])).any() and offset_for(around + np.array([1620, 0, 0])).any()
    assert not offset_for(np.tile(UTM, (3, 1)) * (1 + 1e-16 * np.arange(3)[:, None])).any(), "one place"
    assert not offset_for(np.full((2, 3), np.nan)).any()
    assert offset_for(around, UTM).tolist() == list(UTM) and not offset_for(far, NO_OFFSET).any()


@pytest.mark.parametrize("kind", ["bin", "binary"])
def test_first_look_compares_points_less_the_offset(tmp_path: Path, kind: str) -> None:
    scene = make_scene(points=200)
    small = moved(scene, ECEF)
    small.points[:100] = small.points[100:] + 1e-3  # a thousandth is lost in float32
    found = first_look(SimpleNamespace(dataparser=write(tmp_path, kind, small), data=None))
    assert found.problems == [] and not any("seed points" in note for note in found.notes)


def test_first_look_notes_points_that_float32_has_rounded(tmp_path: Path) -> None:
    notes: list[list[str]] = []
    for kind, place in (("float", UTM), ("binary", UTM), ("float", NO_OFFSET)):
        folder = tmp_path / f"{kind}{place[0]}"
        found = first_look(SimpleNamespace(dataparser=write(folder, kind, moved(make_scene(), place)), data=None))
        notes.append([note for note in found.notes if "float32" in note])
    assert notes[1] == notes[2] == [] and len(notes[0]) == 1
    assert notes[0][0].endswith(
        "points.ply: its points are rounded to float32, in steps of 0.5. Write coordinates as text or double"
    )


@pytest.mark.parametrize("config", [DistributedDataManagerConfig(), RadianceDataManagerConfig()])
def test_runs_of_earlier_versions_have_no_offset(config: OffsetOption) -> None:
    text = yaml.dump(config)
    assert yaml.load(text, Loader=yaml.Loader).offset is None
    old = "\n".join(line for line in text.splitlines() if not line.startswith("offset:"))
    assert old != text.rstrip() and yaml.load(old, Loader=yaml.Loader).offset == NO_OFFSET


def test_no_offset_reads_as_nerfstudio_does(tmp_path: Path) -> None:
    parser = write(tmp_path, "bin", moved(make_scene(), UTM))
    theirs = ColmapDataParser(parser).get_dataparser_outputs("train")
    assert torch.equal(parsed(parser, NO_OFFSET).cameras.camera_to_worlds, theirs.cameras.camera_to_worlds)
    assert not torch.equal(parsed(parser).cameras.camera_to_worlds, theirs.cameras.camera_to_worlds)


def test_a_run_that_resumes_keeps_its_frame(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_look_at_capture", "_name_run_folder"):
        monkeypatch.setattr(RunConfig, name, lambda *_: None)
    outputs = parsed(write(tmp_path / "capture", "bin", moved(make_scene(), UTM)))
    for name in ("new", "old"):
        models = tmp_path / name / "nerfstudio_models"
        models.mkdir(parents=True)
        offset = NO_OFFSET
        if name == "new":
            x, y, z = offset = save_transform(outputs, models.parent)
            assert f"Offset {x:.0f} {y:.0f} {z:.0f} subtracted" in offset_line((x, y, z)) and y > 5e6
        else:
            outputs.save_dataparser_transform(models.parent / "dataparser_transforms.json")
        assert saved_offset(models.parent) == offset
        for given in ({"load_dir": models}, {"load_checkpoint": models / "step-000000009.ckpt"}):
            config: Any = copy.deepcopy(splatfacto_batch.config)
            vars(config).update(given)
            *_, agreed = json.loads(config._begin([]))
            assert config.pipeline.datamanager.offset == offset and agreed == list(offset)
            assert not any("offset" in name for name in options_of(config)), "not an option that differs"
    assert saved_offset(tmp_path) is None
    saved = json.loads((tmp_path / "new/dataparser_transforms.json").read_text())
    assert saved["transform"] == outputs.dataparser_transform.tolist() and saved["scale"] == outputs.dataparser_scale
