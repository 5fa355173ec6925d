"""Time that a run reports for work other than training."""

import json
import subprocess
import sys
import time
from pathlib import Path
from threading import Thread

import pytest

from ns_multigpu.plugin.launch import run_parts as module
from ns_multigpu.plugin.launch.run_parts import RunParts


def test_parts_follow_each_other_without_a_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = RunParts.of_this_process()
    for seconds, part in ((0.02, "first"), (0.0, "second"), (0.01, "first")):
        monkeypatch.setattr(module, "_now", lambda now=parts.last + seconds: now)
        parts.done(part)
    assert list(parts.parts)[1:] == ["first", "second"]
    assert parts.parts["first"] == pytest.approx(30) and parts.parts["second"] == 0
    assert sum(parts.parts.values()) == pytest.approx(1e3 * (parts.last - parts.began))


def test_they_begin_with_the_process(tmp_path: Path) -> None:
    """Not with the import of the module, before which everything else has been imported."""
    program = (
        "import time; began = time.clock_gettime(time.CLOCK_BOOTTIME); time.sleep(0.3)\n"
        "from ns_multigpu.plugin.launch.run_parts import run_parts\n"
        "print(run_parts().began - began, run_parts().parts['imports of torch and nerfstudio'])"
    )
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    assert -5 < float(said[0]) <= 0.02
    assert float(said[1]) >= 300


def test_threads_are_listed_with_processes() -> None:
    parts = RunParts.of_this_process()

    def work() -> None:
        with parts.while_busy("pictures"):
            time.sleep(0.02)

    thread = Thread(target=work)
    thread.start()
    thread.join()
    times = parts.as_dict()
    assert times["pictures (concurrent)"] >= 20
    assert "pictures" not in parts.parts


def test_worker_continues_the_launcher_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_state", [RunParts.of_this_process()])
    theirs = RunParts(1.0, 2.0, {"imports": 1000.0})
    module.go_on_with(theirs)
    module.run_parts().done("start of the workers")
    assert list(module.run_parts().parts) == ["imports", "start of the workers"]


def test_the_exit_is_added_to_the_runs_sum(tmp_path: Path) -> None:
    file, parts = tmp_path / "training_summary.json", RunParts.of_this_process()
    file.write_text(json.dumps({"steps": 3, "startup_ms": parts.as_dict()}))
    parts.write_exit()  # it is not enabled
    assert "exit" not in json.loads(file.read_text())["startup_ms"]
    parts.add_exit(file, "exit")
    time.sleep(0.01)
    parts.write_exit()
    summary = json.loads(file.read_text())
    assert summary["steps"] == 3 and summary["startup_ms"]["exit"] >= 10
    parts.write_exit()
    assert json.loads(file.read_text()) == summary, "once"
    assert [path.name for path in tmp_path.iterdir()] == [file.name]


def test_missing_summary_does_not_fail_a_run(tmp_path: Path) -> None:
    parts = RunParts.of_this_process()
    parts.add_exit(tmp_path / "absent" / "training_summary.json", "exit")
    parts.write_exit()
