"""Kills workers of real training runs at random moments, and compares what they end with to an undisturbed run.

    python -m benchmarks.faults --times 20 --json benchmarks/results/faults.json

Each run is an `ns-train splatfacto-batch` on the procedural city, on the processor. At a random moment between its
first worker's start and the moment when the undisturbed run ended, a random worker gets SIGKILL. The run has to come to
its end by itself, with a model whose every bit is that of the undisturbed one.
"""

import argparse
import json
import os
import platform
import random
import re
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

MOST_SECONDS = 900
"""After which a run counts as hung."""


@dataclass(frozen=True)
class Outcome:
    """What became of a run.

    Attributes:
        worker: number of the worker that was killed; None if none was.
        killed_after: seconds from the first worker's start to its death.
        resumed_from: the step that the restarted run went on with (0: it began anew); None if there was no restart.
        seconds: from the first worker's start to the end.
        status: exit status.
        same: whether the model is the undisturbed run's, bit for bit.
    """

    worker: int | None
    killed_after: float
    resumed_from: int | None
    seconds: float
    status: int
    same: bool = True

    @property
    def good(self) -> bool:
        return self.status == 0 and self.same


def command(output: Path, workers: int, images: int, every: int) -> list[str]:
    """The training run: `images` images, a checkpoint every `every` steps."""
    return [
        *(sys.executable, "-W", "ignore", "-m", "nerfstudio.scripts.train", "splatfacto-batch"),
        *("--output-dir", str(output), "--timestamp", "run", "--vis", "tensorboard"),
        *("--machine.device-type", "cpu", "--machine.num-devices", str(workers)),
        *("--max-num-images", str(images), "--steps-per-save", str(every), "--max-restarts", "1"),
        *("--steps-per-eval-image", "0", "--steps-per-eval-all-images", "1000000"),
        *("--pipeline.model.num-downscales", "0", "--pipeline.model.warmup-length", "50"),
        *("city", "--blocks", "1", "--views", "16", "--width", "64", "--height", "48"),
    ]


def workers_of(pid: int) -> list[int]:
    """The worker processes that a launcher has running, the first one first."""
    found: list[int] = []
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return []
    for child in children:
        try:
            words = Path(f"/proc/{child}/cmdline").read_bytes()
        except OSError:
            continue
        if b"spawn_main" in words:
            found.append(int(child))
    return found


def run(words: list[str], folder: Path, victim: int | None = None, moment: float = 0.0) -> Outcome:
    """Runs a training run and kills worker `victim` `moment` seconds after the first worker's start.

    Raises:
        RuntimeError: it ended before that moment, or hangs.
    """
    folder.mkdir(parents=True)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(words, stdout=log, stderr=subprocess.STDOUT, env=environment, cwd=folder)
    try:
        start = time.monotonic()
        while not workers_of(process.pid) and process.poll() is None:
            time.sleep(0.02)
        start = time.monotonic()
        if victim is not None:
            while time.monotonic() - start < moment and process.poll() is None:
                time.sleep(0.01)
            alive = workers_of(process.pid)
            if len(alive) <= victim:
                raise RuntimeError(f"there was no worker {victim} left to kill after {moment:.1f} s")
            os.kill(alive[victim], signal.SIGKILL)
        status = process.wait(MOST_SECONDS)
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"a run hangs: see {folder / 'log'}") from None
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
    said = (folder / "log").read_text(errors="replace")
    resumed = re.findall(r"Going on with step (\d+)", said)
    anew = "it starts anew" in said
    step = int(resumed[-1]) if resumed else 0 if anew else None
    return Outcome(victim, moment, step, time.monotonic() - start, status)


def final_model(output: Path) -> dict[str, torch.Tensor]:
    """The tensors of a run's last checkpoint."""
    files = sorted(output.glob("*/splatfacto-batch/run/nerfstudio_models/step-*.ckpt"))
    state = torch.load(files[-1], map_location="cpu", weights_only=True)["pipeline"] if files else {}
    return {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}


def identical(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    """Whether two models have the same tensors, bit for bit, and some."""
    return bool(one) and one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def measure(folder: Path, times: int, workers: int, images: int, every: int, seed: int) -> list[Outcome]:
    """The undisturbed run, then `times` disturbed ones."""
    draw = random.Random(seed)
    reference = run(command(folder / "undisturbed", workers, images, every), folder / "undisturbed-log")
    if reference.status:
        raise RuntimeError((folder / "undisturbed-log" / "log").read_text(errors="replace")[-4000:])
    model = final_model(folder / "undisturbed")
    outcomes = [reference]
    report(reference)
    attempt = 0
    while len(outcomes) <= times:
        attempt += 1
        output = folder / f"disturbed-{attempt}"
        victim, moment = draw.randrange(workers), draw.uniform(0, reference.seconds)
        try:
            outcome = run(command(output, workers, images, every), folder / f"log-{attempt}", victim, moment)
        except RuntimeError as error:
            if "left to kill" not in str(error) or attempt > 3 * times:
                raise
            continue  # it was quicker than the undisturbed run: draw another moment
        outcome = Outcome(**{**asdict(outcome), "same": identical(final_model(output), model)})
        outcomes.append(outcome)
        report(outcome)
    return outcomes


def report(outcome: Outcome) -> None:
    """A row of the table."""
    if outcome.worker is None:
        print(f"{'killed':>8} {'after s':>8} {'went on with step':>18} {'ended after s':>14} {'status':>7}  model")
    who = "-" if outcome.worker is None else f"rank {outcome.worker}"
    when = "-" if outcome.worker is None else f"{outcome.killed_after:.1f}"
    step = "-" if outcome.resumed_from is None else outcome.resumed_from
    same = "the reference" if outcome.worker is None else "identical" if outcome.same else "DIFFERENT"
    print(f"{who:>8} {when:>8} {step:>18} {outcome.seconds:>14.1f} {outcome.status:>7}  {same}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--times", type=int, default=20, help="how many runs to disturb")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--images", type=int, default=300, help="images a run trains on")
    parser.add_argument("--every", type=int, default=25, help="steps between checkpoints")
    parser.add_argument("--seed", type=int, default=0, help="of the moments and the victims")
    parser.add_argument("--json", type=Path, help="file for the results")
    options = parser.parse_args()
    with TemporaryDirectory(prefix="faults-") as folder:
        outcomes = measure(
            Path(folder), options.times, options.workers, options.images, options.every, options.seed
        )  # fmt: skip
    good = sum(outcome.good for outcome in outcomes[1:])
    print(f"{good} of {options.times} disturbed runs ended with the undisturbed run's model.")
    if options.json:
        machine = {"processor": platform.processor() or platform.machine(), "cores": os.cpu_count()}
        settings = {name: value for name, value in vars(options).items() if name != "json"}
        table = {"machine": machine, "torch": torch.__version__, "settings": settings,
                 "runs": [asdict(outcome) for outcome in outcomes]}  # fmt: skip
        options.json.write_text(json.dumps(table, indent=2) + "\n", encoding="utf8")
    return 0 if good == options.times else 1


if __name__ == "__main__":
    sys.exit(main())
