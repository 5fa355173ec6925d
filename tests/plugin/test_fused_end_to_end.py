"""`ns-train --fused-steps always` with two workers: the course of ordinary steps, and on from its own checkpoints."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
STEPS, SAVED = 70, 40

pytestmark = pytest.mark.slow


def _train(out: Path, *options: str, workers: int = 2) -> subprocess.CompletedProcess[str]:
    keep = {k: v for k, v in os.environ.items() if not k.startswith(("TORCHELASTIC", "RANK", "WORLD", "LOCAL_"))}
    command = [
        *(sys.executable, "-W", "ignore", "-m", "nerfstudio.scripts.train", "splatfacto-batch"),
        *("--machine.device-type", "cpu", "--machine.num-devices", str(workers), "--vis", "tensorboard"),
        *("--output-dir", str(out), "--experiment-name", "city", "--timestamp", "now"),
        *("--max-num-images", str(2 * STEPS), "--logging.steps-per-log", "10", "--steps-per-checksum", "20"),
        *("--steps-per-save", str(SAVED), "--keep-checkpoints", "0", "--steps-per-eval-image", "0"),
        *("--steps-per-eval-batch", "0", "--steps-per-eval-all-images", "1000000"),
        # Two resolutions, two harmonics, and densification from the twentieth image on.
        *("--pipeline.model.num-downscales", "1", "--pipeline.model.resolution-schedule", "30"),
        *("--pipeline.model.sh-degree-interval", "60", "--pipeline.model.densify-grad-thresh", "0.0004"),
        *("--pipeline.model.warmup-length", "20", "--pipeline.model.refine-every", "26", *options),
        *("city", "--blocks", "1", "--views", "24", "--width", "96", "--height", "64"),
    ]
    env = {**keep, "PYTHONPATH": str(ROOT), "COLUMNS": "160"}
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=600, check=False)


def _run(out: Path, *options: str) -> tuple[str, Path]:
    done = _train(out, *options)
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout, out / "city" / "splatfacto-batch" / "now"


def _measured(run: Path) -> dict[int, dict[str, float]]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: row for row in rows}


def _parameters(run: Path, step: int) -> dict[str, torch.Tensor]:
    return torch.load(run / "nerfstudio_models" / f"step-{step:09d}.ckpt")["pipeline"]


@pytest.fixture(scope="module")
def fused(tmp_path_factory: pytest.TempPathFactory) -> Path:
    said, run = _run(tmp_path_factory.mktemp("fused"), "--fused-steps", "always")
    assert "Steps are fused." in said
    return run


def test_same_course_as_ordinary_steps(fused: Path, tmp_path: Path) -> None:
    said, run = _run(tmp_path, "--fused-steps", "never")
    assert "Steps are not fused: --fused-steps never." in said
    ours, theirs = _measured(fused), _measured(run)
    assert sorted(ours) == sorted(theirs) == [*range(0, STEPS, 10), STEPS - 1]
    assert ours[0]["main_loss"] == pytest.approx(theirs[0]["main_loss"], rel=1e-4)
    for step in ours:
        assert ours[step]["main_loss"] == pytest.approx(theirs[step]["main_loss"], rel=0.03), step
        assert ours[step]["psnr"] == pytest.approx(theirs[step]["psnr"], abs=0.2), step
        assert ours[step]["gaussians"] == pytest.approx(theirs[step]["gaussians"], rel=0.02), step
    assert ours[STEPS - 1]["main_loss"] < 0.7 * ours[0]["main_loss"], "it learned"
    assert len({row["gaussians"] for row in ours.values()}) > 2, "densification ran"
    changes = {name: sum(row.get(name, 0.0) for row in ours.values()) for name in ("duplicated", "split", "pruned")}
    grown = changes["duplicated"] + changes["split"] - changes["pruned"]
    assert grown == ours[STEPS - 1]["gaussians"] - ours[0]["gaussians"]


def test_goes_on_from_its_checkpoint(fused: Path, tmp_path: Path) -> None:
    load = ("--load-dir", str(fused / "nerfstudio_models"), "--load-step", str(SAVED))
    said, run = _run(tmp_path, "--fused-steps", "always", *load)
    assert "Steps are fused." in said
    ours, theirs = _measured(run), _measured(fused)
    assert sorted(ours) == [step for step in sorted(theirs) if step > SAVED]
    assert all(ours[step]["main_loss"] == theirs[step]["main_loss"] for step in ours)
    found, expected = _parameters(run, STEPS - 1), _parameters(fused, STEPS - 1)
    assert found.keys() == expected.keys()
    tensors = {name for name, value in found.items() if isinstance(value, torch.Tensor)}
    assert len(tensors) >= 6 and all(torch.equal(found[name], expected[name]) for name in tensors)
    assert all(found[name] == expected[name] for name in found.keys() - tensors)


def test_what_stands_in_the_way_is_named_before_the_first_step(tmp_path: Path) -> None:
    poses = ("--pipeline.model.camera-optimizer.mode", "SO3xR3")
    done = _train(tmp_path, "--fused-steps", "always", *poses, workers=1)
    text = " ".join((done.stdout + done.stderr).split())
    assert done.returncode != 0
    reason = "steps cannot be fused, for camera poses are optimized. Change that, or use --fused-steps auto."
    assert f"--fused-steps always: {reason}" in text, text[-3000:]
    assert not list(tmp_path.rglob("*.ckpt")) and not list(tmp_path.rglob("metrics.jsonl"))
