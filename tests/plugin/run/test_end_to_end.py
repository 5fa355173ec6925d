"""A real capture through the real commands: torchrun ns-train with two workers and a viewer, ns-eval, ns-export."""

import json
import os
import shutil
import struct
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from nerfstudio.scripts import eval, exporter
from PIL import Image

from tests.lib.processes import free_port

ROOT = Path(__file__).parents[3]
FOX = ROOT.parent / "shared" / "data" / "fox"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not FOX.is_dir(), reason=f"the fox capture is not at {FOX}"),
]


def _run(*command: str, **variables: str) -> str:
    keep = {k: v for k, v in os.environ.items() if not k.startswith(("TORCHELASTIC", "RANK", "WORLD", "LOCAL_"))}
    env = {**keep, "PYTHONPATH": str(ROOT), "COLUMNS": "120", **variables}
    result = subprocess.run(
        [sys.executable, "-W", "ignore", *command], env=env, capture_output=True, text=True, timeout=600, check=False
    )
    assert result.returncode == 0, f"{command}\n{result.stdout[-3000:]}\n{result.stderr[-3000:]}"
    return result.stdout + result.stderr


def _here(monkeypatch: pytest.MonkeyPatch, script: ModuleType, *words: str) -> None:
    """Run one of nerfstudio's commands in this process."""
    monkeypatch.setattr(sys, "argv", [script.__name__, *words])
    try:
        script.entrypoint()
    except SystemExit as ended:
        assert not ended.code


@pytest.fixture(scope="module")
def small_fox(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the capture with its images at an eighth of their size, as `images_8`."""
    folder = tmp_path_factory.mktemp("capture") / "fox"
    shutil.copytree(FOX / "sparse", folder / "sparse")
    (folder / "images").symlink_to(FOX / "images")
    (folder / "images_8").mkdir()
    for path in sorted((FOX / "images").iterdir()):
        with Image.open(path) as image:
            image.resize((image.width // 8, image.height // 8), Image.Resampling.BOX).save(
                folder / "images_8" / path.name
            )
    return folder


def _vertices(ply: Path) -> int:
    header = ply.read_bytes()[:2000].split(b"end_header")[0].decode()
    return next(int(line.split()[-1]) for line in header.splitlines() if line.startswith("element vertex"))


def test_train_evaluate_export(small_fox: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    capture = ("--downscale-factor", "8")  # sparse/0 is found, by all workers
    said = _run(
        *("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
        *("-m", "nerfstudio.scripts.train", "splatfacto-batch", "--machine.device-type", "cpu"),
        *(
            "--data",
            str(small_fox),
            "--output-dir",
            str(tmp_path),
            "--max-num-images",
            "300",
            "--eval-at-start",
            "True",
        ),
        *("--vis", "viewer+tensorboard", "--viewer.websocket-port", str(free_port())),
        *("--viewer.quit-on-train-completion", "True", "--logging.steps-per-log", "25"),
        *("--steps-per-checksum", "50", "--steps-per-eval-image", "60", "--steps-per-eval-all-images", "100"),
        *("--pipeline.model.num-downscales", "0", "--pipeline.model.warmup-length", "100"),
        *("colmap", *capture, "--downscale-rounding-mode", "floor", "--eval-mode", "interval", "--eval-interval", "8"),
    )
    runs = list(tmp_path.glob("fox/splatfacto-batch/*"))
    assert len(runs) == 1, "both ranks share one run folder"
    shown = [line for line in said.splitlines() if line.startswith("Run folder ")]
    assert len(shown) == 1 and "─ Config ─" not in said
    run = runs[0]
    assert sorted(p.name for p in run.glob("config*.yml")) == ["config.yml"]
    assert len(list(run.glob("events.out.tfevents*"))) == 1, "one rank writes TensorBoard's file"
    summary = json.loads((run / "training_summary.json").read_text())
    assert summary["ranks"] == 2 and summary["images"] == 300 and summary["steps"] == 150
    assert summary["bytes_per_step"] > 59 * 4 * 1000, "gradients of thousands of points crossed the wire"
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    parts = {"data_ms", "compute_ms", "exchange_ms", "waiting_ms", "bytes_per_step", "gaussians"}
    assert parts <= rows[-1].keys() and rows[-1]["step"] == 149
    assert rows[-1]["gaussians"] != rows[0]["gaussians"], "densification ran"

    evaluated = tmp_path / "eval.json"
    _here(monkeypatch, eval, "--load-config", str(run / "config.yml"), "--output-path", str(evaluated))
    results = json.loads(evaluated.read_text())["results"]
    assert results["psnr"] > summary["psnr_start"] + 5
    assert results["ssim"] > summary["ssim_start"] + 0.05
    assert summary["psnr"] == pytest.approx(results["psnr"], abs=1e-3), "the box at the end says what ns-eval finds"
    assert summary["ssim"] == pytest.approx(results["ssim"], abs=1e-4)

    words = ("gaussian-splat", "--load-config", str(run / "config.yml"), "--output-dir", str(tmp_path / "ply"))
    _here(monkeypatch, exporter, *words)
    ply = tmp_path / "ply" / "splat.ply"
    assert _vertices(ply) == summary["gaussians"]
    body = ply.read_bytes().split(b"end_header\n", 1)[1]
    assert all(abs(v) < 1e6 for v in struct.unpack("<3f", body[:12]))
