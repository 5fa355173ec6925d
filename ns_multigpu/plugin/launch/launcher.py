"""Starts a training run's worker processes on this machine, ends them all when one fails, and starts them again.

The processes are run by torch.distributed's elastic agent, the one inside torchrun, so a worker finds the same
environment (RANK, WORLD_SIZE, ...) whether this file or torchrun started it. Restarts are counted here rather than by
the agent, which would also repeat what cannot get better, and could not be told to stop.
"""

import contextlib
import logging
import os
import pickle
import signal
import sys
import tempfile
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from rich.console import Console
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from ns_multigpu.plugin.faults.errors import InputError, PlainError, WorkerFailed
from ns_multigpu.plugin.faults.signals import StopSignals, signal_name
from ns_multigpu.plugin.launch.commands import OWN_LAUNCHER
from ns_multigpu.plugin.launch.ranks import Ranks
from ns_multigpu.plugin.launch.run_parts import run_parts
from ns_multigpu.plugin.launch.worker import Config, first_failure, send, some_failed, worker_main
from ns_multigpu.plugin.launch.worker_server import BY_NVML, serving

_PATIENCE = 4.0
"""Seconds that the workers which outlive another one have to end by themselves, before they are killed: they may wait
for the dead one where no signal handler of Python runs."""

_LOOPBACK = "127.0.0.1"


class WorkerLauncher:
    """Stands in for the trainer in the process that the user started: its `train` runs `workers` trainers elsewhere.

    Args:
        config: the run's. workers: how many.
        abandon: called where the run is refused or stopped; it is to leave nothing if nothing has been trained.
    """

    def __init__(self, config: Config, workers: int, abandon: Callable[[], None] = lambda: None) -> None:
        self.config = config
        self.workers = workers
        self._abandon = abandon

    def setup(self) -> None:
        """Nothing: each worker sets its own trainer up."""

    def train(self) -> None:
        """Runs the workers to their end.

        Raises:
            InputError, SaveFailed: a worker found that what was asked for cannot be done, or could not save the model.
            WorkerFailed: a worker ended with another error; the others have been ended too.
            SystemExit: this process was told to stop (Ctrl-C, SIGTERM); no worker is left.
        """
        try:
            run_workers(self.config, self.workers)
        except (InputError, SystemExit):
            self._abandon()
            raise


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
    """Runs `worker_main(config)` in `workers` processes of this machine; see `WorkerLauncher.train`.

    When a worker dies, all are started again, `config.max_restarts` times at most, and not for what would happen again:
    bad input, numbers that are none, lack of memory, or the same exception twice in a row.
    """
    restarts = int(getattr(config, "max_restarts", 0))
    job = _Job(config, workers)
    said = job.say
    last = ""
    with StopSignals(on_first=job.forward, on_second=job.kill) as signals:
        for attempt in range(restarts + 1):
            try:
                failure, hopeless = job.attempt(attempt)
            except SignalException as error:
                said(f"Stopped by {error.sigval.name}: all {workers} workers have been ended.")
                raise SystemExit(128 + error.sigval) from None
            if job.interrupted is not None:
                raise SystemExit(128 + job.interrupted)
            if failure is None:
                return
            if signals.requested:
                said(f"Stopped by {signal_name(signals.requested)}: all {workers} workers have been ended.")
                raise SystemExit(128 + signals.requested)
            error = str(failure).partition("\n")[2]  # the exception, whichever worker had it first; "" for a kill
            if hopeless or attempt == restarts or (error and error == last):
                raise failure
            last = error
            if isinstance(failure, WorkerFailed) and failure.report:
                said(failure.report.rstrip())
            said(f"{failure}\nRestart {attempt + 1} of {restarts}, from the last checkpoint if there is one.")


