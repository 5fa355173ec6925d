"""Kills workers of real training runs at random moments, and compares what they end with to an undisturbed run.

    python -m benchmarks.robustness.faults --times 20 --json benchmarks/results/data/runs/faults.json

Each run is an `ns-train splatfacto-batch` on the procedural city, on the processor. A random worker gets SIGKILL, at a
random moment: in one of five runs before the first step, in the others while it trains, saves or ends. The run has to
come to its end by itself, with a model whose every bit is that of the undisturbed one.
"""

import argparse
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from benchmarks.lib.report import write_report

MOST_SECONDS = 900
"""After which a run counts as hung."""


@dataclass(frozen=True)
class Outcome:
    """Outcome of a run.

    Attributes:
        worker: number of the worker that was killed; None if none was.
        phase: when it was killed: "setup" or "training"; "" if none was.
        killed_after: seconds from the phase's start to its death.
        resumed_from: the step that the restarted run went on with (0: it started over); None if there was no restart.
        setup_seconds: from the first worker's start to the first step; of the first life.
        seconds: from the first worker's start to the end.
        status: exit status.
        same: whether the model is the undisturbed run's, bit for bit.
    """

    worker: int | None
    phase: str
    killed_after: float
    resumed_from: int | None
    setup_seconds: float
    seconds: float
    status: int
    same: bool = True

    @property
    def good(self) -> bool:
        return self.status == 0 and self.same


def command(output: Path, workers: int, images: int, every: int) -> list[str]:
    """Return the command of a run over `images` images, with a checkpoint every `every` steps."""
    return [
        *(sys.executable, "-W", "ignore", "-m", "nerfstudio.scripts.train", "splatfacto-batch"),
        *("--output-dir", str(output), "--timestamp", "run", "--vis", "tensorboard"),
        *("--machine.device-type", "cpu", "--machine.num-devices", str(workers)),
        *("--recipe", "splatfacto"),
        *("--max-num-images", str(images), "--steps-per-save", str(every), "--max-restarts", "1"),
        *("--steps-per-eval-image", "0", "--steps-per-eval-all-images", "1000000"),
        *("--pipeline.model.num-downscales", "0", "--pipeline.model.warmup-length", "50"),
        *("city", "--blocks", "1", "--views", "16", "--width", "64", "--height", "48"),
    ]


def workers_of(pid: int) -> list[int]:
    """Return the running worker processes of a launcher, in rank order.

    They are its own children, or those of its fork server, which is a copy of it.
    """
    found: list[int] = []
    own = _words(pid)
    for child in _children(pid):
        words = _words(child)
        if b"spawn_main" in words:
            found.append(child)
        elif words and (b"forkserver" in words or words == own):
            found += _children(child)
    return found


def _words(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def _children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def run(words: list[str], output: Path, victim: int | None = None, phase: str = "", moment: float = 0.0) -> Outcome:
    """Run training and kill worker `victim` `moment` seconds after the start of `phase`.

    Raises:
        TooLate: it ended before that moment.
        RuntimeError: it hangs.
    """
    log = output.with_suffix(".log")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    with log.open("w") as file:
        process = subprocess.Popen(words, stdout=file, stderr=subprocess.STDOUT, env=environment)

    def wait_for(condition: Callable[[], object]) -> float:
        while not condition() and process.poll() is None:
            time.sleep(0.01)
        return time.monotonic()

    try:
        start = wait_for(lambda: workers_of(process.pid))
        first = start
        if phase != "setup":
            first = wait_for(lambda: list(output.glob("*/*/run/metrics.jsonl")))
        if victim is not None:
            begin = start if phase == "setup" else first
            wait_for(lambda: time.monotonic() >= begin + moment)
            alive = workers_of(process.pid)
            if len(alive) <= victim:
                raise TooLate
            os.kill(alive[victim], signal.SIGKILL)
        status = process.wait(MOST_SECONDS)
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"a run hangs:\n{log.read_text(errors='replace')[-4000:]}") from None
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait(60)
    said = " ".join(log.read_text(errors="replace").split())  # whatever the width of the terminal was
    resumed = re.findall(r"Resuming at step ([\d,]+)", said)
    step = int(resumed[-1].replace(",", "")) if resumed else 0 if "it starts from image 0" in said else None
    return Outcome(victim, phase, moment, step, first - start, time.monotonic() - start, status)


