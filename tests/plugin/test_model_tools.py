"""`ns-multigpu eval` and `render`: several workers, each with a part of the points, write what one process writes."""

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from nerfstudio.configs.method_configs import all_methods
from PIL import Image

from ns_multigpu.cli import main
from ns_multigpu.core.world import World
from ns_multigpu.plugin.checkpoint.sharded_state import split_state, without_points
from ns_multigpu.plugin.checkpoint.whole import save
from ns_multigpu.plugin.faults.errors import InputError
from ns_multigpu.plugin.launch.process_world import set_world
from ns_multigpu.plugin.tools.models import CameraPath, Evaluation, load_model, run_tool
from ns_multigpu.plugin.train.config import read_config
from tests.plugin.course import TinyDataParserConfig
from tests.plugin.rendering import POINTS, make_pipeline, write_capture
from tests.ranks import run_ranks

TIMING = {"num_rays_per_sec", "fps", "num_rays_per_sec_std", "fps_std"}


def _write_run(world: World, capture: Path, run: Path, bounds: tuple[int, ...]) -> None:
    """A run folder of `tile`, with a checkpoint that the ranks write in shards."""
    pipeline = make_pipeline(world, capture, bounds=bounds)
    tensors, marker = split_state({}, dict(pipeline.model.gauss_params.items()), world)
    state = without_points(pipeline.state_dict(), marker)
    assert save(run / "nerfstudio_models", 7, lambda: state, tensors, {"method": "splatfacto-tile"}, world) == ""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its config.yml."""
    folder = tmp_path_factory.mktemp("runs")
    capture = write_capture(folder / "capture")
    config: Any = copy.deepcopy(all_methods["splatfacto-batch"])
    config.pipeline.strategy, config.method_name = "tile", "splatfacto-tile"
    config.pipeline.datamanager.dataparser = TinyDataParserConfig(data=capture)
    config.output_dir, config.timestamp, config.experiment_name = folder, "now", "tiny"
    config.machine.device_type, config.machine.num_devices = "cpu", 2
    config.get_base_dir().mkdir(parents=True)
    config.save_config()
    run_ranks(_write_run, 2, capture, config.get_base_dir(), (0, 70, 90))
    return config.get_base_dir() / "config.yml"


@pytest.fixture(scope="module")
def path(run: Path) -> Path:
    """A camera path of three views, with a crop."""
    file = run.parent / "camera_path.json"
    poses = [[0, -0.24, 0.97, 2 + step / 4, 1, 0, 0, 0.1, 0, 0.97, 0.24, 0.5, 0, 0, 0, 1] for step in range(3)]
    crop = {
        "crop_bg_color": {"r": 10, "g": 20, "b": 30}, "crop_center": [0.0, 0.0, 0.0], "crop_scale": [1.6, 1.6, 1.6],
        "crop_rot": [0.0, 0.0, 0.3],
    }  # fmt: skip
    views = [{"camera_to_world": pose, "fov": 60, "aspect": 1.5} for pose in poses]
    told = {"camera_type": "perspective", "render_height": 34, "render_width": 50, "seconds": 1, "crop": crop}
    file.write_text(json.dumps({**told, "camera_path": views}))
    return file


def _use(world: World, run: Path, works: list[Any]) -> int:
    """Does `works`; returns how many points this rank had."""
    set_world(world)
    (checkpoint,) = (run.parent / "nerfstudio_models").glob("*.ckpt")
    points = 0
    for work in works:
        config = read_config(run)
        pipeline = load_model(config, checkpoint, world, work.test_mode)
        points = pipeline.model.num_points
        work.run(config, checkpoint, pipeline)
    set_world(None)
    return points


def _works(folder: Path, path: Path) -> list[Any]:
    evaluation = Evaluation(folder / "results" / "all.json", folder / "images")
    return [evaluation, CameraPath(path, folder / "path", ("rgb", "depth", "accumulation"), 2.0, "png")]


def _compare(many: Path, one: Path, images: int = 8) -> None:
    """What two tools have written; `many` so many images."""
    told, expected = (json.loads((folder / "results" / "all.json").read_text()) for folder in (many, one))
    assert told.keys() == {"experiment_name", "method_name", "checkpoint", "results"} == expected.keys()
    assert told["method_name"] == "splatfacto-tile" and told["checkpoint"].endswith("step-000000007.ckpt")
    assert told["results"].keys() == expected["results"].keys() >= {"psnr", "ssim", "psnr_std", "fps"}
    for name in expected["results"].keys() - TIMING:
        assert told["results"][name] == pytest.approx(expected["results"][name], rel=1e-5), name
    names = sorted(str(file.relative_to(many)) for file in many.rglob("*.png"))
    assert len(names) == images
    for name in names:
        with Image.open(many / name) as ours, Image.open(one / name) as theirs:
            difference = np.abs(np.asarray(ours, dtype=np.int32) - np.asarray(theirs, dtype=np.int32))
            assert np.asarray(ours).std() > 5 and difference.max() <= 1, name


@pytest.fixture(scope="module")
def alone(run: Path, path: Path) -> Path:
    """What one process writes."""
    folder = run.parent / "alone"
    assert _use(World.single(), run, _works(folder, path)) == POINTS
    return folder


@pytest.mark.parametrize("size", [2, 3])
def test_several_write_what_one_writes(run: Path, path: Path, alone: Path, tmp_path: Path, size: int) -> None:
    points = run_ranks(_use, size, run, _works(tmp_path, path))
    assert points == ([70, 20] if size == 2 else [30, 30, 30]), "each holds its part, and no more"
    _compare(tmp_path, alone)


def test_one_process_writes_what_nerfstudio_writes(run: Path, alone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same keys and values as ns-eval's own code, which loads the same run."""
    from nerfstudio.scripts.eval import ComputePSNR

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    ComputePSNR(load_config=run, output_path=alone / "theirs.json").main()
    theirs, ours = json.loads((alone / "theirs.json").read_text()), json.loads((alone / "results/all.json").read_text())
    assert theirs.keys() == ours.keys() and theirs["results"].keys() == ours["results"].keys()
    for name in theirs["results"].keys() - TIMING:
        assert ours["results"][name] == pytest.approx(theirs["results"][name], rel=1e-6)


