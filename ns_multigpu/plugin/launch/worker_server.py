# pyright: reportAttributeAccessIssue=false
"""Workers that have nothing left to import: they are forked from a server that has done it.

A worker that is spawned imports torch and nerfstudio for itself, and only begins to when `ns-train` has come to the
point of starting it. Python's fork server imports once for all workers, and is started here as soon as any of our code
runs: it imports while `ns-train` still does. It must not touch a GPU, for CUDA does not outlive a fork: torch asks
whether there is one as it is imported, and is told to ask the driver's management library (NVML), which does no harm.
"""

import ctypes
import os
import signal
import sys
from collections.abc import Iterable, Sequence
from multiprocessing import forkserver
from pathlib import Path

import torch

_METHODS = ("splatfacto-", "nerfacto-xl")
"""How the names of our methods begin."""
_DEVICES = "--machine.num-devices"
_FILE = "--load-config"
_BY_NVML = "PYTORCH_NVML_BASED_CUDA_CHECK"
_state = {"ours": False}


def wanted(argv: Sequence[str]) -> bool:
    """Whether a command line is that of a run which this process will start several workers for, or may.

    Args:
        argv: as in `sys.argv`.
    """
    if len(argv) < 2 or "train" not in Path(argv[0]).name or not argv[1].startswith(_METHODS):
        return False
    if "RANK" in os.environ:  # a launcher has started this process
        return False
    words = [word.replace("_", "-") for word in argv]
    for place, word in enumerate(words):
        flag, equals, value = word.partition("=")
        if flag == _FILE:
            return True  # the file knows
        if flag == _DEVICES:
            return (value if equals else "".join(words[place + 1 : place + 2])) != "1"
    return False


def start(modules: Iterable[str]) -> None:
    """Starts this process's fork server, if it can serve; returns at once.

    Args:
        modules: what it is to import.
    """
    if sys.platform != "linux" or serving() or not _asked_without_harm():
        return
    # The first of them has it end with this process: workers, its clients, would keep it alive.
    forkserver.set_forkserver_preload(["ns_multigpu.plugin.launch.served", *modules])
    before = os.environ.get(_BY_NVML)
    os.environ[_BY_NVML] = "1"
    try:
        forkserver.ensure_running()
    finally:
        if before is None:
            del os.environ[_BY_NVML]
        else:
            os.environ[_BY_NVML] = before
    _state["ours"] = True


def serving() -> bool:
    """Whether workers of this process come from its server."""
    return _state["ours"]


def die_with(parent: int) -> None:
    """Has the kernel kill this process should `parent`, its parent, die: in a collective no handler of Python runs."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        if os.getppid() != parent:
            os.kill(os.getpid(), signal.SIGKILL)


def _asked_without_harm() -> bool:
    """Whether torch can count GPUs without a look at them. Without any driver there is nothing to look at."""
    return torch.cuda._device_count_nvml() >= 0 or not torch.cuda.is_available()
