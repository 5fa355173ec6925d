"""Starts a training run's worker processes on this machine, and ends them all when one fails or the user stops it.

The processes are run by torch.distributed's elastic agent, the one inside torchrun, so a worker finds the same
environment (RANK, WORLD_SIZE, ...) whether this file or torchrun started it.
"""

import contextlib
import json
import logging
import os
import random
import signal
import sys
import tempfile
import time
import traceback
import uuid
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from rich.console import Console
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from ns_multigpu.plugin.errors import InputError, WorkerFailed
from ns_multigpu.plugin.ranks import Ranks

_LAST_WORDS = 0.5
"""Seconds a failing worker lingers. A peer's sudden death shows in the others as a broken connection, within
milliseconds; the agent, which looks every 0.1 s, must find the dead one and not them."""

_LOOPBACK = "127.0.0.1"


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
        bad_input: whether it was an `InputError`.
        message: one or more lines for the user.
        report: the traceback.
    """

    rank: int
    time_ns: int
    bad_input: bool
    message: str
    report: str


class WorkerLauncher:
    """Stands in for the trainer in the process that the user started: its `train` runs `workers` trainers elsewhere."""

    def __init__(self, config: Config, workers: int) -> None:
        self.config = config
        self.workers = workers

    def setup(self) -> None:
        """Nothing: each worker sets its own trainer up."""

    def train(self) -> None:
        """Runs the workers to their end.

        Raises:
            InputError: a worker found that what was asked for cannot be done.
            WorkerFailed: a worker ended with another error; the others have been ended too.
            SystemExit: this process was told to stop (Ctrl-C, SIGTERM); no worker is left.
        """
        run_workers(self.config, self.workers)


def cores() -> int:
    """How many processor cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def use_own_share_of_cores(ranks: Ranks | None) -> None:
    """Gives torch this process's share of the machine's cores; several workers would otherwise crowd each other out.

    A thread count that the user set in OMP_NUM_THREADS stays. (Under torchrun that variable says 1 when the user was
    silent, so 1 is not taken for a wish there.)
    """
    if ranks is None or ranks.local_size == 1:
        return
    wish = os.environ.get("OMP_NUM_THREADS", "")
    threads = int(wish) if wish.isdigit() and int(wish) > 1 else max(1, cores() // ranks.local_size)
    torch.set_num_threads(threads)


def run_workers(config: Config, workers: int) -> None:
    """Runs `worker_main(config)` in `workers` processes of this machine; see `WorkerLauncher.train`."""
    threads = os.environ.get("OMP_NUM_THREADS") or str(max(1, cores() // workers))
    environment = {"OMP_NUM_THREADS": threads}
    if sys.platform == "linux":
        # All workers are on this machine: gloo need not guess an interface from a host name that may not resolve.
        environment["GLOO_SOCKET_IFNAME"] = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
    device = config.machine.device_type
    Console(stderr=True).print(f"Starting {workers} workers on {device}, {threads} processor threads each.")
    with tempfile.TemporaryDirectory(prefix="ns_multigpu-", ignore_cleanup_errors=True) as folder:
        launch = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=workers,
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint=f"{_LOOPBACK}:0",
            local_addr=_LOOPBACK,
            max_restarts=0,
            start_method="spawn",
            logs_specs=DefaultLogsSpecs(log_dir=folder),
        )
        with _variables(environment), _signals_restored(), _agent_silenced():
            try:
                elastic_launch(launch, worker_main)(config, folder)
            except ChildFailedError as error:
                raise _first_failure(Path(folder), error) from None
            except SignalException as error:
                Console(stderr=True).print(f"Stopped by {error.sigval.name}: all {workers} workers have been ended.")
                raise SystemExit(128 + error.sigval) from None


def worker_main(config: Config, folder: str) -> None:
    """The life of one worker: sets up and runs the trainer that `config` makes.

    Every worker starts from the same seed: what differs between ranks is drawn from generators keyed by step and view,
    never by rank.

    Args:
        config: the run's configuration.
        folder: where a failing worker leaves its `Failure`.
    """
    # Ctrl-C reaches every process of a terminal, and the kernel sends the same signal should the parent die: a worker
    # that sits in a collective could not handle it in Python, and must not outlive the others.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    ranks = Ranks.from_env()
    if ranks is None:
        raise RuntimeError("worker_main runs in the processes that run_workers starts, and this is none")
    try:
        random.seed(config.machine.seed)
        np.random.seed(config.machine.seed)  # noqa: NPY002 - nerfstudio draws from numpy's global generator
        torch.manual_seed(config.machine.seed)
        trainer = config.setup(local_rank=ranks.local_rank, world_size=ranks.size)
        trainer.setup()
        trainer.train()
        if dist.is_initialized():
            dist.destroy_process_group()
    except (Exception, SystemExit) as error:
        if isinstance(error, SystemExit) and not error.code:
            return
        _leave_record(error, ranks.rank, Path(folder))
        raise


def _leave_record(error: BaseException, rank: int, folder: Path) -> None:
    bad_input = isinstance(error, InputError)
    message = str(error) if bad_input else f"{type(error).__name__}: {error}"
    record = Failure(rank, time.time_ns(), bad_input, message, traceback.format_exc())
    (folder / f"failure-{rank}.json").write_text(json.dumps(asdict(record)), "utf8")
    if not bad_input:
        time.sleep(_LAST_WORDS)


def _first_failure(folder: Path, error: ChildFailedError) -> InputError | WorkerFailed:
    """The failure that the others followed from, as an exception for this process to raise."""
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
        return WorkerFailed(f"Worker {silent[0]} {cause}; all workers have been ended.{hint}", "")
    first = min(records, key=lambda record: record.time_ns)
    if first.bad_input:
        return InputError(first.message)
    summary = f"Worker {first.rank} failed, its traceback is above; all workers have been ended.\n{first.message}"
    return WorkerFailed(summary, first.report)


@contextlib.contextmanager
def _variables(values: dict[str, str]) -> Iterator[None]:
    """Environment variables for the processes started meanwhile."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextlib.contextmanager
def _signals_restored() -> Iterator[None]:
    """Puts back the signal handlers that the agent replaces."""
    names = [name for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT") if hasattr(signal, name)]
    before = {name: signal.getsignal(getattr(signal, name)) for name in names}
    try:
        yield
    finally:
        for name, handler in before.items():
            with contextlib.suppress(ValueError):  # not the main thread: the agent replaced none
                signal.signal(getattr(signal, name), handler)


@contextlib.contextmanager
def _agent_silenced() -> Iterator[None]:
    """Keeps the agent's own account of a failure (a second traceback) off the terminal."""
    names = [name for name in logging.root.manager.loggerDict if name.startswith("torch.distributed.elastic")]
    before = {name: logging.getLogger(name).level for name in names}
    for name in names:
        logging.getLogger(name).setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for name, level in before.items():
            logging.getLogger(name).setLevel(level)
