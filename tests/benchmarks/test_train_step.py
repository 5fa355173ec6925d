"""Both sides of the benchmark of one step count for densification, and the same, where that is asked for."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.kernels import our_step, train_step
from benchmarks.kernels.autograd_step import AutogradStep, Kind
from benchmarks.kernels.fused_path import needed
from benchmarks.kernels.our_step import OurStep
from benchmarks.scenes.garden import DEFAULT, TINY, Garden


def test_variants_are_timed_with_and_without_statistics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "step.json"
    words = ["--device", "cpu", "--quick", "--iterations", "1", "--counts", "--json", str(path)]
    monkeypatch.setattr(sys, "argv", ["train_step", *words])
    monkeypatch.setattr(train_step, "BLOCK", 4)
    assert train_step.main() == 0
    (scene,) = json.loads(path.read_text())["scenes"]
    for way in ("operators", "ours", "ours, lazy"):
        assert scene["lines"][f"step, {way}"]["ms"] > 0 and scene["lines"][f"step, {way}, counting"]["ms"] > 0


def test_variants_are_timed_with_and_without_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "step.json"
    words = ["--device", "cpu", "--quick", "--iterations", "1", "--scenes", "city-tiny", "--group-culling", "both"]
    monkeypatch.setattr(sys, "argv", ["train_step", *words, "--json", str(path)])
    monkeypatch.setattr(train_step, "BLOCK", 4)
    culled: list[bool | None] = []
    step = our_step.Step

    def noted(*arguments: Any, group_culling: bool | None, **more: Any) -> Any:
        culled.append(group_culling)
        return step(*arguments, group_culling=group_culling, **more)

    monkeypatch.setattr(our_step, "Step", noted)
    assert train_step.main() == 0
    (scene,) = json.loads(path.read_text())["scenes"]
    for line in ("step, ours", "step, ours, no groups", "step, ours, lazy", "step, ours, lazy, no groups"):
        assert scene["lines"][line]["ms"] > 0
    assert set(culled) == {False, True} and scene["lines"]["  splat_forward, groups"]["ms"] > 0
    assert 0 < scene["groups"]["shown"] < scene["groups"]["groups"] == 4000 // 32
    assert scene["losses"]["ours"] == scene["losses"]["ours, no groups"]


def test_fused_statistics_equal_those_of_the_operators() -> None:
    scene = Garden(DEFAULT, torch.device("cpu")).scene(TINY)
    ours = OurStep(scene, needed(scene), graph=False, lazy=False, counting=True)
    theirs = AutogradStep(scene, Kind("operators", "ours"), counting=True)
    for step in (ours, theirs):
        step()
    counted, expected = ours.fused._model.statistics, theirs._counts._state
    assert torch.equal(counted["count"], expected["count"]) and float(counted["count"].sum()) > 100
    for name in ("grad2d", "radii"):
        assert (counted[name] - expected[name]).norm() < 1e-3 * expected[name].norm() != 0, name
