"""The table of all strategies is made of what the benchmarks it calls report, and says what failed."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.scaling import all_strategies


def test_speeds_come_from_the_reports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = {"usual": True, "points": 2000}
    reports: dict[str, Any] = {
        "scaling.tile": {
            "results": [
                {**row, "kind": "single", "way": "single", "gpus": 1, "ms": 1.0, "images_per_s": 10.0},
                {**row, "kind": "tile", "way": "tile, peer", "gpus": 2, "ms": 1.0, "images_per_s": 19.0},
                {**row, "kind": "tile", "way": "tile, peer", "gpus": 4, "error": "rank 3\nis lost"},
            ]
        },
        "captures.capture": {
            "results": [
                {"run": f"{way}-{n}", "images_per_s": 100.0 * n, "wall_s": 30.0 / n, "psnr": 28.0}
                for way, n in (("batch", 1), ("batch", 2), ("tile", 2))
            ]
        },
        "captures.radiance": {
            "rows": [{"way": "xl-2x2", "rays_per_s": 5e5, "courses": [{"psnr": 24.0, "rays_per_s": 2e6}]}]
        },
        "scaling.aggregate": {
            "rows": [
                {"gpus": 0, "way": "torch", "parts": {"8 elements": {"fill": 2.0}}},
                {"gpus": 2, "way": "2 GPUs", "parts": {"8 elements": {"fill": 1.0, "error": "no"}}, "error": "no sum"},
            ]
        },
        "scaling.largest": {"error": "FAILED: out of memory"},
    }  # fmt: skip
    asked: dict[str, list[Any]] = {}

    def report_of(module: str, words: list[Any], *_: Any) -> Any:
        asked[module] = words
        return reports[module]

    monkeypatch.setattr(all_strategies, "report_of", report_of)
    parts = ["steps", "runs", "radiance", "aggregate", "largest"]
    path = tmp_path / "all.json"
    words = ["--device", "cpu", "--quick", "--gpus", "1", "2", "--parts", *parts, "--json", str(path)]
    words += ["--captures", f"city={tmp_path}:--recipe best"]
    assert all_strategies.main(words) == 1, "three things failed"
    asked_for = asked["captures.capture"]
    assert asked_for[1:4] == ["batch-1", "batch-2", "tile-2"]
    assert asked_for[6:10] == ["--options= --recipe best", "--", "colmap", "--data"]
    report = json.loads(path.read_text())
    found = {(line["what"], line["unit"]): line["by_gpus"] for line in report["speeds"]}
    assert found["tile, 2,000 Gaussians, a view a step", "images/s"] == {"1": 10.0, "2": 19.0}
    assert found["city, tile", "s, Enter to prompt"] == {"1": 30.0, "2": 15.0}
    assert found["nerfacto-xl, a cell a GPU", "rays/s"] == {"2": 5e5}
    assert found["nerfacto-xl, a cell a GPU", "rays/s rendered"] == {"2": 2e6}
    assert found["multigpu, 8 elements: fill", "ms"] == {"2": 1.0}
    assert all_strategies.errors(report["reports"]) == [
        "steps tile, peer: is lost", "aggregate 2 GPUs: no sum", "largest : FAILED: out of memory",
    ]  # fmt: skip


def test_a_benchmark_that_fails_is_reported(tmp_path: Path) -> None:
    options = all_strategies.arguments(["--device", "cpu", "--gpus", "1", "--parts", "sort"])
    found = all_strategies.report_of("scaling.merge_sort", ["--ranks", 0], options, tmp_path)
    assert "--ranks [0]: this machine has 4 GPUs" in found["error"]
    assert all_strategies.errors({"sort": found}) == ["sort : " + found["error"].strip().splitlines()[-1]]


def test_a_part_without_time_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--device", "cpu", "--gpus", "1", "--parts", "sort", "--seconds", "-1", "--json", str(tmp_path / "a.json")]
    assert all_strategies.main(words) == 1 and "no time left" in capsys.readouterr().out
    assert json.loads((tmp_path / "a.json").read_text())["reports"] == {"sort": {"skipped": "no time left"}}


def test_ratios_are_of_what_is_better_when_higher() -> None:
    shown = all_strategies.table({("a", "images/s"): {1: 2.0, 2: 3.0}, ("a", "s, Enter"): {1: 2.0, 2: 1.0}}, [1, 2])
    assert list(shown.columns[3].cells) == ["3 (1.50x)", "1"]


def test_a_capture_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        all_strategies.arguments(["--device", "cpu", "--gpus", "1"])
    assert "need --captures" in capsys.readouterr().err
    for wrong in ("folder", "city=nowhere"):
        with pytest.raises(SystemExit):
            all_strategies.arguments(["--device", "cpu", "--gpus", "1", "--captures", wrong])
        assert f"--captures {wrong}: give NAME=FOLDER" in capsys.readouterr().err
