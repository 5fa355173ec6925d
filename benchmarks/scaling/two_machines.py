"""What a training run sends between two machines, counted on the link itself, and how long its steps take there.

    sudo python -m benchmarks.scaling.two_machines tile batch --megabits 100 1000 [--json FILE]

The machines are network namespaces of this host with a link of a given rate between them (see benchmarks.lib.machines):
that takes Linux and root. Each run is `ns-train splatfacto-STRATEGY` under torchrun on both, on the procedural city and
on the processor. Beside the bytes that the interfaces have sent stands what the run says of its traffic: payload, to
ranks of the same machine too. Both are counted from the first row of metrics.jsonl to the last, over the same steps:
neither the start nor the end of a run is in them. The machines share this host's cores: times tell what the link
adds, and not what machines of their own would take.
"""

import argparse
import contextlib
import itertools
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Console
from rich.table import Table

from benchmarks.lib.environment import describe
from benchmarks.lib.machines import TwoMachines, why_none

MOST_SECONDS = 1800
"""After which a run counts as hung."""
_PORT = "29500"


@dataclass(frozen=True)
class Task:
    """A run: `workers` on each machine, `steps` steps of `views` views, a row of metrics every `every` steps."""

    strategy: str
    megabits: float
    workers: int
    steps: int
    views: int
    width: int
    height: int
    blocks: int
    capture: int
    every: int
    fused: str


@dataclass(frozen=True)
class Counted:
    """What a run did between its first row of metrics and its last.

    Attributes:
        steps: how many it took.
        step_ms: time of each.
        sent: bytes that each machine has put on the link in a step, headers included.
        told: bytes that a worker says it has sent in a step, mean over the ranks' rows (rank 0's).
        whole: bytes that both machines have sent from the start of the run to its end.
        gaussians: at the end.
    """

    steps: int
    step_ms: float
    sent: tuple[float, float]
    told: float
    whole: int
    gaussians: int

    def busy(self, megabits: float) -> float:
        """The part of a step's time in which the busier direction of the link must have been sending."""
        return max(self.sent) * 8 / (megabits * 1e6) / (self.step_ms / 1e3)


