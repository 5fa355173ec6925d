"""Starting and ending workers, through the launcher and through the real `ns-train`."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import yaml

from ns_multigpu.plugin.faults.errors import InputError, WorkerFailed
from ns_multigpu.plugin.launch.launcher import run_workers
from ns_multigpu.plugin.launch.processes import cores
from tests.lib.processes import free_port, runs, until
from tests.lib.toy import ToyConfig, reports

ROOT = Path(__file__).parents[3]
HANG = 240.0
"""Seconds after which what has not come will not come: a busy machine takes many times what an idle one does."""


def environment(**extra: str) -> dict[str, str]:
    """This process's, without what a launcher around the tests may have set."""
    ours = {name: value for name, value in os.environ.items() if not name.startswith(("TORCHELASTIC", "OMP_NUM"))}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "TOY"):
        ours.pop(name, None)
    return {**ours, "PYTHONPATH": str(ROOT), "NS_MULTIGPU_OPS": "reference", "COLUMNS": "100", **extra}


def ns_train(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Return `ns-train toy ARGUMENTS` in processes of its own."""
    command = [sys.executable, "-m", "nerfstudio.scripts.train", "toy", *arguments]
    variables["NERFSTUDIO_METHOD_CONFIGS"] = "toy=tests.lib.toy_method:toy"
    env = environment(**variables)
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=HANG, check=False)


def run_as_ranks(program: str, folder: Path, places: Sequence[Mapping[str, str]]) -> tuple[list[int], list[str]]:
    """Run a program as the ranks of another launcher, with the variables of each; return exit codes and outputs."""
    script = folder / "program.py"
    script.write_text(program)
    common = {"WORLD_SIZE": str(len(places)), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    running = [
        subprocess.Popen(
            [sys.executable, str(script)], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            env=environment(**common, RANK=str(rank), **place),
        )
        for rank, place in enumerate(places)
    ]  # fmt: skip
    said = [process.communicate(timeout=HANG)[0] for process in running]
    return [process.returncode for process in running], said


TOYS = """
import sys
from ns_multigpu.plugin.launch.launcher import run_workers
from tests.lib.toy import ToyConfig

if __name__ == "__main__":
    run_workers(ToyConfig(sys.argv[1]), 2)
"""


def start_toys(folder: Path) -> subprocess.Popen[str]:
    """Return a process whose two workers wait."""
    (folder / "main.py").write_text(TOYS)
    words = [sys.executable, str(folder / "main.py"), str(folder)]
    process = subprocess.Popen(words, cwd=ROOT, env=environment(TOY="wait"), stderr=subprocess.PIPE, text=True)
    assert until(lambda: len(reports(folder)) == 2 or process.poll() is not None, HANG)
    return process


@pytest.fixture
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in set(os.environ) - set(environment()):
        monkeypatch.delenv(name)
    return monkeypatch


def test_workers_share_seed_and_cores(tmp_path: Path, clean_environment: pytest.MonkeyPatch) -> None:
    run_workers(ToyConfig(str(tmp_path)), 3)
    seen = reports(tmp_path)
    assert [tuple(one["place"]) for one in seen] == [(rank, 3, rank, 3) for rank in range(3)]
    assert [tuple(one["asked"]) for one in seen] == [(rank, 3) for rank in range(3)]
    assert {one["sum"] for one in seen} == {6.0}
    assert len({one["draw"] for one in seen}) == 1
    assert {one["threads"] for one in seen} == {max(1, cores() // 3)}
    assert "OMP_NUM_THREADS" not in os.environ and signal.getsignal(signal.SIGINT) is signal.default_int_handler


MAIN = """
import os, sys
from pathlib import Path
from ns_multigpu.plugin.launch.launcher import run_workers
from tests.lib.processes import free_port, runs, until
from tests.lib.toy import ToyConfig

class OwnConfig(ToyConfig):
    pass

(Path(sys.argv[1]) / f"main-{os.getpid()}").touch()
if __name__ == "__main__":
    run_workers({"own": OwnConfig, "other": ToyConfig}[sys.argv[2]](sys.argv[1]), 2)
    assert sys.modules["__main__"].__file__ == __file__
"""


@pytest.mark.parametrize(("kind", "times"), [("other", 1), ("own", 3)])
def test_workers_run_the_main_module_only_if_they_need_it(tmp_path: Path, kind: str, times: int) -> None:
    """Importing `ns-train` takes seconds; but a configuration may be one of its classes."""
    (tmp_path / "main.py").write_text(MAIN)
    words = [sys.executable, str(tmp_path / "main.py"), str(tmp_path), kind]
    done = subprocess.run(words, env=environment(), capture_output=True, text=True, timeout=HANG, check=False)
    assert done.returncode == 0, done.stderr
    assert re.search(r"Starting 2 CPU workers \(\d+ threads? each\)\.", done.stderr)
    assert len(reports(tmp_path)) == 2 and len(list(tmp_path.glob("main-*"))) == times


@pytest.mark.parametrize(
    ("conduct", "kind", "said"),
    [
        ("raise", WorkerFailed, "Worker 1 failed.*\n.*the toy is broken"),
        ("input", InputError, "no such toy; choose another"),
    ],
)
def test_a_failing_worker_ends_all_and_is_named(
    tmp_path: Path, clean_environment: pytest.MonkeyPatch, conduct: str, kind: type[Exception], said: str
) -> None:
    clean_environment.setenv("TOY", conduct)
    start = time.monotonic()
    with pytest.raises(kind, match=said) as caught:
        run_workers(ToyConfig(str(tmp_path)), 2)
    assert time.monotonic() - start < HANG  # rank 0 sits in a barrier for ten minutes unless it is ended
    if conduct == "raise":
        assert isinstance(caught.value, WorkerFailed)
        assert 'raise KeyError("the toy is broken")' in caught.value.report
    assert all(until(lambda pid=one["pid"]: not runs(pid), 30) for one in reports(tmp_path))


def test_no_process_stays_behind(tmp_path: Path) -> None:
    process = start_toys(tmp_path)
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=HANG)
    assert process.returncode == 128 + signal.SIGTERM
    assert "Stopped by SIGTERM" in said and "Traceback" not in said
    seen = reports(tmp_path)
    assert len(seen) == 2 and all(until(lambda pid=one["pid"]: not runs(pid), 30) for one in seen)


def check_one_run_folder(output: Path, workers: int) -> None:
    """Assert one config.yml, which loads as `ns-eval` loads it, and one run folder of all ranks."""
    from nerfstudio.engine.trainer import TrainerConfig

    configs = list(output.glob("**/config.yml"))
    assert len(configs) == 1
    config = yaml.load(configs[0].read_text(), Loader=yaml.Loader)
    assert isinstance(config, TrainerConfig)
    assert (config.machine.num_devices, config.machine.num_machines) == (workers, 1)
    assert "_asked" not in configs[0].read_text() and config.get_base_dir() == configs[0].parent
    assert {path.parent for path in output.glob("**/rank-*.json")} == {configs[0].parent}
    seen = reports(configs[0].parent)
    assert [tuple(one["place"]) for one in seen] == [(rank, workers, rank, workers) for rank in range(workers)]
    assert {one["sum"] for one in seen} == {workers * (workers + 1) / 2}
    assert {one["devices"] for one in seen} == {workers}
    assert len({one["draw"] for one in seen}) == 1


def test_ns_train_starts_cpu_workers(tmp_path: Path) -> None:
    cpu = ("--machine.device-type", "cpu", "--machine.num-devices", "2")
    done = ns_train(*cpu, "--output-dir", str(tmp_path), "--verbose", "True")
    assert done.returncode == 0, done.stdout + done.stderr
    check_one_run_folder(tmp_path, 2)
    assert done.stdout.count("─ Config ─") == 1, "all options, once"


def test_ns_train_without_workers_is_a_world_of_one(tmp_path: Path) -> None:
    done = ns_train("--machine.device-type", "cpu", "--output-dir", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    check_one_run_folder(tmp_path, 1)


AGREEING = """
from datetime import timedelta
import torch, torch.distributed as dist
from ns_multigpu.plugin.faults.errors import show_uncaught
from ns_multigpu.plugin.launch.ranks import Ranks, agree

def decide(starts):
    return "folder"

show_uncaught()
ranks = Ranks.from_env()
word = agree(ranks, decide, timedelta(seconds=60))
dist.init_process_group("gloo", timeout=timedelta(seconds=60))
total = torch.ones(1)
dist.all_reduce(total)
print(f"rank {ranks.rank} of {int(total)} in {word}", flush=True)
dist.destroy_process_group()
"""


def test_machines_of_unequally_many_workers_are_refused_everywhere(tmp_path: Path) -> None:
    """As `torchrun --nproc-per-node 2` on one machine and 1 on the other would start them."""
    places = [
        {"GROUP_WORLD_SIZE": "2", "GROUP_RANK": group, "LOCAL_RANK": local}
        for group, local in (("0", "0"), ("0", "1"), ("1", "0"))
    ]
    codes, outputs = run_as_ranks(AGREEING, tmp_path, places)
    said, host = [" ".join(output.split()) for output in outputs], socket.gethostname()
    assert codes == [1, 1, 1]
    for text in said:
        assert f"machine 0 ({host}) has 2, machine 1 ({host}) has 1" in text and "Traceback" not in text
    assert "Give torchrun the same --nproc-per-node" in said[0] and "Give torchrun the same" in said[2]
    assert f"Cannot start (rank 2 on machine 1 ({host}))" in said[2]
    assert said[1].startswith(f"rank 1 on machine 0 ({host}): Every machine must have equally many ranks")
