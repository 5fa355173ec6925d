"""Faults in a run of several workers: messages, delays, and files and processes that remain."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ns_multigpu.core.dist.machines import PRETEND_MACHINES
from ns_multigpu.plugin.faults.errors import WorkerFailed
from ns_multigpu.plugin.launch.launcher import run_workers
from tests.lib.guarded_toy import GuardedConfig
from tests.lib.processes import runs, until
from tests.plugin.launch.test_launch import HANG, ROOT, environment


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in set(os.environ) - set(environment()):
        monkeypatch.delenv(name)


_started: list[subprocess.Popen[str]] = []


@pytest.fixture(autouse=True)
def nothing_goes_on() -> Iterator[None]:
    """Yield a run of a test that failed would take hours, and the cores of all tests behind it."""
    yield
    while _started:
        run = _started.pop()
        if run.poll() is None:
            run.terminate()  # torchrun's workers are in sessions of their own
            with contextlib.suppress(subprocess.TimeoutExpired):
                run.communicate(timeout=60)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(run.pid, signal.SIGKILL)


def notes(folder: Path) -> list[str]:
    return (folder / "notes").read_text().splitlines()


def gone(folder: Path) -> bool:
    pids = [int(path.read_text()) for path in folder.glob("pid-*")]
    return bool(pids) and until(lambda: not any(map(runs, pids)), 30)


def model(folder: Path) -> torch.Tensor:
    return torch.load(folder / "toy.ckpt")["param"]


def saved_step(folder: Path) -> int:
    return int(torch.load(folder / "toy.ckpt")["step"])


def start(folder: Path, workers: int, *launcher: str, **fields: Any) -> subprocess.Popen[str]:
    """Return the toy in a process of its own: `workers` of our launcher's, or 0 for this process alone or under
    `launcher`."""
    module = ["-m", "tests.lib.guarded_toy", str(workers), repr({"folder": str(folder), **fields})]
    command = [sys.executable, *(["-m", "torch.distributed.run", *launcher] if launcher else []), *module]
    run = subprocess.Popen(
        command, cwd=ROOT, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    )  # fmt: skip
    _started.append(run)
    return run


def started(folder: Path, process: subprocess.Popen[str], workers: int) -> float:
    """Wait until a run that was just started has saved; return the seconds that took, as a measure of the load."""
    begin = time.monotonic()
    ready = until(
        lambda: (
            (len(list(folder.glob("pid-*"))) == workers and (folder / "toy.ckpt").exists())
            or process.poll() is not None
        ),
        HANG,
    )
    assert ready and process.poll() is None, process.communicate()[0]
    return time.monotonic() - begin


def test_dying_worker_ends_the_others(tmp_path: Path) -> None:
    """Ranks 0 and 2 sit in a collective by then. They are down within 10 s (a second, where nothing else runs), or
    within the time that the start took, if this machine is so busy that it took longer."""
    run = start(tmp_path, 3, steps=10**6, pace=0.01, faults=((1, 100, "raise"),))
    took = started(tmp_path, run, 3)
    first = int((tmp_path / "pid-1").read_text())
    assert until(lambda: not runs(first), HANG)
    died = time.monotonic()
    output, _ = run.communicate(timeout=HANG)
    assert time.monotonic() - died < max(10.0, took)
    assert run.returncode == 1 and gone(tmp_path), output
    last = output[output.rindex("Traceback") :]
    assert "KeyError: 'the toy is broken'" in last and "misbehave" in last, "its own traceback is the last one"


def test_restarts_from_the_last_checkpoint_and_ends_the_same(tmp_path: Path) -> None:
    for name in ("undisturbed", "disturbed"):
        (tmp_path / name).mkdir()
    run_workers(GuardedConfig(str(tmp_path / "undisturbed")), 2)
    faults = ((1, 17, "SIGKILL"),)
    run_workers(GuardedConfig(str(tmp_path / "disturbed"), faults=faults, max_restarts=1), 2)
    assert notes(tmp_path / "undisturbed") == ["attempt 0 from step 0"]
    assert notes(tmp_path / "disturbed") == ["attempt 0 from step 0", "attempt 1 from step 15"]
    assert torch.equal(model(tmp_path / "disturbed"), model(tmp_path / "undisturbed"))
    assert model(tmp_path / "disturbed").abs().min() > 0


@pytest.mark.parametrize(
    ("what", "restarts", "attempts", "said"),
    [
        ("SIGKILL", 1, 2, "was killed by SIGKILL"),
        ("raise", 1, 1, "the toy is broken"),
        ("cannot read", 1, 2, "the toy cannot read"),
        ("fails", 2, 2, "the toy fails"),  # the same exception again: a third time would end no better
        ("out of memory", 1, 1, "--machine.num-devices"),
        ("nan", 1, 1, "NaN or infinity in training"),
    ],
)
def test_restarts_only_what_may_get_better(tmp_path: Path, what: str, restarts: int, attempts: int, said: str) -> None:
    faults = ((1, 17, what),)
    with pytest.raises(WorkerFailed, match=said):
        run_workers(GuardedConfig(str(tmp_path), faults=faults, max_restarts=restarts, every_attempt=True), 2)
    assert len(notes(tmp_path)) == attempts


def test_torchrun_restarts_too(tmp_path: Path) -> None:
    launcher = ("--standalone", "--nproc-per-node=2", "--max-restarts=1")
    run = start(tmp_path, 0, *launcher, faults=((1, 17, "SIGKILL"),))
    output, _ = run.communicate(timeout=HANG)
    assert run.returncode == 0, output
    assert notes(tmp_path) == ["attempt 0 from step 0", "attempt 1 from step 15"]


@pytest.mark.parametrize(
    ("workers", "launcher", "target", "how"),
    [
        (0, (), "parent", signal.SIGINT),
        (2, (), "group", signal.SIGINT),  # as a terminal does
        (2, (), "rank 1", signal.SIGTERM),
        (0, ("--standalone", "--nproc-per-node=2"), "group", signal.SIGTERM),
    ],
)
def test_a_signal_saves_and_leaves_nothing(
    tmp_path: Path, workers: int, launcher: tuple[str, ...], target: str, how: signal.Signals
) -> None:
    run = start(tmp_path, workers, *launcher, steps=10**6, pace=0.01)
    ranks = max(workers, 2 if launcher else 1)
    started(tmp_path, run, ranks)
    if target == "group":
        os.killpg(run.pid, how)
    else:
        os.kill(run.pid if target == "parent" else int((tmp_path / "pid-1").read_text()), how)
    output, _ = run.communicate(timeout=HANG)
    step = saved_step(tmp_path)
    assert f"Stopped by {how.name} after step {step}. Saved {tmp_path / 'toy.ckpt'}" in output
    assert gone(tmp_path)
    if not launcher:  # torchrun has a status and a traceback of its own
        assert run.returncode == 128 + how and "Traceback" not in output


def test_signal_saves_nothing_if_disabled(tmp_path: Path) -> None:
    run = start(tmp_path, 2, steps=10**6, pace=0.01, save_on_interrupt=False)
    started(tmp_path, run, 2)
    os.kill(run.pid, signal.SIGTERM)
    output, _ = run.communicate(timeout=HANG)
    assert run.returncode == 143 and "Nothing new was saved" in output
    assert saved_step(tmp_path) % 5 == 4  # the last regular one


def test_a_second_signal_ends_at_once(tmp_path: Path) -> None:
    # It will never come to grant the first one.
    run = start(tmp_path, 2, steps=10**6, faults=((1, 30, "sleep"),))
    took = started(tmp_path, run, 2)
    time.sleep(0.5)
    os.kill(run.pid, signal.SIGINT)
    time.sleep(1.5)
    assert run.poll() is None
    os.kill(run.pid, signal.SIGINT)
    begin = time.monotonic()
    output, _ = run.communicate(timeout=HANG)
    assert time.monotonic() - begin < max(8.0, took)
    assert run.returncode == 130 and "Stopped by SIGINT" in output and gone(tmp_path)


def test_a_pause_on_rank_0_holds_all_and_ends(tmp_path: Path) -> None:
    (tmp_path / "pause").touch()
    run = start(tmp_path, 2, steps=20, stall_seconds=0.5, stall_abort_seconds=1.0)
    assert until(lambda: (tmp_path / "pid-1").exists(), HANG)
    time.sleep(4)
    assert run.poll() is None and not (tmp_path / "toy.ckpt").exists()
    (tmp_path / "pause").unlink()
    output, _ = run.communicate(timeout=HANG)
    assert run.returncode == 0 and saved_step(tmp_path) == 19, output


def test_a_stall_is_ended_and_names_the_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 sleeps in step 12; rank 0 waits for it in the exchange."""
    monkeypatch.setenv(PRETEND_MACHINES, "2")
    with pytest.raises(WorkerFailed) as caught:
        run_workers(
            GuardedConfig(str(tmp_path), faults=((1, 12, "sleep"),), stall_seconds=1.0, stall_abort_seconds=5.0), 2
        )
    text, host = str(caught.value), socket.gethostname()
    assert f"Rank 1 on machine 1 ({host}) is late: in step 12, phase compute" in text
    assert f"Waiting for it: rank 0 on machine 0 ({host}) in step 12, exchange" in text
    assert "StallError" in text and "time.sleep(300)" in text, "the stack of the late one"


@pytest.mark.slow
def test_a_stopped_process_is_named(tmp_path: Path) -> None:
    begin = time.monotonic()
    with pytest.raises(WorkerFailed) as caught:
        run_workers(GuardedConfig(str(tmp_path), faults=((1, 12, "SIGSTOP"),), stall_abort_seconds=2.0), 2)
    assert "Rank 1 is late and does not answer" in str(caught.value) and gone(tmp_path)
    assert time.monotonic() - begin < HANG


def test_torchrun_shows_the_first_traceback_last(tmp_path: Path) -> None:
    run = start(tmp_path, 0, "--standalone", "--nproc-per-node=2", faults=((1, 17, "raise"),))
    output, _ = run.communicate(timeout=HANG)
    assert run.returncode == 1 and gone(tmp_path), output
    last = output[output.rindex("Root Cause") :]
    assert "rank      : 1" in last and "KeyError: 'the toy is broken'" in last and "misbehave" in last, output
