"""`ns-train splatfacto-tile` on two workers, on with one from its checkpoint, and ns-eval on what that one left."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HALF, IMAGES = 60, 90

pytestmark = pytest.mark.slow


def _run(*command: str) -> str:
    keep = {k: v for k, v in os.environ.items() if not k.startswith(("TORCHELASTIC", "RANK", "WORLD", "LOCAL_"))}
    env = {**keep, "PYTHONPATH": str(ROOT), "COLUMNS": "160"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", *command], env=env, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, f"{command}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return " ".join(done.stdout.split())


def _train(out: Path, workers: int, images: int, *options: str) -> tuple[str, Path]:
    said = _run(
        *("-m", "nerfstudio.scripts.train", "splatfacto-tile", "--fused-steps", "always"),
        *("--machine.device-type", "cpu", "--machine.num-devices", str(workers), "--vis", "tensorboard"),
        *("--output-dir", str(out), "--experiment-name", "city", "--timestamp", "now"),
        *("--max-num-images", str(images), "--logging.steps-per-log", "20", "--steps-per-eval-image", "0"),
        *("--steps-per-eval-batch", "0", "--steps-per-eval-all-images", "1000000", "--eval-at-start", "True"),
        # Two resolutions, two harmonics, and densification from the twentieth image on.
        *("--pipeline.model.num-downscales", "1", "--pipeline.model.resolution-schedule", "30"),
        *("--pipeline.model.sh-degree-interval", "60", "--pipeline.model.densify-grad-thresh", "0.0004"),
        *("--pipeline.model.warmup-length", "20", "--pipeline.model.refine-every", "26", *options),
        *("city", "--blocks", "1", "--views", "24", "--width", "96", "--height", "64"),
    )
    return said, out / "city" / "splatfacto-tile" / "now"


def _measured(run: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def _evaluated(run: Path) -> dict[str, float]:
    """What ns-eval finds."""
    file = run / "eval.json"
    _run("-m", "nerfstudio.scripts.eval", "--load-config", str(run / "config.yml"), "--output-path", str(file))
    return json.loads(file.read_text())["results"]


def test_two_workers_then_one_then_evaluation(tmp_path: Path) -> None:
    said, first = _train(tmp_path / "two", 2, HALF)
    assert "Steps are fused." in said and "There is no peer memory." in said
    before = _measured(first)
    assert before[-1]["step"] == HALF - 1, "one view a step, whatever the number of workers"
    assert before[-1]["gaussians"] != before[0]["gaussians"], "densification ran"
    assert json.loads((first / "training_summary.json").read_text())["ranks"] == 2

    models = first / "nerfstudio_models"
    _, second = _train(tmp_path / "one", 1, IMAGES, "--load-dir", str(models))
    after = _measured(second)
    assert after[0]["step"] >= HALF and after[-1]["step"] == IMAGES - 1
    assert after[-1]["main_loss"] < 0.85 * before[0]["main_loss"], "it learned"
    summary = json.loads((second / "training_summary.json").read_text())
    assert summary["ranks"] == 1 and summary["gaussians"] == after[-1]["gaussians"]

    results, at_first = _evaluated(second), json.loads((first / "training_summary.json").read_text())
    assert results["psnr"] > summary["psnr_start"] > at_first["psnr_start"] + 1
    for ended, found in ((summary, results), (at_first, _evaluated(first))):
        assert ended["psnr"] == pytest.approx(found["psnr"], abs=1e-3), "the box at the end says what ns-eval finds"
        assert ended["ssim"] == pytest.approx(found["ssim"], abs=1e-4)
