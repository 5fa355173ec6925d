"""The benchmark of primitives and strategies: its commands, the metrics that it reads, and its table of sizes."""

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


def test_each_kind_is_measured_with_each_strategy(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[tuple[Any, ...]] = []

    def measure(kind: str, strategy: str, devices: int, _: Namespace) -> primitives.Measured:
        done.append((kind, strategy, devices))
        return primitives.Measured(kind, strategy, devices, 1.0, 0.0, 5)

    monkeypatch.setattr(primitives, "measure", measure)
    monkeypatch.setattr("sys.argv", ["primitives", "--kinds", "2dgs", "--strategies", "batch", "tile"])
    assert primitives.main() == 0
    assert done == [("2dgs", "batch", 1), ("2dgs", "batch", 2), ("2dgs", "tile", 2)], "on one device they are the same"


def test_sizes_are_those_of_the_operators() -> None:
    console = Console(width=100, record=True)
    console.print(primitives.sizes_table())
    lines = [line.split() for line in console.export_text().splitlines()]
    found = {words[1]: [word for word in words[3::2] if word.isdigit()] for words in lines if len(words) > 3}
    assert found["3dgs"] == ["236", "48", "36", "40"] and found["convex"] == ["288", "112", "104", "116"]
    assert found["4dgs"][:3] == ["644", "48", "36"]
