"""The benchmarks of several GPUs at toy size, and what runs their jobs."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.scaling import largest, tile
from benchmarks.scaling.tile_jobs import differences
from benchmarks.scaling.tile_run import PARTS

TOY = ["--device", "cpu", "--points", "2000"]


def test_variants_are_compared_and_timed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "tile.json"
    words = [*TOY, "--images", "96x64", "--gpus", "1", "2", "--quick", "--json", str(path)]
    assert tile.main(words) == 0
    report = json.loads(path.read_text())
    assert report["complete"]
    by_variant = {(r["way"], r["gpus"], r["batch"]): r for r in report["results"]}
    assert set(by_variant) == {
        ("single", 1, 1), ("single, dense", 1, 1), ("tile, peer", 1, 1), ("tile, collective", 2, 1),
        ("tile, collective", 2, 2), ("tile, collective, dense", 2, 1),
    }  # fmt: skip
    for (way, ranks, batch), result in by_variant.items():
        assert result["ms"] > 0 and result["images_per_s"] == pytest.approx(1e3 * batch / result["ms"])
        assert result["check"]["compared"] == (way != "single")
        assert sum(result["points_by_rank"]) == 2000 and len(result["points_by_rank"]) == ranks
        if result["kind"] == "tile":
            assert set(result["parts"]["slowest_ms"]) == set(PARTS)
            assert result["balance"]["planned"] >= 1 and result["balance"]["with_halo"] >= 1
            assert (min(result["exchange"]["rows_sent"]) > 0) == (ranks > 1)
    printed = capsys.readouterr().out
    assert "2000 96x64 x2" in printed and len(printed.splitlines()) < 60


def test_steps_are_drawn_through_a_lens(tmp_path: Path) -> None:
    losses: dict[str, list[float]] = {}
    for lens in ("", "fisheye", "perspective"):
        path = tmp_path / f"{lens}.json"
        words = [*TOY, "--images", "96x64", "--gpus", "1", "--quick", "--sections", "single", "--json", str(path)]
        assert tile.main([*words, *(["--lens", lens] if lens else [])]) == 0
        rows = json.loads(path.read_text())["results"]
        assert {row["name"] for row in rows} == {f"2000 96x64 {lens}".strip()}
        losses[lens] = rows[0]["check"]["losses"]
    assert len({tuple(found) for found in losses.values()}) == 3


def test_another_step_than_that_of_single_is_noticed() -> None:
    names = {"means": 1.0, "scales": 2.0}
    figures: dict[str, Any] = {"model": names, "gradients": names, "moved": names, "losses": [0.5, 0.25]}
    assert differences(figures, figures, 1, 100) == []
    for what, value in (("model", 1.1), ("gradients", 1.01), ("moved", 1.1), ("moved", float("nan"))):
        other = {**figures, what: {**names, "means": value}}
        assert len(differences(other, figures, 1, 100)) == 1
        assert len(differences(other, figures, 2, 100)) == (what == "model")
    assert len(differences({**figures, "losses": [0.5, 0.251]}, figures, 2, 100)) == 1


def test_the_largest_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "largest.json"
    words = [*TOY, "--gpus", "1", "--image", "96x64", "--steps", "5", "--views", "2", "--json", str(path)]
    assert largest.main(words) == 0, capsys.readouterr().out
    result = json.loads(path.read_text())["result"]
    assert result["steps"] == len(result["step_ms"]) == 5 and result["points"] == 2000
    assert all(losses[-1] < losses[0] for losses in result["losses_by_view"].values())