class _Job:
    """The workers of one run, whichever attempt they belong to."""

    def __init__(self, config: Config, workers: int) -> None:
        self.config, self.workers = config, workers
        self.interrupted: int | None = None
        self._folder: Path | None = None
        self._console = Console(stderr=True)

    def say(self, text: str) -> None:
        """Tells the user."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def attempt(self, number: int) -> tuple[PlainError | WorkerFailed | None, bool]:
        """Runs the workers once.

        Returns:
            what went wrong, None if nothing did; and whether it would go wrong again.

        Raises:
            SignalException: this process was told to end at once.
        """
        threads = os.environ.get("OMP_NUM_THREADS") or str(max(1, cores() // self.workers))
        environment = {"OMP_NUM_THREADS": threads, "TORCHELASTIC_SIGNALS_TO_HANDLE": "", OWN_LAUNCHER: "1"}
        if sys.platform == "linux":
            # All workers are on this machine: gloo need not guess an interface from a host name that may not resolve.
            environment["GLOO_SOCKET_IFNAME"] = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
        device = self.config.machine.device_type
        self.say(f"Starting {self.workers} workers on {device}, {threads} processor threads each.")
        with tempfile.TemporaryDirectory(prefix="ns_multigpu-", ignore_cleanup_errors=True) as folder:
            launch = launch_config(self.workers, folder)
            self._folder = Path(folder)
            with (
                _variables(environment),
                _signals_restored(),
                _agent_silenced(),
                _main_hidden(self.config),
                _survivors_killed(self._folder),
            ):
                try:
                    elastic_launch(launch, worker_main)(self.config, folder, number, run_parts(), environment)
                except ChildFailedError as error:
                    return first_failure(Path(folder), error)
                finally:
                    stopped = Path(folder) / "interrupted"
                    self.interrupted = int(stopped.read_text()) if stopped.exists() else None
                    self._folder = None
        return None, False

    def forward(self, signum: int) -> None:
        """Passes the wish to stop on to the workers, also to those that are not there yet."""
        if self._folder is None:
            return
        (self._folder / "stop").touch()
        send(self._folder, signum)

    def kill(self, signum: int) -> None:
        """Ends all workers, and makes the agent see it."""
        if self._folder is not None:
            send(self._folder, signal.SIGKILL)
        raise SignalException("told twice", signal.Signals(signum))


def launch_config(workers: int, folder: str) -> LaunchConfig:
    """What torch's launcher is told of `workers` on this machine, whose logs go into `folder`.

    It asks whether there are GPUs, which would start the driver in this process; nothing else here needs that, and it
    takes 0.4 s. Their number is enough.
    """
    with _variables({BY_NVML: os.environ.get(BY_NVML, "1")}):
        return LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=workers,
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint=f"{_LOOPBACK}:0",
            local_addr=_LOOPBACK,
            max_restarts=0,
            start_method="forkserver" if serving() else "spawn",
            logs_specs=DefaultLogsSpecs(log_dir=folder),
            signals_to_handle="SIGQUIT",  # the others are ours
        )


@contextlib.contextmanager
def _survivors_killed(folder: Path) -> Iterator[None]:
    """Within, workers that outlive a failed one by some seconds are killed: the agent alone would wait for 30."""
    over = threading.Event()

    def watch() -> None:
        while not over.wait(0.2):
            if some_failed(folder):
                over.wait(_PATIENCE)
                if not over.is_set():
                    send(folder, signal.SIGKILL)
                return

    threading.Thread(target=watch, name="survivors", daemon=True).start()
    try:
        yield
    finally:
        over.set()


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
def _main_hidden(config: Config) -> Iterator[None]:
    """Within, processes that start do not import this one's main module, unless `config` has something of it.

    Python has a spawned process do that for what is pickled. `ns-train`'s loads all of nerfstudio's methods, none of
    which a worker needs: that takes seconds of every worker's start.
    """
    if b"__main__" in pickle.dumps(config):
        yield
        return
    main = vars(sys.modules["__main__"])
    hidden = {name: main[name] for name in ("__spec__", "__file__") if name in main}
    main["__spec__"] = None  # it has to be there
    main.pop("__file__", None)
    try:
        yield
    finally:
        main.update(hidden)


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
    talkative = ("torch.distributed.elastic", "torch.multiprocessing")
    names = [name for name in logging.root.manager.loggerDict if name.startswith(talkative)]
    before = {name: logging.getLogger(name).level for name in names}
    for name in names:
        logging.getLogger(name).setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for name, level in before.items():
            logging.getLogger(name).setLevel(level)
