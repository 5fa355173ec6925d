"""Processes that are ranks: what they find, how they end, and that none is left."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ns_multigpu.core.dist.world import World
from ns_multigpu.plugin.launch.processes import COUNT_BY_NVML, RankFailed, RankProcesses, environment
from ns_multigpu.plugin.launch.quick_imports import starts_workers
from tests.lib.processes import runs, until
from tests.lib.toy import reports
from tests.plugin.launch.test_launch import HANG, ROOT, start_toys
from tests.plugin.launch.test_launch import environment as clean

NS_TRAIN = "/somewhere/bin/ns-train"


def _meet(folder: str) -> None:
    world = World.from_env("cpu")
    total = torch.tensor([world.rank + 1.0])
    dist.all_reduce(total)
    said = [
        os.environ["RANK"],
        total.item(),
        torch.get_num_threads(),
        os.environ.get("A_TEST"),
        COUNT_BY_NVML in os.environ,
    ]
    (Path(folder) / os.environ["RANK"]).write_text(repr(said))
    world.close()


def _misbehave(folder: str, how: str) -> None:
    rank = int(os.environ["RANK"])
    (Path(folder) / f"pid-{rank}").write_text(str(os.getpid()))
    if rank == 1:
        while len(list(Path(folder).iterdir())) < 2:
            time.sleep(0.01)
        if how == "raise":
            raise KeyError("broken")
        if how == "exit":
            os._exit(7)
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    threading.Event().wait()


@pytest.mark.parametrize("fork", [True, False])
def test_ranks_have_their_threads_and_this_environment(fork: bool, tmp_path: Path) -> None:
    with environment({"A_TEST": str(fork)}):
        ranks = RankProcesses(_meet, (str(tmp_path),), 2, threads=3, fork=fork)
    assert "RANK" not in os.environ and "A_TEST" not in os.environ
    assert ranks.wait(HANG) and ranks.wait()
    assert sorted(file.read_text() for file in tmp_path.iterdir()) == [
        repr([str(rank), 3.0, 3, str(fork), False]) for rank in range(2)
    ]


def test_this_process_may_be_rank_0(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = RankProcesses(_meet, (str(tmp_path),), 2, first=1, threads=1)
    with environment(ranks.place(0)):
        store = next(iter(dist.rendezvous("env://")))[0]
    assert len(ranks.pids) == 1 and not (tmp_path / "0").exists()
    store.set("here", "1")
    ranks.end()
    assert not runs(ranks.pids[0])


@pytest.mark.parametrize(
    ("how", "code", "said"),
    [("raise", 1, "KeyError: 'broken'"), ("exit", 7, "ended with exit code 7"), ("kill", -9, "was killed by SIGKILL")],
)
def test_first_failure_ends_all_and_is_reported(how: str, code: int, said: str, tmp_path: Path) -> None:
    """Also one that takes no notice of SIGTERM."""
    ranks = RankProcesses(_misbehave, (str(tmp_path), how), 2)
    with pytest.raises(RankFailed, match=said) as failed:
        ranks.wait(HANG, grace=0.2)
    assert (failed.value.rank, failed.value.code) == (1, code)
    assert ("Traceback" in failed.value.report) == (how == "raise")
    assert not any(map(runs, ranks.pids))


def test_ranks_are_ended(tmp_path: Path) -> None:
    ranks = RankProcesses(_misbehave, (str(tmp_path), "wait"), 1)
    assert until(lambda: (tmp_path / "pid-0").exists(), HANG)
    assert not ranks.wait(0.1)
    ranks.end(0.1)
    assert not runs(ranks.pids[0])


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
        (["splatfacto-aggregate", "--machine.num-devices", "2"], False),
        (["splatfacto", "--machine.num-devices", "2"], False),
        (["--help"], False),
        ([], False),
    ],
)
def test_command_lines_that_start_the_server(words: list[str], expected: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    assert starts_workers([NS_TRAIN, *words]) == expected
    assert not starts_workers(["/somewhere/bin/ns-eval", *words])
    monkeypatch.setenv("RANK", "0")
    assert not starts_workers([NS_TRAIN, *words]), "a launcher has started this process"


SERVER = """
import multiprocessing, sys
sys.argv = ["ns-train", "splatfacto-batch", "--machine.num-devices", "2"]
import ns_multigpu.dataparsers
if __name__ == "__main__":
    pid = multiprocessing.forkserver._forkserver._forkserver_pid
    from ns_multigpu.plugin.launch.processes import RankProcesses
    from tests.plugin.launch.test_processes import _look
    ranks = RankProcesses(_look, (pid,), 2)
    assert ranks.wait()
"""


def _look(server: int) -> None:
    loaded = sys.modules.keys()
    assert os.getppid() == server, "it is not forked from the server that `ns-train` has started"
    missing = {
        "ns_multigpu.plugin.run.trainer",
        "torch._dynamo",
        "ns_multigpu.plugin.checkpoint.saved_tensors",
    } - loaded
    assert not missing and "pytest" in loaded  # by this module: it is imported here


@pytest.mark.slow
def test_workers_of_ns_train_have_imported_what_they_need(tmp_path: Path) -> None:
    (tmp_path / "main.py").write_text(SERVER)
    words = [sys.executable, "-W", "ignore", str(tmp_path / "main.py")]
    done = subprocess.run(words, cwd=ROOT, env=clean(), capture_output=True, text=True, timeout=HANG)
    assert done.returncode == 0, done.stderr


def test_the_server_ends_with_its_process(tmp_path: Path) -> None:
    """Also of one that is killed: its workers are the server's children, and keep the server's pipe open."""
    process = start_toys(tmp_path)
    workers = [one["pid"] for one in reports(tmp_path)]
    servers = {int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1]) for pid in workers}
    assert len(workers) == 2 and len(servers) == 1 and process.pid not in servers, "they are forked"
    process.kill()
    process.communicate(timeout=HANG)
    assert all(until(lambda pid=pid: not runs(pid), 30) for pid in (*servers, *workers))


@pytest.mark.skipif(sys.platform != "linux", reason="there is no fork server")
def test_nothing_is_printed_behind_an_error_of_the_input(tmp_path: Path) -> None:
    options = ["--machine.device-type", "cpu", "--machine.num-devices", "2", "--data", str(tmp_path / "none")]
    words = [sys.executable, "-m", "nerfstudio.scripts.train", "splatfacto-batch", *options]
    done = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=300)
    assert done.returncode == 1 and "there is no such file or folder" in done.stdout
    assert set(done.stdout.rstrip().splitlines()[-1]) == {"─"}, "the server of workers has ended, too"
