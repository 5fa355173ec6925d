"""Workers of `ns-train` are forked from a server that has imported what they need."""

import ctypes
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from ns_multigpu.plugin.launch import worker_server
from ns_multigpu.plugin.launch.launcher import launch_config
from ns_multigpu.plugin.launch.worker_server import BY_NVML, wanted
from tests.plugin.test_launch import HANG, ROOT, alive, environment, wait_until
from tests.plugin.toy import reports

NS_TRAIN = "/somewhere/bin/ns-train"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["splatfacto-tile", "--machine.num-devices", "2", "colmap"], True),
        (["splatfacto-batch", "--machine.num_devices=4"], True),
        (["nerfacto-xl", "--machine.num-devices", "2"], True),
        (["nerfacto", "--machine.num-devices", "2"], False),
        (["splatfacto-batch", "--load-config", "config.yml"], True),
        (["splatfacto-batch", "--machine.num-devices", "1"], False),
        (["splatfacto-batch", "--max-num-images", "2"], False),
        (["splatfacto", "--machine.num-devices", "2"], False),
        (["--help"], False),
        ([], False),
    ],
)
def test_which_command_lines_want_it(words: list[str], expected: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    assert wanted([NS_TRAIN, *words]) == expected
    assert not wanted(["/somewhere/bin/ns-eval", *words])
    monkeypatch.setenv("RANK", "0")
    assert not wanted([NS_TRAIN, *words]), "a launcher has started this process"


@pytest.mark.parametrize(("workers", "said"), [("2", "1"), ("1", "None")])
def test_gpus_are_left_alone_while_nerfstudio_is_imported(workers: str, said: str) -> None:
    """It is told by what nerfstudio loads first of ours; and torch counts them as it is imported."""
    code = f"import os, sys; sys.argv = {[NS_TRAIN, 'splatfacto-batch', '--machine.num-devices', workers]}; "
    code += f"import ns_multigpu.dataparsers; print(os.environ.get({BY_NVML!r}))"
    words = [sys.executable, "-W", "ignore", "-c", code]
    done = subprocess.run(words, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=HANG)
    assert done.stdout.split() == [said], done.stderr


PROGRAM = """
import sys
from multiprocessing import forkserver
from pathlib import Path
from ns_multigpu.plugin.launch import worker_server
from ns_multigpu.plugin.launch.launcher import run_workers
from tests.plugin.toy import ToyConfig

if __name__ == "__main__":
    worker_server.keep_off_gpus()
    assert __import__("os").environ.get(worker_server.BY_NVML) == "1"
    worker_server.start()
    assert worker_server.serving() and worker_server.BY_NVML not in __import__("os").environ
    Path(sys.argv[1], "server").write_text(str(forkserver._forkserver._forkserver_pid))
    run_workers(ToyConfig(sys.argv[1]), 2)
"""


def run(folder: Path, conduct: str) -> "subprocess.Popen[str]":
    (folder / "main.py").write_text(PROGRAM)
    words = [sys.executable, str(folder / "main.py"), str(folder)]
    return subprocess.Popen(words, cwd=ROOT, env=environment(TOY=conduct), stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_no_process_stays_behind(tmp_path: Path, how: signal.Signals) -> None:
    """Also of a process that is killed: its workers are the server's children, and keep the server's pipe open."""
    process = run(tmp_path, "wait")
    assert wait_until(lambda: len(reports(tmp_path)) == 2 or process.poll() is not None, HANG)
    server, workers = int((tmp_path / "server").read_text()), [one["pid"] for one in reports(tmp_path)]
    assert len(workers) == 2
    assert {_parent(pid) for pid in workers} == {server}, "they are forked"
    process.send_signal(how)
    _, said = process.communicate(timeout=HANG)
    assert process.returncode == (-how if how == signal.SIGKILL else 128 + how), said
    assert all(wait_until(lambda pid=pid: not alive(pid), 30) for pid in (server, *workers))


def test_a_worker_that_is_killed_ends_all_and_is_named(tmp_path: Path) -> None:
    _, said = (process := run(tmp_path, "kill")).communicate(timeout=HANG)
    assert process.returncode == 1 and "Worker 1 was killed by SIGKILL" in said
    assert all(wait_until(lambda pid=one["pid"]: not alive(pid), 30) for one in reports(tmp_path))


COPY = """
import sys, threading
import torch
from ns_multigpu.plugin.launch import worker_server
from ns_multigpu.plugin.launch.launcher import run_workers
from tests.plugin.toy import ToyConfig

class Config(ToyConfig):
    def setup(self, **kwargs):
        import multiprocessing.forkserver
        multiprocessing.forkserver._forkserver._lock.acquire(timeout=5) or sys.exit("its lock is held")
        multiprocessing.forkserver._forkserver._lock.release()
        if not sys.modules["__main__"].__dict__.get("IMPORTED_HERE"):
            sys.exit("this worker has imported what it runs")
        torch.set_num_threads(2)
        torch.ones(1 << 20).add_(1).sum()
        return super().setup(**kwargs)

if __name__ == "__main__":
    IMPORTED_HERE = True
    torch.set_num_threads(2)
    before = torch.ones(1 << 20).add_(1).sum()  # OpenMP has threads now
    print("once", end="")
    worker_server.start()
    assert worker_server.serving()
    run_workers(Config(sys.argv[1]), 2)
"""


def test_workers_are_copies_of_the_process_with_threads_of_their_own(tmp_path: Path) -> None:
    """What it has imported they have, OpenMP's threads do not keep them waiting, and no lock is held for ever."""
    (tmp_path / "main.py").write_text(COPY)
    words = [sys.executable, str(tmp_path / "main.py"), str(tmp_path)]
    done = subprocess.run(words, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=HANG)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "once" and len(reports(tmp_path)) == 2


def test_nothing_is_forked_where_it_would_not_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_server.forkserver, "ensure_running", lambda: pytest.fail("forked"))
    monkeypatch.setattr(worker_server.threading, "active_count", lambda: 1)
    monkeypatch.setattr(worker_server, "_openmp_rests", lambda: True)
    with monkeypatch.context() as patch:
        patch.setattr(worker_server, "_driver_in_use", lambda: True)
        worker_server.start()
    with monkeypatch.context() as patch:
        patch.setattr(worker_server, "_openmp_rests", lambda: False)
        worker_server.start()
    with monkeypatch.context() as patch:
        patch.setattr(worker_server.threading, "active_count", lambda: 2)
        worker_server.start()
    assert not worker_server.serving()


@pytest.mark.parametrize(("status", "used"), [(3, False), (0, True), (100, True)])
def test_whether_the_driver_is_in_use_is_asked_of_the_driver(
    status: int, used: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace(cuDeviceGetCount=lambda count: status))
    assert worker_server._driver_in_use() == used


def test_a_wish_of_the_users_about_nvml_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(BY_NVML, "0")
    monkeypatch.setattr(worker_server, "_outlives_fork", lambda: False)
    worker_server.keep_off_gpus()
    worker_server.start()
    assert os.environ[BY_NVML] == "0"


@pytest.mark.parametrize(("wish", "asked"), [(None, 0), ("0", 1)])
def test_torch_s_launcher_does_not_start_the_driver(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, wish: str | None, asked: int
) -> None:
    """Unless the user wants GPUs counted by it."""
    counted: list[int] = []
    monkeypatch.delenv(BY_NVML, raising=False)
    if wish is not None:
        monkeypatch.setenv(BY_NVML, wish)
    monkeypatch.setattr(torch.cuda, "_is_compiled", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch._C, "_cuda_getDeviceCount", lambda: (counted.append(1), 2)[1])
    assert launch_config(2, str(tmp_path)).nproc_per_node == 2
    assert len(counted) == asked and os.environ.get(BY_NVML) == wish


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])
