"""Measure the traffic of a training run between two machines on the link itself, and its step times.

    sudo python -m benchmarks.scaling.two_machines tile batch --megabits 100 1000 [--json FILE]

The machines are network namespaces of this host with a link of a given rate between them (see benchmarks.lib.machines):
that takes Linux and root. Each run is `ns-train splatfacto-STRATEGY` under torchrun on both, on the procedural city and
on the processor. The bytes sent by the interfaces are compared with the run's prediction: the payload of its exchanges
between machines, from the numbers of rows and sizes of a row (`bytes_between_machines`). Both are counted
from the first row of metrics.jsonl to the last, over the same steps: neither the start nor the end of a run is in them.

An interface counts headers, too: 66 bytes a packet (Ethernet 14, IPv4 20, TCP 20, its timestamps 12). It hands large
packets over in one piece and counts their header once, so headers are 66 times its number of packets, of which many
are acknowledgements without payload. The remainder over the predicted bytes are the control messages of each step.
The machines share this host's cores: times show the cost of the link, not the times of separate machines.
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

from benchmarks.baselines.left_out import PARTS
from benchmarks.lib.machines import TwoMachines, why_none
from benchmarks.lib.report import write_report

MOST_SECONDS = 1800
"""After which a run counts as hung."""
NOTHING = "nothing"
_LEFT_OUT = "benchmarks.baselines.left_out"
_PORT = "29500"
HEADERS = 66
"""Bytes of a packet that are not payload."""


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
    wire: str = "full"
    relays: bool = True
    points: int | None = None
    kind: str = "aerial"
    left_out: str = NOTHING

    @property
    def title(self) -> str:
        """Title of the case in tables."""
        said = (
            (self.wire, self.wire != "full"),
            ("no relays", not self.relays),
            (f"without {self.left_out}", self.left_out != NOTHING),
        )
        rest = [name for name, there in said if there]
        return ", ".join([self.strategy, *(["fused"] if self.fused == "always" else []), *rest])


@dataclass(frozen=True)
class Counted:
    """Measurements of a run between its first and last row of metrics.

    Attributes:
        steps: how many it took.
        step_ms: time of each.
        sent: bytes that each machine has put on the link in a step, headers included.
        payload: those of both without headers.
        predicted: bytes of a step's exchanges between machines by the run's prediction, both directions together.
        reported: bytes that a worker reports as sent in a step, mean over the ranks' rows (rank 0's).
        whole: bytes that both machines have sent from the start of the run to its end.
        gaussians: at the end.
    """

    steps: int
    step_ms: float
    sent: tuple[float, float]
    payload: float
    predicted: float
    reported: float
    whole: int
    gaussians: int

    def busy(self, megabits: float) -> float:
        """Return the fraction of a step in which the busier direction of the link must have been sending."""
        return max(self.sent) * 8 / (megabits * 1e6) / (self.step_ms / 1e3)


def command(task: Task, machine: int, output: Path) -> list[str]:
    """Return the command line on that machine."""
    return [
        *(sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--nnodes", "2", "--node-rank", str(machine)),
        *("--nproc-per-node", str(task.workers), "--master-addr", TwoMachines.names[0], "--master-port", _PORT),
        *(("-m", "nerfstudio.scripts.train") if task.left_out == NOTHING else ("-m", _LEFT_OUT, task.left_out)),
        *(f"splatfacto-{task.strategy}", "--machine.device-type", "cpu"),
        *("--output-dir", str(output), "--timestamp", "run", "--vis", "tensorboard", "--steps-per-eval-batch", "0"),
        *("--max-num-images", str(task.steps * task.views), "--pipeline.views-per-step", str(task.views)),
        *("--logging.steps-per-log", str(task.every), "--steps-per-save", "1000000", "--fused-steps", task.fused),
        *("--steps-per-eval-image", "0", "--steps-per-eval-all-images", "1000000", "--steps-per-checksum", "0"),
        *("--recipe", "splatfacto", "--pipeline.model.num-downscales", "0"),
        *(("--pipeline.wire", task.wire) if task.wire != "full" else ()),
        *(("--pipeline.locality.relays", "False") if not task.relays else ()),
        *("city", "--blocks", str(task.blocks), "--views", str(task.capture), "--capture", task.kind),
        *(("--points", str(task.points)) if task.points else ()),
        *("--width", str(task.width), "--height", str(task.height)),
    ]


def measure(task: Task, folder: Path) -> Counted:
    """Create the machines, train, and remove them.

    Raises:
        RuntimeError: there can be no machines, or the run failed or hangs; it says what it printed.
    """
    output = folder / f"{task.title.replace(', ', '-').replace(' ', '-')}-{task.megabits:g}"
    output.mkdir()
    logs = [output / f"machine-{machine}.log" for machine in range(2)]
    threads = max(1, len(os.sched_getaffinity(0)) // (2 * task.workers))
    names = {"GLOO_SOCKET_IFNAME": TwoMachines.interface, "OMP_NUM_THREADS": str(threads), "COLUMNS": "200"}
    seen: list[tuple[float, int, int, int]] = []  # time, bytes sent by each machine, and packets, at a row of metrics
    with TwoMachines(task.megabits) as machines, contextlib.ExitStack() as stack:
        files = [stack.enter_context(log.open("w")) for log in logs]
        runs = [machines.start(n, command(task, n, output), names, files[n]) for n in range(2)]
        end, rows = time.monotonic() + MOST_SECONDS, list[dict[str, float]]()
        while any(run.poll() is None for run in runs):
            if time.monotonic() > end or any(run.poll() for run in runs):
                break
            if len(found := _rows(output)) > len(rows):
                rows = found
                (one, of_one), (other, of_other) = machines.counted(0), machines.counted(1)
                seen.extend([(time.monotonic(), one, other, of_one + of_other)] * (len(rows) - len(seen)))
            time.sleep(0.01)
        whole = machines.sent(0) + machines.sent(1)
        if any(run.poll() != 0 for run in runs):
            why = "hangs" if time.monotonic() > end else "failed"
            raise RuntimeError(f"the run {why}:\n" + "\n".join(log.read_text(errors="replace")[-3000:] for log in logs))
    # A row of fused steps is written while the next ones run: on processors, when these have been sent. The last waits
    # for none.
    rows = _rows(output)[: len(seen)][1 if task.fused == "always" else 0 :]
    if len(rows) < 2:
        raise RuntimeError(f"{len(rows)} rows of metrics: give more --steps, or a smaller --every")
    (then, *before, packets_then), (now, *after, packets_now) = seen[0], seen[-1]
    steps = int(rows[-1]["step"] - rows[0]["step"])
    sent = tuple((last - first) / steps for first, last in zip(before, after, strict=True))
    lengths = [one["step"] - other["step"] for other, one in itertools.pairwise(rows)]
    reported, predicted = (
        sum(row[name] * length for row, length in zip(rows[1:], lengths, strict=True)) / steps
        for name in ("bytes_per_step", "bytes_between_machines")
    )
    payload = sum(sent) - HEADERS * (packets_now - packets_then) / steps
    return Counted(
        steps, 1e3 * (now - then) / steps, (sent[0], sent[1]), payload, predicted, reported, whole,
        int(rows[-1]["gaussians"]),
    )  # fmt: skip


def _rows(output: Path) -> list[dict[str, float]]:
    """Return the rows of metrics that have been written in full."""
    for file in output.glob("*/*/run/metrics.jsonl"):
        lines = file.read_text().split("\n")[:-1]
        return [json.loads(line) for line in lines]
    return []


def table(done: Sequence[tuple[Task, Counted]]) -> Table:
    """Return the measurements as a table, one row per run."""
    columns = ("strategy", "link", "step", "images/s", "node0 sends", "node1 sends", "payload", "predicted")
    shown = Table(*columns, "off", "link busy", "Gaussians")
    for task, one in done:
        sent = (f"{count / 1e6:.2f} MB" for count in one.sent)
        shown.add_row(
            task.title, f"{task.megabits:g} Mbit/s", f"{one.step_ms:,.0f} ms",
            f"{1e3 * task.views / one.step_ms:.2f}", *sent,
            f"{one.payload / 1e6:.3f} MB", f"{one.predicted / 1e6:.3f} MB",
            f"{100 * (one.payload / one.predicted - 1):+.1f} %", f"{100 * one.busy(task.megabits):.0f} %",
            f"{one.gaussians:,}",
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
    parser.add_argument("--wire", choices=("full", "half"), nargs="+", default=["full"], help="of tile and locality")
    parser.add_argument("--relays", choices=("yes", "no"), nargs="+", default=["yes"], help="of locality")
    parser.add_argument("--left-out", choices=(NOTHING, *PARTS), nargs="+", default=[NOTHING], help="of locality")
    parser.add_argument("--points", type=int, help="seed points of the city; by default as many as suit it")
    parser.add_argument("--kind", choices=("aerial", "street"), default="aerial", help="of capture")
    parser.add_argument("--json", type=Path, help="file for the results")
    options = parser.parse_args()
    if "locality" not in options.strategies and options.left_out != [NOTHING]:
        parser.error("--left-out: only locality has these parts. Add locality to the strategies.")
    if reason := why_none():
        parser.error(reason)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that the machines are removed
    console, done = Console(width=None if sys.stdout.isatty() else 120), list[tuple[Task, Counted]]()
    with TemporaryDirectory(prefix="two-machines-") as folder:
        given = (options.strategies, options.megabits, options.wire, options.relays, options.left_out)
        for strategy, megabits, wire, relays, part in itertools.product(*given):
            if strategy not in ("tile", "locality") and wire == "half":
                continue
            if strategy != "locality" and (relays == "no" or part != NOTHING):
                continue
            task = Task(
                strategy, megabits, options.workers, options.steps, options.views, options.width, options.height,
                options.blocks, options.capture, options.every, options.fused_steps, wire, relays == "yes",
                options.points, options.kind, part,
            )  # fmt: skip
            done.append((task, measure(task, Path(folder))))
            console.print(table(done[-1:]))
    console.print(table(done))
    write_report(options.json, runs=[{**asdict(task), **asdict(counted)} for task, counted in done])
    return 0


if __name__ == "__main__":
    sys.exit(main())
