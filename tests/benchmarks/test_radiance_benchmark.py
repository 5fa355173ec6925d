"""Commands of `benchmarks.captures.radiance`, and the results that it keeps of a failed variant."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from benchmarks.captures import radiance
from tests.lib.rendering import write_capture


def options(**more: Any) -> argparse.Namespace:
    usual = {
        "options": "--a 1", "device": "cpu", "steps": 3, "seconds": 1e9, "views": 1, "seed": 7, "at": [2],
        "profile": False, "limit": None, "dataparser": ["colmap", "--data", "fox"],
    }  # fmt: skip
    return argparse.Namespace(**{**usual, **more})


@pytest.mark.parametrize(
    ("way", "method", "gpus", "own"),
    [
        ("nerfacto", "nerfacto", 1, "--a 1"),
        ("nerfacto-x2", "nerfacto", 2, "--a 1"),
        ("xl-4", "nerfacto-xl", 1, "--pipeline.model.cells 4 --pipeline.model.spread xl --a 1"),
        ("mega-2x4:--b 3", "nerfacto-mega", 4, "--pipeline.model.cells 2 --a 1 --b 3"),
        ("ddp-2", "nerfacto-xl", 1, "--pipeline.model.cells 2 --pipeline.model.spread ddp --a 1"),
    ],
)
def test_a_way_is_a_command(way: str, method: str, gpus: int, own: str) -> None:
    words = radiance.command(way, options(), Path("out"))
    assert words[words.index("--method") + 1] == method
    assert ("torch.distributed.run" in words) == (gpus > 1)
    assert gpus == 1 or words[words.index("--nproc-per-node") + 1] == str(gpus)
    assert f"--options={own}" in words and words[words.index("--at") + 1] == "2"
    assert words[words.index("--") :] == ["--", "colmap", "--data", "fox"]


@pytest.mark.parametrize("way", ["nerfacto-2", "xl", "xl-2x", "splat-2"])
def test_unknown_variant_is_refused(way: str) -> None:
    with pytest.raises(SystemExit, match=f"no way '{way}'"):
        radiance.command(way, options(), Path("out"))


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
    row = radiance.run("xl-2", options(limit=limit), tmp_path)
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
