"""`ns-multigpu eval` and `render`: several workers, each with a part of the points, write what one process writes."""

import json
from pathlib import Path
from typing import Any

import imageio.v3 as iio
import numpy as np
import pytest
import torch
from nerfstudio.utils.colormaps import ColormapOptions
from PIL import Image

from ns_multigpu.cli import main
from ns_multigpu.core.dist.world import World
from ns_multigpu.plugin.capture.moved import DATA
from ns_multigpu.plugin.faults.errors import InputError
from ns_multigpu.plugin.launch.process_world import set_world
from ns_multigpu.plugin.render.team import RENDER_MEMORY
from ns_multigpu.plugin.run.config import read_config
from ns_multigpu.plugin.tools.frames import Look
from ns_multigpu.plugin.tools.models import Evaluation, load_model, run_tool
from ns_multigpu.plugin.tools.rendering import FilmRendering
from ns_multigpu.plugin.tools.shots import CameraPath, Spiral
from tests.lib.ranks import run_ranks
from tests.lib.rendering import POINTS
from tests.lib.trained_run import write_path, write_run

TIMING = {"num_rays_per_sec", "fps", "num_rays_per_sec_std", "fps_std"}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its config.yml."""
    return write_run(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def path(run: Path) -> Path:
    """Return a camera path of three views, with a crop."""
    return write_path(run.parent / "camera_path.json")


def _use(world: World, run: Path, works: list[Any]) -> int:
    """Do `works`; returns how many points this rank had."""
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
    return [
        evaluation,
        FilmRendering(CameraPath(path), folder / "path", Look(("rgb", "depth", "accumulation")), 2.0, "png"),
    ]


def _compare(many: Path, one: Path, images: int = 8) -> None:
    """Compare the output of two tools; `many` is the number of images."""
    reported, expected = (json.loads((folder / "results" / "all.json").read_text()) for folder in (many, one))
    assert reported.keys() == {"experiment_name", "method_name", "checkpoint", "results"} == expected.keys()
    assert reported["method_name"] == "splatfacto-tile" and reported["checkpoint"].endswith("step-000000007.ckpt")
    assert reported["results"].keys() == expected["results"].keys() >= {"psnr", "ssim", "psnr_std", "fps"}
    for name in expected["results"].keys() - TIMING:
        assert reported["results"][name] == pytest.approx(expected["results"][name], rel=1e-5), name
    names = sorted(str(file.relative_to(many)) for file in many.rglob("*.png"))
    assert len(names) == images
    for name in names:
        with Image.open(many / name) as ours, Image.open(one / name) as theirs:
            difference = np.abs(np.asarray(ours, dtype=np.int32) - np.asarray(theirs, dtype=np.int32))
            assert np.asarray(ours).std() > 5 and difference.max() <= 1, name


@pytest.fixture(scope="module")
def alone(run: Path, path: Path) -> Path:
    """Return the output that one process writes."""
    folder = run.parent / "alone"
    assert _use(World.single(), run, _works(folder, path)) == POINTS
    return folder


def test_several_write_what_one_writes(run: Path, path: Path, alone: Path, tmp_path: Path) -> None:
    points = run_ranks(_use, 3, run, _works(tmp_path, path))
    assert points == [30, 30, 30], "each holds its part, and no more"
    _compare(tmp_path, alone)


def test_one_process_writes_what_nerfstudio_writes(
    run: Path, alone: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same keys and values as ns-eval's own code, which loads the same run. Both print them."""
    from nerfstudio.scripts.eval import ComputePSNR

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    ComputePSNR(load_config=run, output_path=alone / "theirs.json").main()
    results = json.loads((alone / "theirs.json").read_text())["results"]
    assert f"{results['psnr']:.2f} dB" in (said := capsys.readouterr().out) and "held-out views" in said
    theirs, ours = json.loads((alone / "theirs.json").read_text()), json.loads((alone / "results/all.json").read_text())
    assert theirs.keys() == ours.keys() and theirs["results"].keys() == ours["results"].keys()
    for name in theirs["results"].keys() - TIMING:
        assert ours["results"][name] == pytest.approx(theirs["results"][name], rel=1e-6)


def test_unsupported_requests_are_reported(
    run: Path, path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(work: Evaluation | FilmRendering, config: Path = run, step: int | None = None, devices: int = 1) -> str:
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
    assert "camera_type is 'fisheye'" in refused(FilmRendering(CameraPath(tmp_path / "fisheye.json"), tmp_path / "x"))
    (tmp_path / "other.json").write_text("{}")
    assert "no camera path" in refused(FilmRendering(CameraPath(tmp_path / "other.json"), tmp_path / "x"))
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
    shown = ["--colormap-options.colormap", "gray", "--render-nearest-camera"]
    main(["render", *common, "--camera-path-filename", str(path), "--output-path", str(video), *shown])
    shape = iio.imread(video).shape
    assert shape[1] == 34 and shape[2] > 60, "a photograph is next to the frames"


def test_command_options_are_passed_to_the_render(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under the names that they have in ns-render."""
    from ns_multigpu.plugin.tools import models

    given: list[Any] = []
    monkeypatch.setattr(models, "run_tool", lambda *arguments: given.append(arguments[2]))
    common = ["render", "--load-config", "config.yml", "--mode", "spiral", "--output-path", str(tmp_path / "a.mp4")]
    colors = "--colormap-options.colormap gray --colormap-options.normalize --colormap-options.invert"
    ends = "--colormap-options.colormap-min 0.1 --colormap-options.colormap-max 0.7"
    main([*common, *colors.split(), *ends.split(), "--depth-far-plane", "9", "--render-nearest-camera"])
    main(common)
    chosen, usual = given
    assert chosen.look == Look(("rgb",), None, 9.0, ColormapOptions("gray", True, 0.1, 0.7, True)) and chosen.nearest
    assert usual.look == Look() and not usual.nearest and usual.what == Spiral()


def test_moved_capture_is_named(
    run: Path, path: Path, alone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The path is named, and how to give the new one; then results are the same."""
    was, now = run.parents[3] / "capture", tmp_path / "here"
    monkeypatch.setenv(DATA, "")  # what a test sets is gone after it
    was.rename(now)
    try:
        work = Evaluation(tmp_path / "out" / "results" / "all.json", tmp_path / "out" / "images")
        with pytest.raises(InputError, match=f"not at {was}, where it was .* NS_MULTIGPU_DATA=FOLDER .* --data FOLDER"):
            run_tool(run, None, work, 1, "cpu")
        with pytest.raises(InputError, match="nowhere: there is no such folder"):
            run_tool(run, None, work, 1, "cpu", tmp_path / "nowhere")
        run_tool(run, None, work, 1, "cpu", now)
        _compare(tmp_path / "out", alone, images=5)
    finally:
        now.rename(was)
        set_world(None)


def test_a_model_that_the_devices_cannot_hold(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(RENDER_MEMORY, "0.000006")
    with pytest.raises(InputError, match=r"90 Gaussians take 2.12e-05 GB, and 2 processes .* 4 are needed"):
        run_tool(run, None, Evaluation(tmp_path / "a.json"), 2, "cpu")