def test_what_cannot_be_done_is_said(run: Path, path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def refused(work: Evaluation | CameraPath, config: Path = run, step: int | None = None, devices: int = 1) -> str:
        with pytest.raises(InputError) as caught:
            run_tool(config, step, work, devices, "cpu")
        return str(caught.value)

    fine = Evaluation(tmp_path / "a.json")
    assert "--output-path" in refused(Evaluation(tmp_path / "a.txt"))
    assert "no such step; there are 7" in refused(fine, step=8)
    assert "--num-devices 0" in refused(fine, devices=0)
    assert "No such file" in refused(fine, tmp_path / "config.yml")
    (tmp_path / "config.yml").write_text("a: 1")
    assert "ns-eval and ns-render" in refused(fine, tmp_path / "config.yml")
    (tmp_path / "fisheye.json").write_text(path.read_text().replace("perspective", "fisheye"))
    assert "perspective cameras only" in refused(CameraPath(tmp_path / "fisheye.json", tmp_path / "x"))
    (tmp_path / "other.json").write_text("{}")
    assert "no camera path" in refused(CameraPath(tmp_path / "other.json", tmp_path / "x"))
    with pytest.raises(SystemExit):
        main(["eval", "--load-config", str(tmp_path / "none.yml")])
    assert "No such file" in capsys.readouterr().err


@pytest.mark.slow
def test_the_commands(run: Path, path: Path, alone: Path, tmp_path: Path) -> None:
    """As typed: as many workers as the run had, which are two."""
    common = ["--load-config", str(run), "--device-type", "cpu"]
    results, video = tmp_path / "results" / "all.json", tmp_path / "path.mp4"
    main(["eval", *common, "--output-path", str(results), "--render-output-path", str(tmp_path / "images")])
    _compare(tmp_path, alone, images=5)
    main(["render", *common, "--camera-path-filename", str(path), "--output-path", str(video)])
    assert video.stat().st_size > 500
