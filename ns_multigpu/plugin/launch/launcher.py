"""Worker processes of a training run: their start, their restart from the last checkpoint after a failure, and their
work.

Workers and the process that started them inform each other by files in a folder: `interrupted`, the signal's number, if
one has ended the run; `failure-R.json` of each worker R that has failed.
"""

import json
import os
import random
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from rich.console import Console

from ns_multigpu.plugin.faults.errors import EXIT_DELAY_S, PLAIN, InputError, PlainError, WorkerFailed, end_soon
from ns_multigpu.plugin.faults.signals import (
    Interrupted,
    NonFiniteError,
    RanOutOfMemory,
    StopSignals,
    set_error_hook,
    signal_name,
)
from ns_multigpu.plugin.launch.commands import OWN_LAUNCHER
from ns_multigpu.plugin.launch.processes import RankFailed, RankProcesses, cores, how_ended, preload
from ns_multigpu.plugin.launch.ranks import Ranks
from ns_multigpu.plugin.launch.run_parts import RunParts, go_on_with, run_parts

_GRACE = 2.0
"""Seconds that workers which outlive another one have to end by themselves, and as many after SIGTERM: they may wait
for the dead one where no signal handler of Python runs."""

_HOPELESS = (
    PlainError, NonFiniteError, RanOutOfMemory, SystemExit,
    ArithmeticError, AssertionError, AttributeError, LookupError, NotImplementedError, TypeError, ValueError,
)  # fmt: skip
"""Errors that another attempt would meet again: those of the input, the options or the program."""


class Trainer(Protocol):
    """Work of one worker."""

    def setup(self) -> None: ...

    def train(self) -> None: ...


class Config(Protocol):
    """Training configuration that can be pickled and makes the trainer of its process."""

    machine: Any

    def setup(self, *, local_rank: int, world_size: int) -> Trainer: ...


class WorkerLauncher:
    """Replacement of the trainer in the process that the user started: `train` runs `workers` trainers in other
    processes.

    Args:
        config: the run's. workers: how many.
        abandon: called if the run is refused or stopped; it must remove the run's files if nothing has been trained.
    """

    def __init__(self, config: Config, workers: int, abandon: Callable[[], None] = lambda: None) -> None:
        self.config = config
        self.workers = workers
        self._abandon = abandon

    def setup(self) -> None:
        """Do nothing: each worker sets its own trainer up."""

    def train(self) -> None:
        """Run the workers to their end.

        Raises:
            InputError, SaveFailed: an option or the capture is invalid, or a worker could not save the model.
            WorkerFailed: a worker ended with another error; the others have been ended too.
            SystemExit: this process received Ctrl-C or SIGTERM; no worker is left.
        """
        try:
            run_workers(self.config, self.workers)
        except (InputError, SystemExit):
            self._abandon()
            raise


