"""The whole way of a large model: how its commands are run, killed and reported. The way itself takes minutes."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from benchmarks.scaling.whole_way import Commands, trajectory


def test_commands_are_timed_killed_and_reported(tmp_path: Path) -> None:
    written: list[list[str]] = []
    commands = Commands(tmp_path, dict(os.environ), lambda rows: written.append([row["name"] for row in rows]))
    good = commands.run("good", ["timeit", "-n", 1, "-r", 1, "import time; time.sleep(0.3)"])
    assert good["code"] == 0 and not good["killed"] and good["seconds"] > 0.3 and "tail" not in good
    endless = commands.run("endless", ["timeit", "-n", 1, "-r", 1, "import time; time.sleep(60)"], until=lambda: True)
    assert endless["killed"] and endless["code"] < 0 and endless["seconds"] < 30
    bad = commands.run("bad", ["timeit", "raise ValueError(str(6 * 7))"])
    assert bad["code"] == 1 and "ValueError: 42" in bad["tail"]
    assert written == [["good"], ["good", "endless"], ["good", "endless", "bad"]]


@pytest.mark.parametrize("ended", [True, False])
def test_the_log_of_a_run_is_kept_with_or_without_a_summary(tmp_path: Path, ended: bool) -> None:
    rows: list[dict[str, Any]] = [{"step": 0, "gaussians": 5.0, "loss": 1.0}, {"step": 9, "gaussians": 7.0}]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)))
    if ended:
        (tmp_path / "training_summary.json").write_text(json.dumps({"psnr": 30.0}))
    found = trajectory(tmp_path)
    assert found["trajectory"] == [{"step": 0, "gaussians": 5.0}, {"step": 9, "gaussians": 7.0}]
    assert found.get("psnr") == (30.0 if ended else None)
