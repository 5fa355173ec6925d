"""nerfstudio's own commands on a run of Gaussians: requests that they cannot fulfil name the command that does."""

import json
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
from nerfstudio.scripts import exporter, render
from nerfstudio.scripts.render import get_crop_from_json
from nerfstudio.utils.eval_utils import eval_setup

from ns_multigpu.plugin.render.camera_path import check_camera_path, check_ns_render, read_camera_path
from ns_multigpu.plugin.run.pipeline import RunPipelineConfig
from tests.lib.trained_run import write_path, write_run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("my runs"))


@pytest.fixture(autouse=True)
def same_hook(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)


def said(monkeypatch: pytest.MonkeyPatch, script: Any, *words: Any) -> str:
    """Run a command in this process; return the reason for which it ends."""
    monkeypatch.setattr(sys, "argv", ["command", *map(str, words)])
    with pytest.raises(SystemExit) as ended:
        script.entrypoint()
    return str(ended.value.code)


POSE = {"camera_to_world": [1, 0, 0, 0, 0, 1, 0, 0, 0, 0, 1, 0], "fov": 60}
CROP: dict[str, Any] = {"crop_center": [0, 0, 0], "crop_scale": [1, 1, 1], "crop_bg_color": {"r": 255, "g": 0, "b": 0}}
BAD_PATHS = [
    ({"crop": [1]}, "crop is [1]. Give an object, or null for no crop"),
    ({"crop": {**CROP, "crop_center": {"x": 0}}}, "the crop's crop_center is {'x': 0}. Give three numbers"),
    ({"crop": {**CROP, "crop_rot": [0, 0, "1"]}}, "the crop's crop_rot is [0, 0, '1']"),
    ({"crop": {"crop_center": [0, 0, 0]}}, "the crop's crop_scale is None"),
    ({"crop": {**CROP, "crop_bg_color": "red"}}, "the crop's crop_bg_color is 'red'. Give r, g and b from 0 to 255"),
    ({"seconds": None}, "seconds is None"),
    ({"camera_path": [POSE]}, "camera 0 has no camera_to_world of 16 numbers"),
    ({"camera_path": []}, "camera_path has no cameras"),
    ({"render_width": "180.0"}, "render_width is '180.0'"),
    ({"camera_type": "fisheye"}, "camera_type is 'fisheye'. Models are rendered as perspective and equirectangular"),
    ({"camera_type": "omnidirectional"}, "camera_type is 'omnidirectional'"),
]


@pytest.mark.parametrize(("change", "reason"), BAD_PATHS)
def test_ns_render_refuses_invalid_paths(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], reason: str
) -> None:
    path = write_path(tmp_path / "path.json", 2, **change)
    words = ("camera-path", "--load-config", run, "--camera-path-filename", path, "--output-path", tmp_path / "a.mp4")
    assert said(monkeypatch, render, *words).startswith(f"ns-render: --camera-path-filename {path}: {reason}")
    assert not (tmp_path / "a.mp4").exists()


def test_crops_in_whole_numbers_are_taken(tmp_path: Path) -> None:
    path = write_path(tmp_path / "path.json", 2, crop={**CROP, "crop_rot": [0, 0, 0]})
    content = read_camera_path(path)
    check_camera_path(path, content, None)
    get_crop_from_json(content)  # nerfstudio's


def test_ns_render_names_the_command_for_panoramas(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_path(tmp_path / "path.json", 2, camera_type="equirectangular")
    options = ["--load-config", str(run), "--camera-path-filename", str(path), "--output-path", "a.mp4"]
    text = said(monkeypatch, render, "camera-path", *options)
    assert "camera_type is 'equirectangular', and ns-render draws Gaussians as perspective only" in text
    assert shlex.split(text.splitlines()[-1]) == ["ns-multigpu", "render", *options]
    path.write_text(json.dumps([{"id": 0, "position": [0, 0, 0]}]))  # as 3D Gaussian Splatting writes cameras
    assert "it has no camera_path" in said(monkeypatch, render, "camera-path", *options)


@pytest.mark.parametrize("kind", ["pointcloud", "tsdf", "poisson", "marching-cubes"])
def test_ns_export_names_the_commands_for_gaussians(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    text = said(monkeypatch, exporter, kind, "--load-config", run, "--output-dir", tmp_path / "out")
    assert text.startswith(f"ns-export {kind}: it is for radiance fields")
    commands = [shlex.split(line) for line in text.splitlines()[1:]]
    assert [words[:4] for words in commands] == [
        ["ns-multigpu", name, "--load-config", str(run)] for name in ("export-mesh", "export")
    ]


def test_other_commands_and_valid_paths_are_accepted(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Reached(Exception):
        """The pipeline would be loaded now."""

    def reached(*_: Any, **__: Any) -> None:
        check_ns_render(gaussians=False)
        raise Reached

    monkeypatch.setattr(RunPipelineConfig, "team_plan", reached)
    monkeypatch.setattr("ns_multigpu.plugin.render.team.begin", reached)
    write_path(tmp_path / "plain.json", 2)
    options = ["--load-config", str(run), "--output-path", "a.mp4"]
    for words in (["camera-path", "--camera-path-filename", str(tmp_path / "plain.json")], ["interpolate"]):
        monkeypatch.setattr(sys, "argv", ["ns-render", *words, *options])
        with pytest.raises(Reached):
            render.entrypoint()
    monkeypatch.setattr(sys, "argv", ["ns-export", "cameras", "--load-config", str(run), "--output-dir", str(tmp_path)])
    with pytest.raises(Reached):
        exporter.entrypoint()
    with pytest.raises(Reached):
        eval_setup(run)
