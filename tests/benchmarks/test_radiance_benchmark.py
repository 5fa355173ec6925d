"""Commands of `benchmarks.captures.radiance`, and the results that it keeps of a failed variant."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from benchmarks.captures import perturbed_poses, radiance
from tests.lib import colmap_files
from tests.lib.rendering import write_capture


def options(**more: Any) -> argparse.Namespace:
    usual = {
        "options": "--a 1", "device": "cpu", "steps": 3, "seconds": 1e9, "views": 1, "seed": 7, "at": [2],
        "profile": False, "limit": None, "gpus": [], "at_once": 1, "deadline": None, "ways": ["xl-1", "xl-2"],
        "truth": None, "dataparser": ["colmap", "--data", "fox"],
    }  # fmt: skip
    return argparse.Namespace(**{**usual, **more})


@pytest.mark.parametrize(
    ("way", "method", "gpus", "own"),
    [
        ("nerfacto", "nerfacto", 1, "--a 1"),
        ("nerfacto-x2", "nerfacto", 2, "--a 1"),
        ("xl-4", "nerfacto-xl", 1, "--pipeline.model.cells 4 --pipeline.model.spread xl --a 1"),
        ("mega-2x4:--b 3", "nerfacto-mega", 4, "--pipeline.model.cells 2 --a 1 --b 3"),
        ("xl-4@43:--b 3", "nerfacto-xl", 1, "--pipeline.model.cells 4 --pipeline.model.spread xl --a 1 --b 3"),
        ("ddp-2", "nerfacto-xl", 1, "--pipeline.model.cells 2 --pipeline.model.spread ddp --a 1"),
    ],
)
def test_a_way_is_a_command(way: str, method: str, gpus: int, own: str) -> None:
    words = radiance.command(way, options(), Path("out"))
    assert words[words.index("--method") + 1] == method
    assert words[words.index("--seed") + 1] == ("43" if "@" in way else "7")
    assert ("torch.distributed.run" in words) == (gpus > 1)
    assert gpus == 1 or words[words.index("--nproc-per-node") + 1] == str(gpus)
    assert f"--options={own}" in words and words[words.index("--at") + 1] == "2"
    assert words[words.index("--") :] == ["--", "colmap", "--data", "fox"]


def ends(code: int, *, done: bool) -> Any:
    """Return a command that leaves what it has evaluated, and its result if it is done."""
    evaluations = [{"psnr": 21.5, "rays": 2_000_000, "seconds": 9.0}]
    result = {"steps": 3, "parameters": 5, "peak_mib": 6.0, "courses": evaluations}
    files = {radiance.EVALUATIONS: evaluations, **({"result.json": result} if done else {})}

    def command(way: str, given: Any, output: Path) -> list[str]:
        for name, content in files.items():
            (output / name).write_text(json.dumps(content))
        return [
            sys.executable,
            "-c",
            f"import time; print('words'); time.sleep({9 * (code < 0)}); exit({max(code, 0)})",
        ]

    return command


@pytest.mark.parametrize(("code", "limit"), [(3, None), (-1, 1.0)])
def test_a_way_that_fails_keeps_what_it_has_evaluated(
    code: int, limit: float | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(radiance, "command", ends(code, done=False))
    row = radiance.run("xl-2", options(), tmp_path, limit=limit)
    assert row["code"] == code and [look["psnr"] for look in row["courses"]] == [21.5]
    assert limit or row["failed"] == "words\n"
    monkeypatch.setattr(radiance, "command", ends(0, done=True))
    whole = radiance.run("xl-1", options(), tmp_path)
    assert "failed" not in whole and whole["parameters"] == 5
    console = Console(width=150, record=True)
    console.print(radiance.table([row, whole]))
    assert console.export_text().count("21.50 at 2.00 M (9)") == 2


def test_a_run_writes_down_each_evaluation(tmp_path: Path) -> None:
    capture = write_capture(tmp_path / "capture", held_out=2)
    given = options(
        options="--pipeline.datamanager.train-num-rays-per-batch 64 --pipeline.model.log2-hashmap-size 8",
        dataparser=["nerfstudio-data", "--data", str(capture), "--downscale-factor", "1"],
    )
    row = radiance.run("xl-2", given, tmp_path / "runs")
    assert "failed" not in row, row
    kept = json.loads((tmp_path / "runs" / "xl-2" / radiance.EVALUATIONS).read_text())
    assert [look["steps"] for look in kept] == [2, 3] and kept == row["courses"]
    assert kept[0]["psnr"] == pytest.approx(sum(kept[0]["psnr_by_view"]) / kept[0]["views"], abs=1e-3)


@pytest.mark.parametrize("mode", ["off", "SO3xR3"])
def test_pose_errors_are_those_of_the_corrected_poses(mode: str, tmp_path: Path) -> None:
    """Corrections after three steps are small."""
    truth, copy = colmap_files.write_capture(tmp_path / "truth"), tmp_path / "copy"
    perturbed_poses.main(["--data", str(truth), "--output", str(copy), "--degrees", "2", "--share", "0.05"])
    given = options(
        options=f"--pipeline.datamanager.train-num-rays-per-batch 64 --pipeline.model.log2-hashmap-size 8 "
        f"--pipeline.model.camera-optimizer.mode {mode}",
        dataparser=["colmap", "--data", str(copy), "--colmap-path", "sparse/0", "--downscale-factor", "1"],
        truth=truth,
    )
    row = radiance.run("xl-1", given, tmp_path / "runs")
    (turns, centres), (turned, shifted) = (perturbed_poses.poses_of(one) for one in (truth, copy))
    trained = perturbed_poses.training(len(centres))
    degrees = np.degrees((turned * turns.inv()).magnitude())[trained].mean()
    share = np.linalg.norm(shifted - centres, axis=1)[trained].mean() / perturbed_poses.extent(centres)
    found = row["pose_errors"]
    tolerance = 1e-3 if mode == "off" else 0.5
    assert found["degrees"] == pytest.approx(degrees, abs=tolerance)
    assert found["share"] == pytest.approx(share, abs=tolerance / 10)
    assert (abs(found["degrees"] - degrees) > 2e-3) == (mode != "off")


def test_runs_share_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many at once as slots; each sees its GPU alone. After the deadline none is started."""

    def command(way: str, given: Any, output: Path) -> list[str]:
        (output / "result.json").write_text("{}")
        met = output.parent / "met"
        wait = f"import os, pathlib, time\nmet = pathlib.Path({str(met)!r})\nmet.mkdir(exist_ok=True)\n"
        wait += f"(met / ('{way}' + os.environ['CUDA_VISIBLE_DEVICES'])).touch()\n"
        wait += "end = time.time() + 60\nwhile len(list(met.iterdir())) < 2 and time.time() < end: time.sleep(0.01)\n"
        return [sys.executable, "-c", wait + "exit(0 if time.time() < end else 1)"]

    monkeypatch.setattr(radiance, "command", command)
    given = options(gpus=[3, 5])
    assert {row["way"] for row in radiance.in_turn(given, tmp_path) if "failed" not in row} == {"xl-1", "xl-2"}
    assert {name.name[-1] for name in (tmp_path / "met").iterdir()} == {"3", "5"}
    assert not list(radiance.in_turn(options(deadline=1.0), tmp_path / "late"))


def test_true_poses_that_are_not_there_are_named_at_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["radiance", "--truth", "nowhere", "--", "colmap"])
    with pytest.raises(SystemExit):
        radiance.main()
    assert "--truth: nowhere/sparse/0: there is no cameras.bin" in capsys.readouterr().err
