"""The benchmarks of looking at a model run, on CPUs, and what they count adds up."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


def _run(module: str, *words: object) -> str:
    command = [sys.executable, "-W", "ignore", "-m", f"benchmarks.looking.{module}", *map(str, words)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=800, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    return done.stdout


@pytest.mark.slow
def test_frames(tmp_path: Path) -> None:
    _run(
        "frames", "--points", 2000, "--sizes", "64x48", "--frames", 4, "--gpus", 1, "--device", "cpu",
        "--json", tmp_path / "a.json",
    )  # fmt: skip
    rows: list[dict[str, Any]] = json.loads((tmp_path / "a.json").read_text())["rows"]
    assert [(row["devices"], row["way"]) for row in rows] == [(1, "draw"), (1, "film")]
    assert all(0 < row["fps"] < 10_000 for row in rows)


@pytest.mark.slow
def test_latency(tmp_path: Path) -> None:
    _run(
        "latency", "--points", 500, "--max-res", 64, "--seconds", 3, "--device", "cpu", "--width", 64, "--height", 48,
        "--port", 7191, "--json", tmp_path / "a.json",
    )  # fmt: skip
    found = json.loads((tmp_path / "a.json").read_text())
    assert found["pictures_a_second"] > 0.2 and 0 < found["latency_ms_median"] <= found["latency_ms_worst"]
    assert found["ms_a_step_alone"] > 0 and found["kb_a_picture"] > 0.1
