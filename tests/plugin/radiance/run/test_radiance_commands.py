"""`nerfacto-xl` through nerfstudio's commands: ns-train on two workers, ns-eval with a helper."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ns_multigpu import cli
from ns_multigpu.plugin.render.team import RENDER_RANKS
from tests.lib.training_run import write_capture

ROOT = Path(__file__).parents[4]

pytestmark = pytest.mark.slow


def _environment() -> dict[str, str]:
    keep = {k: v for k, v in os.environ.items() if not k.startswith(("TORCHELASTIC", "RANK", "WORLD", "LOCAL_"))}
    # Also where the package was installed before it had the method.
    more = {"NERFSTUDIO_METHOD_CONFIGS": "nerfacto-xl=ns_multigpu.methods:nerfacto_xl", "COLUMNS": "120"}
    return {**keep, "PYTHONPATH": str(ROOT), **more}


def _run(*command: str, **more: str) -> str:
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", *command], env={**_environment(), **more}, timeout=300, check=False,
        capture_output=True, text=True,
    )  # fmt: skip
    assert result.returncode == 0, f"{command}\n{result.stdout[-3000:]}\n{result.stderr[-3000:]}"
    return result.stdout + result.stderr


def test_train_and_evaluate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_capture(tmp_path / "capture", wide=False)
    small = "--pipeline.model.{}"
    options = {
        "log2-hashmap-size": 12, "num-levels": 4, "max-res": 64, "num-nerf-samples-per-ray": 12,
        "eval-num-rays-per-chunk": 512, "cells": 3,
    }  # fmt: skip
    train = (
        *("nerfstudio.scripts.train", "nerfacto-xl", "--machine.num-devices", "2", "--machine.device-type", "cpu"),
        *("--data", str(tmp_path / "capture"), "--output-dir", str(tmp_path), "--timestamp", "now"),
        *("--max-num-iterations", "60", "--logging.steps-per-log", "5", "--steps-per-eval-image", "20"),
        *("--pipeline.datamanager.train-num-rays-per-batch", "256"),
        *(word for name, value in options.items() for word in (small.format(name), str(value))),
        *(small.format("num-proposal-samples-per-ray"), "24", "16"),
    )
    parser = ("nerfstudio-data", "--downscale-factor", "1", "--eval-mode", "filename", "--load-3D-points", "False")
    said = _run(*train, *parser)
    assert "nerfacto-xl on 2 CPU workers" in said and "60 steps of 256 rays" in said
    assert "Training finished" in said and f"Rays        {60 * 256:,}" in said and "Cells       3" in said
    assert "dB (SSIM" in said and "--max-num-iterations 120" in said
    summary = json.loads((tmp_path / "capture/nerfacto-xl/now/training_summary.json").read_text())
    assert summary["cells"] == 3 and summary["steps"] == 60 and summary["psnr"] > 5
    run = tmp_path / "capture/nerfacto-xl/now"
    assert [path.name for path in (run / "nerfstudio_models").iterdir()] == ["step-000000059.ckpt"]
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["psnr"] > rows[0]["psnr"] + 1 and len(rows[0]["samples_by_rank"]) == 2
    output = tmp_path / "eval.json"
    said = _run(
        *("nerfstudio.scripts.eval", "--load-config", str(run / "config.yml"), "--output-path", str(output)),
        **{RENDER_RANKS: "2", "CUDA_VISIBLE_DEVICES": ""},
    )
    assert "3 cells on 2 processes: cell 0; cells 1 to 2." in said and f"{RENDER_RANKS}=1 keeps to one" in said
    results = json.loads(output.read_text())["results"]
    # The capture has one view for evaluation, and one has no deviation.
    means = [value for name, value in results.items() if not name.endswith("_std")]
    assert results["psnr"] > 8 and all(map(math.isfinite, means)), "a metric that is missing is left out"
    ours = tmp_path / "ours.json"
    common = ("--load-config", str(run / "config.yml"), "--device-type", "cpu")
    cli.main(["eval", *common, "--output-path", str(ours)])
    assert json.loads(ours.read_text())["results"]["psnr"] == pytest.approx(results["psnr"], abs=1e-3)
    with pytest.raises(SystemExit):
        cli.main(["eval", *common, "--num-devices", "4"])
    said = capsys.readouterr().err
    assert "has 3 cells, and each device wants one at least. Use 3 devices or fewer" in said
