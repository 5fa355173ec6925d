"""Captures and options that 2D and 4D Gaussians may meet and were not made for: what is said, and that a run goes on
where it says so."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ns_multigpu.core.dist.world import World
from ns_multigpu.plugin.faults.errors import InputError
from ns_multigpu.plugin.splats import pipeline
from tests.lib import training_run
from tests.lib.resuming import start
from tests.lib.training_run import save_nothing, write_capture

PRIMITIVES = ["2dgs", "4dgs"]


@pytest.fixture
def capture(tmp_path: Path) -> Path:
    write_capture(tmp_path / "capture", wide=False)
    return tmp_path / "capture"


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the lines that the pipeline prints."""
    lines: list[str] = []
    monkeypatch.setattr(pipeline, "CONSOLE", SimpleNamespace(print=lambda text, **_: lines.append(str(text))))
    return lines


def timed(monkeypatch: pytest.MonkeyPatch, last: float) -> None:
    """Views of the tiny capture have times, from 0 to `last`."""
    usual = training_run.TinyDataParser._generate_dataparser_outputs

    def outputs(self: Any, split: str = "train", **more: Any) -> Any:
        found = usual(self, split, **more)
        found.cameras.times = torch.linspace(0, last, len(found.cameras))[:, None]
        return found

    monkeypatch.setattr(training_run.TinyDataParser, "_generate_dataparser_outputs", outputs)


def train(capture: Path, steps: int = 3, **options: Any) -> Any:
    """Return a short run in one process; its model."""
    trainer = start(World.single(), capture, capture.parent / "run", steps, normal_loss_start=0, **options)
    save_nothing(trainer)
    trainer.train()
    return trainer.pipeline.model


def test_a_capture_that_stands_still_is_learned_as_one_moment(capture: Path, said: list[str]) -> None:
    model = train(capture, primitive="4dgs")
    (line,) = [line for line in said if "stands still" in line]
    assert "views have no times" in line and "--pipeline.model.primitive 3dgs" in line
    assert all(bool(value.isfinite().all()) for value in model.gauss_params.values())


def test_times_beyond_the_capture_are_refused(capture: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    timed(monkeypatch, 24.0)
    with pytest.raises(InputError, match=r"times go from 0 to 24; 4D Gaussians \(4dgs\) learn those from 0 to 1"):
        start(World.single(), capture, capture.parent / "run", 1, primitive="4dgs")


def test_times_are_no_fault_of_points_without(capture: Path, monkeypatch: pytest.MonkeyPatch, said: list[str]) -> None:
    timed(monkeypatch, 24.0)
    train(capture, 1, primitive="2dgs")
    assert any("--pipeline.model.primitive 4dgs learns it" in line for line in said)


@pytest.mark.parametrize("primitive", PRIMITIVES)
@pytest.mark.parametrize("points", [1, 2])
def test_a_few_points_are_enough(capture: Path, monkeypatch: pytest.MonkeyPatch, primitive: str, points: int) -> None:
    monkeypatch.setattr(training_run, "POINTS", points)
    model = train(capture, 8, primitive=primitive, stop_split_at=0)
    assert model.num_points == points
    assert all(bool(value.isfinite().all()) for value in model.gauss_params.values())


WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("3dgs", {"num_random": 0}, "num-random 0"),
    ("2dgs", {"num_random": -3}, "num-random -3"),
    ("4dgs", {"random_scale": 0.0}, "random-scale 0"),
]


@pytest.mark.parametrize(("primitive", "options", "wrong"), WRONG)
def test_no_points_are_refused(capture: Path, primitive: str, options: dict[str, Any], wrong: str) -> None:
    with pytest.raises(InputError, match=rf"--pipeline.model.{wrong}.*: give "):
        start(World.single(), capture, capture.parent / "run", 1, primitive=primitive, random_init=True, **options)