def use_own_share_of_cores(ranks: Ranks | None) -> None:
    """Give torch this process's share of the machine's cores; otherwise several workers would oversubscribe them.

    A thread count that the user set in OMP_NUM_THREADS is kept. (torchrun's default of 1 is ignored.)
    """
    if ranks is None or ranks.local_size == 1:
        return
    wish = os.environ.get("OMP_NUM_THREADS", "")
    threads = int(wish) if wish.isdigit() and int(wish) > 1 else max(1, cores() // ranks.local_size)
    torch.set_num_threads(threads)


def run_workers(config: Config, workers: int) -> None:
    """Run `worker_main(config)` in `workers` processes of this machine; see `WorkerLauncher.train`.

    When a worker dies, all are started again, `config.max_restarts` times at most, and not for what would happen again:
    an error of `_HOPELESS` that no OSError has caused, or the same exception twice in a row.
    """
    restarts = int(getattr(config, "max_restarts", 0))
    job = _Job(config, workers)
    last = ""
    with StopSignals(on_first=job.forward, on_second=job.kill) as signals:
        for attempt in range(restarts + 1):
            failure, hopeless = job.attempt(attempt)
            if job.interrupted is not None:
                raise SystemExit(128 + job.interrupted)
            if failure is None:
                return
            if signals.requested:
                job.say(f"Stopped by {signal_name(signals.requested)}: all {workers} workers have been ended.")
                raise SystemExit(128 + signals.requested)
            error = str(failure).partition("\n")[2]  # the exception, whichever worker had it first; "" for a kill
            if hopeless or attempt == restarts or (error and error == last):
                raise failure
            last = error
            if isinstance(failure, WorkerFailed) and failure.report:
                job.say(failure.report.rstrip())
            job.say(f"{failure}\nRestart {attempt + 1} of {restarts}, from the last checkpoint if there is one.")


class _Job:
    """The workers of one run, whichever attempt they belong to.

    Attributes:
        interrupted: the signal that ended the run after a step, as its workers say; None if none did.
    """

    def __init__(self, config: Config, workers: int) -> None:
        self.config, self.workers = config, workers
        self.interrupted: int | None = None
        self._asked = 0
        self._ranks: RankProcesses | None = None
        self._console = Console(stderr=True)

    def say(self, text: str) -> None:
        """Print a line for the user."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def attempt(self, number: int) -> tuple[PlainError | WorkerFailed | None, bool]:
        """Run the workers once.

        Returns:
            The first failure, None without one; and whether another attempt would meet it again.
        """
        threads = int(os.environ.get("OMP_NUM_THREADS") or max(1, cores() // self.workers))
        kind = "CPU" if self.config.machine.device_type == "cpu" else "GPU"
        self.say(f"Starting {self.workers} {kind} workers ({threads} thread{'' if threads == 1 else 's'} each).")
        preload([type(self.config).__module__])
        variables = {OWN_LAUNCHER: "1", "TORCHELASTIC_RESTART_COUNT": str(number)}
        with tempfile.TemporaryDirectory(prefix="ns_multigpu-", ignore_cleanup_errors=True) as folder:
            ranks = RankProcesses(worker_main, (self.config, folder, run_parts()), self.workers, variables=variables)
            try:
                self._ranks = ranks
                if self._asked:  # while they were started
                    ranks.send(self._asked)
                ranks.wait(grace=_GRACE)
            except RankFailed as error:
                return first_failure(Path(folder), error)
            finally:
                self._ranks = None
                ranks.end()
                stopped = Path(folder) / "interrupted"
                self.interrupted = int(stopped.read_text()) if stopped.exists() else None
        return None, False

    def forward(self, signum: int) -> None:
        """Forward a stop request to the workers, including those that start later."""
        self._asked = signum
        if self._ranks is not None:
            self._ranks.send(signum)

    def kill(self, signum: int) -> None:
        """End all workers at once."""
        if self._ranks is None:
            raise SystemExit(128 + signum)
        self._ranks.send(signal.SIGKILL)


@dataclass(frozen=True)
class Failure:
    """End of a worker, kept in a file for the process that started it.

    Attributes:
        rank: the worker's rank.
        time_ns: time of the failure, which distinguishes the first from those that it caused.
        plain: its class's name in `errors.PLAIN`, "" if it is none of them.
        hopeless: True if another attempt would fail alike.
        message: one or more lines for the user.
        report: the traceback.
    """

    rank: int
    time_ns: int
    plain: str
    hopeless: bool
    message: str
    report: str


def worker_main(config: Config, folder: str, parts: RunParts | None = None) -> None:
    """Set up and run the trainer that `config` makes, in a worker's process.

    Every worker starts from the same seed: what differs between ranks is drawn from generators keyed by step and view,
    never by rank.

    Args:
        config: the run's configuration.
        folder: of the files above.
        parts: what the run has spent its time on so far.
    """
    ranks = Ranks.from_env()
    if ranks is None:
        raise RuntimeError("worker_main runs in the processes that run_workers starts, and this is none")
    if parts is not None:
        go_on_with(parts)
    run_parts().done("start of the workers")
    place = Path(folder)
    set_error_hook(lambda error: _write_record(error, ranks.rank, place))
    try:
        random.seed(config.machine.seed)
        np.random.seed(config.machine.seed)  # noqa: NPY002 - nerfstudio draws from numpy's global generator
        torch.manual_seed(config.machine.seed)
        torch.backends.cudnn.benchmark = True  # as nerfstudio.scripts.train, which a worker does not import
        trainer = config.setup(local_rank=ranks.local_rank, world_size=ranks.size)
        trainer.setup()
        trainer.train()
        _finish()
    except Interrupted as error:
        if ranks.rank == 0:
            (place / "interrupted").write_text(str(error.signum))
        _finish()
    except (Exception, SystemExit) as error:
        if isinstance(error, SystemExit) and not error.code:
            return
        _write_record(error, ranks.rank, place)
        end_soon()
        raise


def _finish() -> None:
    """End a worker that has done its work: it ignores signals from here on."""
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    run_parts().write_exit()
    if dist.is_initialized():
        dist.destroy_process_group()


def _write_record(error: BaseException, rank: int, folder: Path) -> None:
    plain = next((name for name, kind in PLAIN.items() if isinstance(error, kind)), "")
    message = str(error) if plain else f"{type(error).__name__}: {error}"
    report = "".join(traceback.format_exception(error))
    hopeless = isinstance(error, _HOPELESS) and not isinstance(error.__cause__, OSError)
    record = Failure(rank, time.time_ns(), plain, hopeless, message, report)
    # Write atomically: this process may be killed during the write, and its parent reads the file.
    begun = folder / f"begun-{rank}.json"
    begun.write_text(json.dumps(asdict(record)), "utf8")
    begun.replace(folder / f"failure-{rank}.json")
    if not plain:
        time.sleep(EXIT_DELAY_S)


def first_failure(folder: Path, error: RankFailed) -> tuple[PlainError | WorkerFailed, bool]:
    """Return the failure that the others followed from, as an exception to raise here; and whether it would recur."""
    records = [Failure(**json.loads(path.read_text("utf8"))) for path in folder.glob("failure-*.json")]
    if error.rank not in {record.rank for record in records}:
        hint = " The machine may have run out of memory (`dmesg` says so)." if error.code == -signal.SIGKILL else ""
        summary = f"Worker {error.rank} {how_ended(error.code)}; all workers have been ended.{hint}"
        return WorkerFailed(summary, error.report), False
    first = min(records, key=lambda record: record.time_ns)
    if first.plain:
        return PLAIN[first.plain](first.message), True
    summary = f"Worker {first.rank} failed, its traceback is above; all workers have been ended.\n{first.message}"
    return WorkerFailed(summary, first.report), first.hopeless
