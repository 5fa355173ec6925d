"""What one worker process does, and the files by which it and the process that started it inform each other.

In their folder: `pid-R` of each worker R that has begun; `stop` once all are asked to stop; `done-R` of each that has
done its work; `interrupted`, the signal's number, if one has ended the run; `failure-R.json` of each that has failed.
"""

import contextlib
import json
import os
import random
import signal
import time
import traceback
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from ns_multigpu.plugin.faults.errors import LAST_WORDS, PLAIN, PlainError, WorkerFailed, end_soon
from ns_multigpu.plugin.faults.signals import Interrupted, NonFiniteError, RanOutOfMemory, set_last_words
from ns_multigpu.plugin.launch.ranks import Ranks
from ns_multigpu.plugin.launch.run_parts import RunParts, go_on_with, run_parts
from ns_multigpu.plugin.launch.worker_server import die_with, serving

_HOPELESS = (PlainError, NonFiniteError, RanOutOfMemory, SystemExit)
"""What another attempt would meet again."""


class Trainer(Protocol):
    """What a worker runs."""

    def setup(self) -> None: ...

    def train(self) -> None: ...


class Config(Protocol):
    """A training configuration: it can be pickled, and makes the trainer of the process it is in."""

    machine: Any

    def setup(self, *, local_rank: int, world_size: int) -> Trainer: ...


@dataclass(frozen=True)
class Failure:
    """How a worker ended: kept in a file, for whoever started it.

    Attributes:
        rank: whose.
        time_ns: when, to tell the first failure from those that followed it.
        plain: the name of its kind in `errors.PLAIN`, "" if it is none of them.
        hopeless: whether another attempt would meet it again.
        message: one or more lines for the user.
        report: the traceback.
    """

    rank: int
    time_ns: int
    plain: str
    hopeless: bool
    message: str
    report: str


def worker_main(
    config: Config,
    folder: str,
    attempt: int = 0,
    parts: RunParts | None = None,
    variables: Mapping[str, str] | None = None,
) -> None:
    """What one worker does: sets up and runs the trainer that `config` makes.

    Every worker starts from the same seed: what differs between ranks is drawn from generators keyed by step and view,
    never by rank.

    Args:
        config: the run's configuration.
        folder: of the files above.
        attempt: how often the workers have been started before.
        parts: what the run has spent its time on so far.
        variables: of the environment that was meant for it: a server that forks workers has its own.
    """
    # Until there is something to save, Ctrl-C ends a worker at once; the trainer listens for it later.
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    die_with(os.getppid())
    os.environ["TORCHELASTIC_RESTART_COUNT"] = str(attempt)
    ranks = Ranks.from_env()
    if ranks is None:
        raise RuntimeError("worker_main runs in the processes that run_workers starts, and this is none")
    os.environ.update(variables or {})
    if parts is not None:
        go_on_with(parts)
    run_parts().done("start of the workers")
    place = Path(folder)
    (place / f"pid-{ranks.rank}").write_text(str(os.getpid()))
    set_last_words(lambda error: _leave_record(error, ranks.rank, place))
    try:
        if (place / "stop").exists():
            raise SystemExit(128 + signal.SIGTERM)
        random.seed(config.machine.seed)
        np.random.seed(config.machine.seed)  # noqa: NPY002 - nerfstudio draws from numpy's global generator
        torch.manual_seed(config.machine.seed)
        torch.backends.cudnn.benchmark = True  # as nerfstudio.scripts.train, which a worker does not import
        trainer = config.setup(local_rank=ranks.local_rank, world_size=ranks.size)
        trainer.setup()
        trainer.train()
        _finish(ranks.rank, place)
    except Interrupted as error:
        if ranks.rank == 0:
            (place / "interrupted").write_text(str(error.signum))
        _finish(ranks.rank, place)
    except (Exception, SystemExit) as error:
        if isinstance(error, SystemExit) and not error.code:
            return
        _leave_record(error, ranks.rank, place)
        end_soon(1)
        raise


def _finish(rank: int, folder: Path) -> None:
    """This worker has done its work, and has nothing more to do with signals; it ends when all have finished."""
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    run_parts().write_exit()
    (folder / f"done-{rank}").touch()
    if dist.is_initialized():
        dist.destroy_process_group()


def _leave_record(error: BaseException, rank: int, folder: Path) -> None:
    plain = next((name for name, kind in PLAIN.items() if isinstance(error, kind)), "")
    message = str(error) if plain else f"{type(error).__name__}: {error}"
    report = "".join(traceback.format_exception(error))
    record = Failure(rank, time.time_ns(), plain, isinstance(error, _HOPELESS), message, report)
    # Whole or not at all: this process may be ended while it writes, and whoever ends it reads.
    begun = folder / f"begun-{rank}.json"
    begun.write_text(json.dumps(asdict(record)), "utf8")
    begun.replace(folder / f"failure-{rank}.json")
    if not plain:
        time.sleep(LAST_WORDS)


def first_failure(folder: Path, error: ChildFailedError) -> tuple[PlainError | WorkerFailed, bool]:
    """The failure that the others followed from, as an exception for this process to raise; whether it would recur."""
    records = [Failure(**json.loads(path.read_text("utf8"))) for path in folder.glob("failure-*.json")]
    recorded = {record.rank for record in records}
    silent = [rank for rank in error.failures if rank not in recorded]
    if silent:
        code = error.failures[silent[0]].exitcode
        if code < 0:
            cause = f"was killed by {signal.Signals(-code).name}"
            hint = " The machine may have run out of memory (`dmesg` says so)." if -code == signal.SIGKILL else ""
        else:
            cause, hint = f"ended with exit code {code}", ""
        return WorkerFailed(f"Worker {silent[0]} {cause}; all workers have been ended.{hint}", ""), False
    first = min(records, key=lambda record: record.time_ns)
    if first.plain:
        return PLAIN[first.plain](first.message), True
    summary = f"Worker {first.rank} failed, its traceback is above; all workers have been ended.\n{first.message}"
    return WorkerFailed(summary, first.report), first.hopeless


def pids(folder: Path) -> dict[int, int]:
    """The processes of the workers that have begun, by rank."""
    texts = {int(path.name[4:]): path.read_text() for path in folder.glob("pid-*")}
    return {rank: int(text) for rank, text in texts.items() if text.isdigit()}


def send(folder: Path, signum: int) -> None:
    """Sends a signal to all workers that run."""
    for pid in pids(folder).values():
        with contextlib.suppress(ProcessLookupError):
            if _runs(pid):
                os.kill(pid, signum)


def some_failed(folder: Path) -> bool:
    """Whether a worker has ended before it was done."""
    return any(not _runs(pid) and not (folder / f"done-{rank}").exists() for rank, pid in pids(folder).items())


def _runs(pid: int) -> bool:
    """Whether a worker has not ended. One that has stays as it is, for whoever collects it."""
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
    except ChildProcessError:
        if not serving():
            return False  # collected: the number may be another process's by now
    try:
        os.kill(pid, 0)  # a child of the server, which collects it at once
    except ProcessLookupError:
        return False
    return True