def command(task: Task, machine: int, output: Path) -> list[str]:
    """What a user types on that machine."""
    return [
        *(sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--nnodes", "2", "--node-rank", str(machine)),
        *("--nproc-per-node", str(task.workers), "--master-addr", TwoMachines.names[0], "--master-port", _PORT),
        *("-m", "nerfstudio.scripts.train", f"splatfacto-{task.strategy}", "--machine.device-type", "cpu"),
        *("--output-dir", str(output), "--timestamp", "run", "--vis", "tensorboard", "--steps-per-eval-batch", "0"),
        *("--max-num-images", str(task.steps * task.views), "--pipeline.views-per-step", str(task.views)),
        *("--logging.steps-per-log", str(task.every), "--steps-per-save", "1000000", "--fused-steps", task.fused),
        *("--steps-per-eval-image", "0", "--steps-per-eval-all-images", "1000000", "--steps-per-checksum", "0"),
        *("--pipeline.model.num-downscales", "0"),
        *("city", "--blocks", str(task.blocks), "--views", str(task.capture)),
        *("--width", str(task.width), "--height", str(task.height)),
    ]


def measure(task: Task, folder: Path) -> Counted:
    """Makes the machines, trains, and removes them.

    Raises:
        RuntimeError: there can be no machines, or the run failed or hangs; it says what it printed.
    """
    output = folder / f"{task.strategy}-{task.megabits:g}"
    output.mkdir()
    logs = [output / f"machine-{machine}.log" for machine in range(2)]
    threads = max(1, len(os.sched_getaffinity(0)) // (2 * task.workers))
    names = {"GLOO_SOCKET_IFNAME": TwoMachines.interface, "OMP_NUM_THREADS": str(threads), "COLUMNS": "200"}
    seen: list[tuple[float, int, int]] = []  # time, and bytes sent by each machine, when a row of metrics came
    with TwoMachines(task.megabits) as machines, contextlib.ExitStack() as stack:
        files = [stack.enter_context(log.open("w")) for log in logs]
        runs = [machines.start(n, command(task, n, output), names, files[n]) for n in range(2)]
        end, rows = time.monotonic() + MOST_SECONDS, list[dict[str, float]]()
        while any(run.poll() is None for run in runs):
            if time.monotonic() > end or any(run.poll() for run in runs):
                break
            if len(found := _rows(output)) > len(rows):
                rows = found
                seen.extend([(time.monotonic(), machines.sent(0), machines.sent(1))] * (len(rows) - len(seen)))
            time.sleep(0.01)
        whole = machines.sent(0) + machines.sent(1)
        if any(run.poll() != 0 for run in runs):
            why = "hangs" if time.monotonic() > end else "failed"
            raise RuntimeError(f"the run {why}:\n" + "\n".join(log.read_text(errors="replace")[-3000:] for log in logs))
    rows = _rows(output)[: len(seen)]
    if len(seen) < 2:
        raise RuntimeError(f"{len(seen)} rows of metrics: give more --steps, or a smaller --every")
    (then, *before), (now, *after) = seen[0], seen[-1]
    steps = int(rows[-1]["step"] - rows[0]["step"])
    sent = tuple((last - first) / steps for first, last in zip(before, after, strict=True))
    lengths = [one["step"] - other["step"] for other, one in itertools.pairwise(rows)]
    told = sum(row["bytes_per_step"] * length for row, length in zip(rows[1:], lengths, strict=True)) / steps
    return Counted(
        steps, 1e3 * (now - then) / steps, (sent[0], sent[1]), told, whole, int(rows[-1]["gaussians"])
    )  # fmt: skip


def _rows(output: Path) -> list[dict[str, float]]:
    """The rows of metrics that have been written in full."""
    for file in output.glob("*/*/run/metrics.jsonl"):
        lines = file.read_text().split("\n")[:-1]
        return [json.loads(line) for line in lines]
    return []


def table(done: Sequence[tuple[Task, Counted]]) -> Table:
    """What was counted, a row a run."""
    shown = Table("strategy", "link", "step", "node0 sends", "node1 sends", "link busy", "a worker says", "Gaussians")
    for task, one in done:
        sent = (f"{count / 1e6:.2f} MB" for count in one.sent)
        shown.add_row(
            task.strategy, f"{task.megabits:g} Mbit/s", f"{one.step_ms:,.0f} ms", *sent,
            f"{100 * one.busy(task.megabits):.0f} %", f"{one.told / 1e6:.2f} MB", f"{one.gaussians:,}",
        )  # fmt: skip
    return shown


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("strategies", nargs="+", help="whose runs to count: batch, tile, ...")
    parser.add_argument(
        "--megabits", type=float, nargs="+", default=[100.0, 1000.0], help="rates of the link, each way"
    )
    parser.add_argument("--workers", type=int, default=2, help="on each machine")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--views", type=int, default=4, help="of a step, over all workers")
    parser.add_argument("--capture", type=int, default=48, help="views of the capture")
    parser.add_argument("--blocks", type=int, default=2, help="of the city")
    parser.add_argument("--width", type=int, default=320)
    parser.add_argument("--height", type=int, default=192)
    parser.add_argument("--every", type=int, default=10, help="steps between rows of metrics")
    parser.add_argument("--fused-steps", choices=("never", "always"), default="never", help="as ns-train's")
    parser.add_argument("--json", type=Path, help="file for the results")
    options = parser.parse_args()
    if reason := why_none():
        parser.error(reason)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that the machines are removed
    console, done = Console(width=None if sys.stdout.isatty() else 120), list[tuple[Task, Counted]]()
    with TemporaryDirectory(prefix="two-machines-") as folder:
        for strategy in options.strategies:
            for megabits in options.megabits:
                task = Task(
                    strategy, megabits, options.workers, options.steps, options.views, options.width, options.height,
                    options.blocks, options.capture, options.every, options.fused_steps,
                )  # fmt: skip
                done.append((task, measure(task, Path(folder))))
                console.print(table(done[-1:]))
    console.print(table(done))
    if options.json:
        runs = [{**asdict(task), **asdict(counted)} for task, counted in done]
        options.json.write_text(json.dumps({**describe(), "runs": runs}, indent=2) + "\n", encoding="utf8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