class TooLate(Exception):
    """The run had ended before its worker was to be killed."""


def final_model(output: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a run's last checkpoint."""
    files = sorted(output.glob("*/splatfacto-batch/run/nerfstudio_models/step-*.ckpt"))
    state = torch.load(files[-1], map_location="cpu", weights_only=True)["pipeline"] if files else {}
    return {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}


def identical(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    """Return whether two models have the same tensors, bit for bit, and at least one."""
    return bool(one) and one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def measure(folder: Path, times: int, workers: int, images: int, every: int, seed: int) -> list[Outcome]:
    """Run once undisturbed, then `times` times with a killed worker."""
    draw = random.Random(seed)
    folder.mkdir(parents=True, exist_ok=True)
    reference = run(command(folder / "undisturbed", workers, images, every), folder / "undisturbed")
    if reference.status:
        raise RuntimeError((folder / "undisturbed.log").read_text(errors="replace")[-4000:])
    model = final_model(folder / "undisturbed")
    outcomes = [reference]
    report(reference)
    spans = {"setup": reference.setup_seconds, "training": reference.seconds - reference.setup_seconds}
    attempt = 0
    while len(outcomes) <= times:
        attempt += 1
        output = folder / f"disturbed-{attempt}"
        victim, phase = draw.randrange(workers), draw.choices(("setup", "training"), (1, 4))[0]
        moment = draw.uniform(0, spans[phase])
        try:
            outcome = run(command(output, workers, images, every), output, victim, phase, moment)
        except TooLate:  # it was quicker than the undisturbed run: draw another moment
            if attempt > 3 * times + 3:
                raise
            continue
        outcome = replace(outcome, same=identical(final_model(output), model))
        outcomes.append(outcome)
        report(outcome)
        if not outcome.good:
            print(output.with_suffix(".log").read_text(errors="replace")[-4000:], file=sys.stderr)
    return outcomes


def report(outcome: Outcome) -> None:
    """Print a row of the table, and its head before the first."""
    if outcome.worker is None:
        print(f"{'killed':>8} {'in':>9} {'after s':>8} {'went on with':>13} {'ended after s':>14} {'status':>7}  model")
    who = "nobody" if outcome.worker is None else f"rank {outcome.worker}"
    when = "" if outcome.worker is None else f"{outcome.killed_after:.1f}"
    step = "" if outcome.resumed_from is None else f"step {outcome.resumed_from}"
    same = "the reference" if outcome.worker is None else "identical" if outcome.same else "DIFFERENT"
    print(
        f"{who:>8} {outcome.phase:>9} {when:>8} {step:>13} {outcome.seconds:>14.1f} {outcome.status:>7}  {same}",
        flush=True,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--times", type=int, default=20, help="how many runs to disturb")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--images", type=int, default=400, help="images a run trains on")
    parser.add_argument("--every", type=int, default=20, help="steps between checkpoints")
    parser.add_argument("--seed", type=int, default=0, help="of the moments and the victims")
    parser.add_argument("--json", type=Path, help="file for the results")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that the run under way ends too
    with TemporaryDirectory(prefix="faults-") as folder:
        outcomes = measure(Path(folder), options.times, options.workers, options.images, options.every, options.seed)
    good = sum(outcome.good for outcome in outcomes[1:])
    print(f"{good} of {options.times} disturbed runs ended with the undisturbed run's model.")
    settings = {name: value for name, value in vars(options).items() if name != "json"}
    write_report(options.json, settings=settings, runs=[asdict(outcome) for outcome in outcomes])
    return 0 if good == options.times else 1


if __name__ == "__main__":
    sys.exit(main())
