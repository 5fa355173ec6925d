"""Processes of this machine that are ranks of one world: starting, watching, signalling and ending them.

Built on torch.multiprocessing. Where the platform allows it, ranks are forked from Python's fork server, which imports
once what all of them need (`preload`). The server must not use CUDA's driver, which does not outlive a fork.
"""

import contextlib
import logging
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from multiprocessing import forkserver, resource_tracker
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.multiprocessing.spawn import ProcessException, ProcessRaisedException

from ns_multigpu.plugin.faults.signals import signal_name

COUNT_BY_NVML = "PYTORCH_NVML_BASED_CUDA_CHECK"
"""Environment variable; if 1, torch counts GPUs by the management library instead of CUDA's driver."""
_LOOPBACK = "127.0.0.1"
_METHOD = "forkserver" if sys.platform == "linux" else "spawn"
_preload: list[str] = []
_KNOWN_WARNING = "ignore::FutureWarning:nerfstudio.field_components.activations"
"""Filter of what this process's own import of nerfstudio has said. The server would say it behind an error message."""
logging.getLogger("torch.multiprocessing.spawn").setLevel(logging.CRITICAL)  # `RankFailed` says what has happened


class RankFailed(RuntimeError):
    """Error of a rank's process, after which all others have been ended.

    Attributes:
        rank: the first one that failed. code: its exit code; below 0 the signal that killed it.
        report: its traceback; "" if it left none.
    """

    def __init__(self, rank: int, code: int, report: str) -> None:
        super().__init__(f"Rank {rank} {how_ended(code)}.\n{report}".rstrip())
        self.rank, self.code, self.report = rank, code, report


def how_ended(code: int) -> str:
    """Return "was killed by SIGKILL" for the exit code -9, or "ended with exit code 1" for 1."""
    return f"was killed by {signal_name(-code)}" if code < 0 else f"ended with exit code {code}"


def cores() -> int:
    """Return how many processor cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def preload(modules: Sequence[str]) -> None:
    """Set the modules that the fork server imports before it starts. Only the first call in a process counts."""
    if not _preload:
        _preload.extend(modules)
        multiprocessing.set_forkserver_preload(_preload)


def start_server() -> None:
    """Start the fork server, where there can be one, and return at once; the first ranks would start it otherwise."""
    if _METHOD == "forkserver":
        filters = [given] if (given := os.environ.get("PYTHONWARNINGS")) else []
        with environment({"PYTHONWARNINGS": ",".join([*filters, _KNOWN_WARNING])}), _starting():
            forkserver.ensure_running()


@contextlib.contextmanager
def environment(values: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables of this process within the context."""
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


