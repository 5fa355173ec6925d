"""Both sides of the benchmark of one step count for densification, and the same, where that is asked for."""

import json
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.kernels import train_step
from benchmarks.kernels.autograd_step import AutogradStep, Kind
from benchmarks.kernels.fused_path import needed
from benchmarks.kernels.our_step import OurStep
from benchmarks.scenes.garden import DEFAULT, TINY, Garden


def test_ways_are_timed_with_statistics_and_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "step.json"
    words = ["--device", "cpu", "--quick", "--iterations", "1", "--counts", "--json", str(path)]
    monkeypatch.setattr(sys, "argv", ["train_step", *words])
    assert train_step.main() == 0
    (scene,) = json.loads(path.read_text())["scenes"]
    for way in ("operators", "ours", "ours, lazy"):
        assert scene["lines"][f"step, {way}"]["ms"] > 0 and scene["lines"][f"step, {way}, counting"]["ms"] > 0


def test_ours_counts_what_the_operators_count() -> None:
    scene = Garden(DEFAULT, torch.device("cpu")).scene(TINY)
    ours = OurStep(scene, needed(scene), absgrad=False, graph=False, lazy=False, counting=True)
    theirs = AutogradStep(scene, Kind("operators", "ours"), absgrad=False, counting=True)
    for step in (ours, theirs):
        step()
    counted, expected = ours.fused._model.statistics, theirs._counts._state
    assert torch.equal(counted["count"], expected["count"]) and float(counted["count"].sum()) > 100
    for name in ("grad2d", "radii"):
        assert (counted[name] - expected[name]).norm() < 1e-3 * expected[name].norm() != 0, name
