"""Training on two machines under torchrun, as a user starts it: network namespaces with a link between them.

It takes Linux and root: otherwise these tests are skipped with a reason.
"""

import contextlib
import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from benchmarks.lib.machines import TwoMachines, why_none
from tests.lib.processes import until
from tests.plugin.launch.test_launch import HANG, ROOT, environment

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(why_none()), reason=why_none() or "there are machines")]

PORT = "29500"


@pytest.fixture
def machines() -> Iterator[TwoMachines]:
    with TwoMachines(megabits=1000) as made:
        yield made


def _train(method: str, out: Path, images: int, every: int = 10**6) -> list[str]:
    """Return ns-train's words: a small city, with densification; a checkpoint every so many steps."""
    return [
        *("-m", "nerfstudio.scripts.train", method, "--machine.device-type", "cpu", "--vis", "tensorboard"),
        *("--output-dir", str(out), "--timestamp", "now", "--max-num-images", str(images), "--recipe", "splatfacto"),
        *("--steps-per-save", str(every), "--steps-per-eval-image", "0", "--steps-per-eval-batch", "0"),
        *("--steps-per-eval-all-images", "1000000", "--pipeline.views-per-step", "4"),
        *("--pipeline.model.num-downscales", "0", "--pipeline.model.warmup-length", "16"),
        *("--pipeline.model.refine-every", "20", "--pipeline.model.densify-grad-thresh", "0.0004"),
        *("city", "--blocks", "1", "--views", "16", "--width", "64", "--height", "48"),
    ]


def _variables() -> dict[str, str]:
    kept = {name: value for name, value in environment().items() if name != "NS_MULTIGPU_OPS"}
    names = {"GLOO_SOCKET_IFNAME": TwoMachines.interface, "TP_SOCKET_IFNAME": TwoMachines.interface}
    return {**kept, **names, "OMP_NUM_THREADS": "1", "COLUMNS": "200"}


def _torchrun(rendezvous: tuple[str, ...], words: list[str]) -> list[str]:
    """Return a machine's part of a job, with one worker on each."""
    launcher = ["-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1", *rendezvous]
    return [sys.executable, "-W", "ignore", *launcher, *words]


def _static(machine: int) -> tuple[str, ...]:
    return "--node-rank", str(machine), "--master-addr", "node0", "--master-port", PORT


def _elastic(machine: int) -> tuple[str, ...]:
    """They meet at node 1. By their addresses, node 0 is the one that has rank 0."""
    place = "--rdzv-backend", "c10d", "--rdzv-endpoint", f"node1:{PORT}", "--rdzv-id", "city"
    return *place, "--local-addr", f"node{machine}", "--max-restarts", "3"


def _ended(processes: list[subprocess.Popen[str]], logs: list[Path]) -> list[str]:
    """Return the output of each process after all have ended with status 0."""
    until(lambda: all(process.poll() is not None for process in processes), 2 * HANG)
    said = [log.read_text(errors="replace") for log in logs]
    assert [process.poll() for process in processes] == [0] * len(processes), "\n".join(one[-3000:] for one in said)
    return said


def _model(run: Path) -> dict[str, torch.Tensor]:
    """Return the tensors that a run ends with: its last checkpoint's, and the shards that it names."""
    from ns_multigpu.plugin.checkpoint.saved_tensors import SavedTensors
    from ns_multigpu.plugin.checkpoint.verify import checkpoints_in, read_checkpoint_file, state_of

    last = checkpoints_in(run / "nerfstudio_models")[-1]
    content = read_checkpoint_file(last)
    found = {name: value for name, value in content["pipeline"].items() if isinstance(value, torch.Tensor)}
    folder = state_of(last, content)
    assert folder is not None
    saved = SavedTensors(folder)
    return {**found, **saved.read(saved.names)}


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """NaN stands in a generator's state, for a number that it has not drawn yet."""
    alike = one.shape == other.shape and one.dtype == other.dtype
    return alike and one.contiguous().numpy().tobytes() == other.contiguous().numpy().tobytes()


def test_two_machines_end_with_the_bits_of_one(machines: TwoMachines, tmp_path: Path) -> None:
    method = "splatfacto-tile"
    logs = [tmp_path / f"machine-{machine}.log" for machine in range(2)]
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context(log.open("w")) for log in logs]
        words = _train(method, tmp_path / "two", 64)
        started = [
            machines.start(n, _torchrun(_static(n), words), _variables(), files[n], folder=ROOT) for n in range(2)
        ]
        said = _ended(started, logs)
    assert "2 machines: machine 0 (node0) has rank 0; machine 1 (node1) has rank 1." in said[0]
    where = "This is machine 1 (node1), with rank 1 of 2. Progress is shown by rank 0 on machine 0"
    assert where in said[1]
    assert "Training finished" in said[0] and "Training finished" not in said[1]
    run = tmp_path / "two" / "unnamed" / method / "now"
    assert [path.parent for path in tmp_path.glob("two/**/config.yml")] == [run]
    assert not list(run.glob(".machines-*"))
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["gaussians"] != rows[0]["gaussians"], "densification ran"
    assert min(machines.sent(0), machines.sent(1)) > 1e6

    local = [sys.executable, "-W", "ignore", *_train(method, tmp_path / "one", 64)]
    place = local.index("--machine.device-type")
    local[place:place] = ["--machine.num-devices", "2"]
    done = subprocess.run(
        local, cwd=ROOT, env={**_variables(), "GLOO_SOCKET_IFNAME": "lo"}, capture_output=True, text=True,
        timeout=2 * HANG, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    one, two = _model(tmp_path / "one" / "unnamed" / method / "now"), _model(run)
    assert one.keys() == two.keys() and len(one) > 6
    assert [name for name in one if not _same_bits(one[name], two[name])] == []


def test_lost_machine_rejoins_and_resumes(machines: TwoMachines, tmp_path: Path) -> None:
    """The one with rank 0: nothing that it knew of the job has outlived it."""
    method = "splatfacto-tile"  # the other takes as long, and the same way back
    logs = [tmp_path / name for name in ("node0.log", "node1.log", "node0-again.log")]
    words = _train(method, tmp_path / "runs", 240, every=5)
    variables = {**_variables(), "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    run = tmp_path / "runs" / "unnamed" / method / "now"
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context(log.open("w")) for log in logs]

        def start(machine: int, file: int) -> subprocess.Popen[str]:
            return machines.start(machine, _torchrun(_elastic(machine), words), variables, files[file], folder=ROOT)

        lost, other = start(0, 0), start(1, 1)
        end = time.monotonic() + HANG
        while not list(run.glob("nerfstudio_models/step-*.ckpt")):
            assert time.monotonic() < end and other.poll() is None, logs[0].read_text() + logs[1].read_text()
            time.sleep(0.05)
        machines.switch_off(0)
        assert lost.wait(10) != 0 and machines.pids(0) == [] and other.poll() is None
        said = _ended([start(0, 2), other], logs[2:0:-1])
    text = " ".join(said[0].replace("\n", "").split())
    resumed = re.search(r"Resuming at step (\d+) from", text)  # a line may end anywhere
    assert resumed and int(resumed.group(1)) >= 5 and int(resumed.group(1)) % 5 == 1, text
    assert "machine 0 (node0) has rank 0; machine 1 (node1) has rank 1" in text and "Training finished" in text
    assert [path.parent for path in tmp_path.glob("runs/**/config.yml")] == [run]
    summary = json.loads((run / "training_summary.json").read_text())
    assert summary["images"] == 240 - 4 * int(resumed.group(1)) and summary["ranks"] == 2
    steps = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert steps[-1] == 59