class RankProcesses:
    """Processes that call `function(*args)`, each as one rank of a world on this machine.

    They find what torchrun would set in their environment (RANK, WORLD_SIZE, MASTER_PORT, ...), besides this process's
    variables; this process serves the store where they meet. They end if it dies.

    Args:
        function, args: what can be pickled.
        size: ranks of the world.
        first: rank of the first process; 1 where this process itself is rank 0.
        threads: processor threads of each; by default OMP_NUM_THREADS, or an equal share of the cores.
        variables: more of their environment.
        fork: whether a fork server may start them.
    """

    def __init__(
        self,
        function: Callable[..., object],
        args: tuple[Any, ...],
        size: int,
        *,
        first: int = 0,
        threads: int | None = None,
        variables: Mapping[str, str] | None = None,
        fork: bool = True,
    ) -> None:
        self.first, self._ending = first, False
        self._store = dist.TCPStore(_LOOPBACK, 0, is_master=True, wait_for_workers=False, timeout=timedelta(days=30))
        self._world = {
            "WORLD_SIZE": str(size),
            "LOCAL_WORLD_SIZE": str(size),
            "GROUP_RANK": "0",
            "MASTER_ADDR": _LOOPBACK,
            "MASTER_PORT": str(self._store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",  # the store is served already
        }
        if sys.platform == "linux":
            # All ranks are on this machine: gloo need not guess an interface from a host name that may not resolve.
            self._world["GLOO_SOCKET_IFNAME"] = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
        number = str(threads or os.environ.get("OMP_NUM_THREADS") or max(1, cores() // size))
        theirs = {**os.environ, **self._world, "OMP_NUM_THREADS": number, **(variables or {})}
        preload([function.__module__])
        with _starting(), _main_hidden(function, args):
            self._context: Any = mp.start_processes(
                _run,
                (first, theirs, function, args),
                nprocs=size - first,
                join=False,
                start_method=_METHOD if fork else "spawn",
            )

    def place(self, rank: int) -> dict[str, str]:
        """Return the environment variables of a rank: for this process, where it is rank 0."""
        return {**self._world, "RANK": str(rank), "LOCAL_RANK": str(rank)}

    @property
    def pids(self) -> list[int]:
        """Processes, by rank."""
        return self._context.pids()

    def wait(self, seconds: float | None = None, *, grace: float = 0.0) -> bool:
        """Wait until all ranks have ended, or one has failed.

        Args:
            seconds: after which to return; None for no limit.
            grace: seconds that the ranks which outlive a failed one have to end by themselves, and as many after a
                SIGTERM, before they are killed.

        Returns:
            Whether all have ended.

        Raises:
            RankFailed: one has ended with an error; none is left.
        """
        end = None if seconds is None else time.monotonic() + seconds
        while True:
            left = None if end is None else max(0.0, end - time.monotonic())
            try:
                if self._context.join(left, grace):  # returns each time a rank has ended
                    return True
            except ProcessException as error:
                index = error.error_index
                code = self._context.processes[index].exitcode
                report = str(error) if isinstance(error, ProcessRaisedException) else ""
                raise RankFailed(self.first + index, code, report) from None
            if left == 0.0:
                return False

    def send(self, signum: int) -> None:
        """Send a signal to all ranks that run."""
        for process in self._context.processes:
            if process.is_alive():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, signum)

    def end(self, seconds: float = 0.0) -> None:
        """End all ranks by SIGTERM, and by SIGKILL those that still run after the timeout."""
        processes = self._context.processes
        for process in processes:
            if process.is_alive():
                process.terminate()
        until = time.monotonic() + seconds
        for process in processes:
            process.join(max(0.0, until - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()


def _run(
    index: int, first: int, variables: dict[str, str], function: Callable[..., object], args: tuple[Any, ...]
) -> None:
    """Run `function` as rank `first + index`, in that rank's process."""
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback of each rank
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    _end_with_parent()
    os.environ.clear()
    os.environ.update(variables, RANK=str(first + index), LOCAL_RANK=str(first + index))
    if (threads := variables["OMP_NUM_THREADS"]).isdigit():
        torch.set_num_threads(int(threads))  # a forked process has loaded OpenMP before
    function(*args)


def _end_with_parent() -> None:
    """End this process when the one that started it dies. A thread waits for it: the main one may be in a collective,
    where no signal handler of Python runs."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def wait() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, name="parent", daemon=True).start()


@contextlib.contextmanager
def _starting() -> Iterator[None]:
    """Enclose the start of processes: they count GPUs without CUDA's driver, and block Ctrl-C until `_run`.

    A terminal sends Ctrl-C to all processes; this one receives it after the context.
    """
    resource_tracker.ensure_running()  # it would unblock the signal
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        with environment({COUNT_BY_NVML: "1"}):
            yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


@contextlib.contextmanager
def _main_hidden(*needed: object) -> Iterator[None]:
    """Keep processes started within from importing this one's main module, unless `needed` objects come from it.

    Python lets them import it to unpickle objects. That of `ns-train` loads all of nerfstudio's methods, which takes
    seconds.
    """
    if b"__main__" in pickle.dumps(needed):
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
