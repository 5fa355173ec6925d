"""nerfstudio's own commands with helpers: the same results, and no process is left whatever dies."""

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from nerfstudio.scripts import render

from ns_multigpu.plugin.faults.errors import InputError
from ns_multigpu.plugin.render.team import GAINS_FROM, RENDER_MEMORY, RENDER_RANKS, Size, asked_for, size_for
from tests.lib.trained_run import write_path, write_run
from tests.lib.with_helpers import done, helpers_of, killed, same_images, start, with_ffmpeg

TIMING = {"num_rays_per_sec", "fps", "num_rays_per_sec_std", "fps_std"}
SPREAD = {RENDER_MEMORY: "0.0000125"}
"""Memory for 12.5 kB of the 90 points of 236 bytes (they have all harmonics): two processes."""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs"))


@pytest.mark.slow
def test_evaluation_with_helpers_is_that_of_one_process(run: Path, tmp_path: Path) -> None:
    """With the whole model in each process, and with a part of it."""
    cases = {"alone": {}, "whole": {RENDER_RANKS: "2"}, "parts": {RENDER_RANKS: "2", **SPREAD}}
    said, results = {}, {}
    for name, more in cases.items():
        out = tmp_path / f"{name}.json"
        process = start(
            "eval", "--load-config", run, "--output-path", out, "--render-output-path", tmp_path / name, **more
        )
        said[name], results[name] = done(process), json.loads(out.read_text())["results"]
    assert "holds" not in said["alone"] and "each holds all" in said["whole"] and "each holds a part" in said["parts"]
    for name in ("whole", "parts"):
        assert results[name].keys() == results["alone"].keys() >= {"psnr", "ssim", "psnr_std"}
        for key in results["alone"].keys() - TIMING:
            assert results[name][key] == pytest.approx(results["alone"][key], rel=1e-5), key
        same_images(tmp_path / name, tmp_path / "alone", 5)


@pytest.mark.slow
def test_ns_render_with_helpers(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """nerfstudio's own viewer in this process, without helpers."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    path, ffmpeg = write_path(tmp_path / "path.json", 2), with_ffmpeg(tmp_path / "bin")
    monkeypatch.setenv("PATH", ffmpeg["PATH"])
    modes: dict[str, tuple[Any, dict[str, Any]]] = {
        "camera-path": (render.RenderCameraPath, {"camera_path_filename": path, "output_format": "images"}),
        "dataset": (render.DatasetRender, {}),
    }
    for mode, (theirs, options) in modes.items():
        alone, parts = tmp_path / "alone" / mode, tmp_path / "parts" / mode
        theirs(load_config=run, output_path=alone, image_format="png", **options).main()
        words = [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", value)]
        common = ("--load-config", run, "--output-path", parts, "--image-format", "png")
        done(start("render", mode, *common, *words, **ffmpeg, **{RENDER_RANKS: "2", **SPREAD}))
        count = len(list(alone.rglob("*.png")))
        assert count >= 2, mode
        same_images(parts, alone, count)


@pytest.mark.parametrize("victim", ["parent", "helper", "nobody"])
def test_no_process_remains_after_any_death(run: Path, victim: str) -> None:
    killed(run, 2 if victim == "helper" else 1, victim)


def test_a_helper_dies_while_it_starts(run: Path) -> None:
    """Killed before it has met the others."""
    process = start("eval", "--load-config", run, "--output-path", "/dev/null/a.json", **{RENDER_RANKS: "2"})
    helper: list[int] = []
    end = time.monotonic() + 60
    while not helper and time.monotonic() < end:
        helper = helpers_of(process.pid)
        time.sleep(0.02)
    os.kill(helper[0], signal.SIGKILL)
    assert "Helper 1 of 1 was killed by SIGKILL" in done(process, 1)


def test_number_of_processes_for_a_model() -> None:
    gb = 1e9
    assert size_for(1000, 236, "cuda", 4, 10 * gb, None) == Size(1, True), "a small model gains nothing"
    assert size_for(GAINS_FROM, 236, "cuda", 4, 10 * gb, None) == Size(4, True)
    assert size_for(GAINS_FROM, 236, "cuda", 4, 10 * gb, 2) == Size(2, True)
    assert size_for(1000, 236, "cuda", 4, 10 * gb, 8) == Size(4, True), "no more than there are"
    assert size_for(100_000_000, 236, "cuda", 4, 10 * gb, None) == Size(4, False)
    assert size_for(10**8, 236, "cpu", 0, None, None) == Size(1, True)
    assert size_for(90, 236, "cpu", 0, 12500.0, 2) == Size(2, False)
    with pytest.raises(InputError, match=r"100,000,000 Gaussians take 23.6 GB, and 2 GPUs .* 3 are needed"):
        size_for(100_000_000, 236, "cuda", 2, 10 * gb, None)


@pytest.mark.parametrize("text", ["many", "0", "", "nan"])
def test_environment_variable_values(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv(RENDER_RANKS, text)
    with pytest.raises(InputError, match=f"{RENDER_RANKS}={text}: give a number from 1"):
        asked_for(RENDER_RANKS, int, 1)
    monkeypatch.delenv(RENDER_RANKS)
    assert asked_for(RENDER_RANKS, int, 1) is None
