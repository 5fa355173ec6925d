# pyright: reportAttributeAccessIssue=false
"""Workers that have nothing left to import: they are forked from a process that has done it.

A worker that is spawned imports torch and nerfstudio for itself, and only begins to when `ns-train` has come to the
point of starting it. So `ns-train` forks itself as soon as it has imported all and read its options. That copy is
Python's fork server, and each worker is forked from it in turn: nothing is imported twice.

Three things do not outlive a fork: CUDA, OpenMP's threads, and other threads of Python. So `ns-train` must not have
asked the driver for anything; until then torch counts GPUs by the driver's management library (NVML), which does no
harm. OpenMP lets its threads go. Where that has not come out workers are spawned, as elsewhere than on Linux.
"""

import ctypes
import os
import signal
import sys
import threading
import traceback
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing import forkserver, resource_tracker, util
from pathlib import Path

_METHODS = ("splatfacto-", "nerfacto-xl")
"""How the names of our methods begin."""
_DEVICES = "--machine.num-devices"
_FILE = "--load-config"
BY_NVML = "PYTORCH_NVML_BASED_CUDA_CHECK"
"""Where this is 1 in the environment, torch counts GPUs by NVML."""
_ANOTHER = ("ns_multigpu.plugin.launch.served", "ns_multigpu.plugin.train.config")
"""What a server imports that Python starts for itself: it does if ours has been killed. The first of them has it end
with this process: workers, its clients, would keep it alive."""
_NOT_INITIALIZED = 3
"""CUDA_ERROR_NOT_INITIALIZED."""
_SOFTLY = 1
"""omp_pause_soft: threads go, settings stay."""
_state = {"ours": False, "by NVML": False}


def trains(argv: Sequence[str]) -> bool:
    """Whether a command line, as in `sys.argv`, is that of a run with one of our methods."""
    return len(argv) > 1 and "train" in Path(argv[0]).name and argv[1].startswith(_METHODS)


def wanted(argv: Sequence[str]) -> bool:
    """Whether a command line is that of a run which this process will start several workers for, or may."""
    if not trains(argv) or "RANK" in os.environ:  # a launcher has started this process
        return False
    words = [word.replace("_", "-") for word in argv]
    for place, word in enumerate(words):
        flag, equals, value = word.partition("=")
        if flag == _FILE:
            return True  # the file knows
        if flag == _DEVICES:
            return (value if equals else "".join(words[place + 1 : place + 2])) != "1"
    return False


def keep_off_gpus() -> None:
    """Until `start`, torch counts GPUs in a way that outlives a fork. It counts while it is imported where nvcc is."""
    if BY_NVML not in os.environ:
        os.environ[BY_NVML] = "1"
        _state["by NVML"] = True


def start() -> None:
    """Makes a copy of this process its fork server, if that can serve; returns at once."""
    if _state["by NVML"]:
        _state["by NVML"] = False
        os.environ.pop(BY_NVML, None)
    if sys.platform != "linux" or serving() or not _outlives_fork():
        return
    resource_tracker.ensure_running()  # Python starts it by the function that is replaced now
    usual, util.spawnv_passfds = util.spawnv_passfds, _fork
    try:
        forkserver.ensure_running()
    finally:
        util.spawnv_passfds = usual
    forkserver.set_forkserver_preload(list(_ANOTHER))
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


def _outlives_fork() -> bool:
    return threading.active_count() == 1 and not _driver_in_use() and _openmp_rests()


def _driver_in_use() -> bool:
    """Whether this process has begun to use CUDA's driver, torch or not."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:  # there is none
        return False
    return driver.cuDeviceGetCount(ctypes.byref(ctypes.c_int())) != _NOT_INITIALIZED


def _openmp_rests() -> bool:
    """Ends OpenMP's threads, should there be some; a copy of this process would wait for them for ever.

    Returns:
        whether it has.
    """
    mapped = [line.split(maxsplit=5)[5] for line in Path("/proc/self/maps").read_text().splitlines() if ".so" in line]
    libraries = {path for path in mapped if Path(path).name.startswith("libgomp")}
    try:
        return all(ctypes.CDLL(path).omp_pause_resource_all(_SOFTLY) == 0 for path in libraries)
    except (OSError, AttributeError):  # older than OpenMP 5
        return False


def _fork(_: str, words: Sequence[str], passed: Sequence[int]) -> int:
    """See `multiprocessing.util.spawnv_passfds`: what the new Python would be told to do, a copy of this one does."""
    this = os.getpid()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()  # or both would write it
    if pid := os.fork():
        return pid
    code = 1
    try:
        die_with(this)
        _close_other_ends(passed)
        # As they were imported: this thread holds a lock of the one.
        forkserver._forkserver.__init__()
        resource_tracker._resource_tracker.__init__()
        exec(words[words.index("-c") + 1], {})
    except SystemExit:
        code = 0
    except KeyboardInterrupt:  # before it was told to take no notice
        pass
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _close_other_ends(passed: Sequence[int]) -> None:
    """Closes the other ends of pipes: a server ends when nobody holds that of one."""
    ours = {os.readlink(f"/proc/self/fd/{one}"): one for one in passed}
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # that of the list itself
            if int(name) != ours.get(os.readlink(f"/proc/self/fd/{name}"), int(name)):
                os.close(int(name))
