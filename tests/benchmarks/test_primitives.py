"""The benchmark of primitives and strategies: its commands, the metrics that it reads, and its table of sizes."""

import json
import subprocess
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from benchmarks.scaling import primitives

OPTIONS = Namespace(device="cpu", steps=8, city=["--blocks", "1"], capture=None)


def test_run_has_the_requested_options() -> None:
    words = primitives.command("2dgs", "pixel", 2, OPTIONS, Path("runs"))
    assert "splatfacto-pixel" in words and words[-2:] == ["--blocks", "1"]
    assert (
        words[words.index("--max-num-images") + 1] == "16"
        and words[words.index("--pipeline.views-per-step") + 1] == "2"
    )
    assert words[words.index("--pipeline.model.normal-loss") + 1] == "0", "which pixel cannot have"
    words = primitives.command("4dgs", "batch", 2, OPTIONS, Path("runs"))
    assert words[words.index("--time-varying") + 1] == "True" and "--pipeline.views-per-step" not in words


def test_capture_replaces_the_city() -> None:
    options = Namespace(device="cpu", steps=8, city=[], capture=Path("aerial"))
    words = primitives.command("4dgs", "batch", 2, options, Path("runs"))
    assert words[words.index("--data") + 1] == "aerial" and "colmap" in words and "city" not in words


def test_means_are_over_the_steps_behind_the_first_row(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [
        {"step": 0, "step_ms": 900.0, "bytes_per_step": 9e9, "gaussians": 5},
        {"step": 2, "step_ms": 10.0, "bytes_per_step": 40.0, "gaussians": 6},
        {"step": 8, "step_ms": 30.0, "bytes_per_step": 80.0, "gaussians": 7},
    ]

    def run(words: list[str], **_: Any) -> Namespace:
        place = Path(words[words.index("--output-dir") + 1]) / "unnamed" / "method" / "run"
        place.mkdir(parents=True)
        (place / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return Namespace(returncode=0, stdout="", stderr="")

    monkeypatch.setattr(subprocess, "run", run)
    one = primitives.measure("3dgs", "tile", 2, OPTIONS)
    assert one == primitives.Measured("3dgs", "tile", 2, 2e3 / 25, 70.0, 7)
    monkeypatch.setattr(subprocess, "run", lambda words, **_: Namespace(returncode=1, stdout="why", stderr=""))
    with pytest.raises(RuntimeError, match="why"):
        primitives.measure("3dgs", "tile", 2, OPTIONS)


def test_sizes_are_those_of_the_operators() -> None:
    console = Console(width=100, record=True)
    console.print(primitives.sizes_table())
    lines = [line.split() for line in console.export_text().splitlines()]
    found = {words[1]: [word for word in words[3::2] if word.isdigit()] for words in lines if len(words) > 3}
    assert found["3dgs"] == ["236", "48", "36", "40"] and found["convex"] == ["288", "144", "108", "116"]
    assert found["4dgs"][:3] == ["644", "48", "36"]
