"""Processes that `benchmarks.captures.capture` starts for each run name."""

import json
from argparse import Namespace
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from benchmarks.captures import capture
from benchmarks.captures.capture import command, main

OPTIONS = Namespace(images=70, device="cpu", also_at=0, options="", dataparser=["colmap", "--data", "fox"])


def words(run: str) -> str:
    return " ".join(command(run, 7, OPTIONS, Path("out")))


def test_each_run_has_the_options_of_its_name() -> None:
    assert "--operators" not in words("splatfacto") and "--operators ours" in words("splatfacto-ours")
    four = words("batch-4x2")
    assert "splatfacto-batch" in four and "--machine.num-devices 4" in four and "--pipeline.views-per-rank 2" in four
    assert "--batch-scaling" not in four and "--batch-scaling none" in words("batch-4x2-unscaled")
    assert "--batch-scaling sqrt" in words("batch-4x2-sqrt")
    assert "--rates-at-end 0.03 --rates-fall-from 0" in words("tile-1-falling")
    assert "splatfacto-tile" in words("tile-2x3") and "--pipeline.views-per-step 3" in words("tile-2x3")
    for run in ("splatfacto", "splatfacto-ours", "batch-1", "tile-1-falling"):
        assert "--pipeline.datamanager.train-cameras-sampling-seed 7" in words(run) or "--seed 7" in words(run)


@pytest.mark.parametrize("run", ["batch", "pixel-2", "batch-2-ours", "splatfacto-gsplat"])
def test_unknown_runs_are_named(run: str) -> None:
    with pytest.raises(SystemExit, match=run):
        command(run, 7, OPTIONS, Path("out"))


@pytest.mark.parametrize("shared", [True, False])
def test_runs_that_share_a_gpu_are_evaluated_at_once(
    shared: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A benchmark that is cut off has what was finished."""
    file = tmp_path / "out.json"
    done: list[str] = []
    earlier_rows: list[list[bool]] = []

    def train(run: str, seed: int, options: Any, folder: Path, gpu: int | None) -> dict[str, Any]:
        before = json.loads(file.read_text())["results"] if file.exists() else []
        earlier_rows.append(["psnr" in r and not r["alone"] for r in before])
        done.append(f"train {seed}")
        speeds = {"images_per_s": 1.0, "train_seconds": 1.0, "wall_s": 2.0, "gaussians": 1, "bytes_per_step": 0.0}
        return {"run": run, "seed": seed, "ssim": 1.0} | speeds

    def evaluate(result: dict[str, Any], options: Any, folder: Path, gpu: int | None) -> dict[str, Any]:
        if "psnr" not in result:
            done.append(f"evaluate {result['seed']}")
        return {"psnr": 1.0} | result

    words = ["--runs", "batch-1", "--seeds", "1", "2", "--json", str(file), "--output", str(tmp_path / "runs")]
    words += ["--slots", *(["0", "0"] if shared else ["0"]), "--", "colmap"]
    monkeypatch.setattr("sys.argv", ["capture", *words])
    monkeypatch.setattr(capture, "train", train)
    monkeypatch.setattr(capture, "evaluate", evaluate)
    monkeypatch.setattr(capture, "ThreadPoolExecutor", lambda _: ThreadPoolExecutor(1))
    main()
    one_by_one = ["train 1", "evaluate 1", "train 2", "evaluate 2"]
    assert done == (one_by_one if shared else ["train 1", "train 2", "evaluate 1", "evaluate 2"])
    assert earlier_rows == [[], [shared]]
    assert all(r["psnr"] == 1.0 for r in json.loads(file.read_text())["results"])
