"""nerfstudio's own commands with helpers: the same results, and no process is left whatever dies."""

import json
import os
import signal
import time
from pathlib import Path

import pytest
import torch
from nerfstudio.scripts import render
from nerfstudio.scripts.eval import ComputePSNR

from ns_multigpu.plugin.faults.errors import InputError
from ns_multigpu.plugin.render.team import GAINS_FROM, RENDER_MEMORY, RENDER_RANKS, Devices, Size, asked_for, size_for
from tests.lib.trained_run import write_path, write_run
from tests.lib.with_helpers import done, helpers_of, killed, same_images, start, with_ffmpeg

TIMING = {"num_rays_per_sec", "fps", "num_rays_per_sec_std", "fps_std"}
SPREAD = {RENDER_MEMORY: "0.0000125"}
"""Memory for 12.5 kB of the 90 points of 236 bytes (they have all harmonics): two processes."""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs"))


@pytest.mark.slow
def test_evaluation_with_helpers_is_that_of_one_process(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a part of the model in each process, and nerfstudio's own evaluation in this one."""
    alone, parts = tmp_path / "alone", tmp_path / "parts"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    ComputePSNR(run, alone / "eval.json", alone / "views").main()
    words = ("--load-config", run, "--output-path", parts / "eval.json", "--render-output-path", parts / "views")
    said = done(start("eval", *words, **{RENDER_RANKS: "2", **SPREAD}))
    assert "each holds a part" in said
    found, expected = (json.loads((folder / "eval.json").read_text())["results"] for folder in (parts, alone))
    assert found.keys() == expected.keys() >= {"psnr", "ssim", "psnr_std"}
    for key in expected.keys() - TIMING:
        assert found[key] == pytest.approx(expected[key], rel=1e-5), key
    same_images(parts / "views", alone / "views", 5)


@pytest.mark.slow
def test_ns_render_with_helpers(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """nerfstudio's own viewer in this process, without helpers."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    path, ffmpeg = write_path(tmp_path / "path.json", 2), with_ffmpeg(tmp_path / "bin")
    monkeypatch.setenv("PATH", ffmpeg["PATH"])
    alone, helped = tmp_path / "alone", tmp_path / "helped"
    render.RenderCameraPath(
        load_config=run, output_path=alone, image_format="png", camera_path_filename=path, output_format="images"
    ).main()
    words = ("--load-config", run, "--output-path", helped, "--image-format", "png", "--output-format", "images")
    said = done(start("render", "camera-path", *words, "--camera-path-filename", path, **ffmpeg, **{RENDER_RANKS: "2"}))
    assert "each holds all" in said
    same_images(helped, alone, 2)


@pytest.mark.parametrize("victim", ["parent", "helper"])
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
    assert size_for(1000, 236, Devices("cuda", 4, 10 * gb, None)) == Size(1, True), "a small model gains nothing"
    assert size_for(GAINS_FROM, 236, Devices("cuda", 4, 10 * gb, None)) == Size(4, True)
    assert size_for(GAINS_FROM, 236, Devices("cuda", 4, 10 * gb, 2)) == Size(2, True)
    assert size_for(1000, 236, Devices("cuda", 4, 10 * gb, 8)) == Size(4, True), "no more than there are"
    assert size_for(100_000_000, 236, Devices("cuda", 4, 10 * gb, None)) == Size(4, False)
    assert size_for(10**8, 236, Devices("cpu", 0, None, None)) == Size(1, True)
    assert size_for(90, 236, Devices("cpu", 0, 12500.0, 2)) == Size(2, False)
    with pytest.raises(InputError, match=r"100,000,000 Gaussians take 23.6 GB, and 2 GPUs .* 3 are needed"):
        size_for(100_000_000, 236, Devices("cuda", 2, 10 * gb, None))


@pytest.mark.parametrize("text", ["many", "0", "", "nan"])
def test_environment_variable_values(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv(RENDER_RANKS, text)
    with pytest.raises(InputError, match=f"{RENDER_RANKS}={text}: give a number from 1"):
        asked_for(RENDER_RANKS, int, 1)
    monkeypatch.delenv(RENDER_RANKS)
    assert asked_for(RENDER_RANKS, int, 1) is None
