"""Shorten the start and the end of nerfstudio's commands.

nerfstudio 1.1.5 lists methods that it does not ship. For each of 26 it asks `inspect.stack()` for one caller's name,
which reads the source lines of all callers and walks all loaded modules: 10 s of processor time of each command.

Workers are forked from a server that has imported what they need; it imports at the same time as `ns-train`.

Python's garbage collector runs again and again while imports make hundreds of thousands of objects, all of which stay.
"""

import atexit
import gc
import multiprocessing
import os
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nerfstudio.configs import external_methods

from ns_multigpu.plugin.launch.processes import COUNT_BY_NVML, preload, start_server

_METHODS = ("splatfacto-", "nerfacto-xl")
"""Prefixes of our methods' names."""
_ONE_PROCESS = "splatfacto-aggregate"
"""Method that trains in the process of the command line, whatever its number of devices."""
_DEVICES, _FILE = "--machine.num-devices", "--load-config"
_OF_WORKERS = ("ns_multigpu.methods", "ns_multigpu.plugin.checkpoint.saved_tensors", "scipy.spatial")
"""Modules that workers use. (The last computes distances between seed points.)"""

_Entry: Any = external_methods.ExternalMethodDummyTrainerConfig
_ask_to_install = _Entry.__post_init__
_LIST = external_methods.get_external_methods.__name__


def trains(argv: Sequence[str]) -> bool:
    """Return whether this process was started by a command line, as in `sys.argv`, that trains one of our methods."""
    started = multiprocessing.parent_process() is None  # else it is a worker, which has the same command line
    return started and len(argv) > 1 and "train" in Path(argv[0]).name and argv[1].startswith(_METHODS)


def starts_workers(argv: Sequence[str]) -> bool:
    """Return whether a command line is that of a run for which this process will start several workers, or may."""
    if not trains(argv) or argv[1] == _ONE_PROCESS or "RANK" in os.environ:  # a launcher has started this process
        return False
    words = [word.replace("_", "-") for word in argv]
    for place, word in enumerate(words):
        flag, equals, value = word.partition("=")
        if flag == _FILE:
            return True  # the file knows
        if flag == _DEVICES:
            return (value if equals else "".join(words[place + 1 : place + 2])) != "1"
    return False


def hasten() -> None:
    """Skip the stack walks and two warnings, and the garbage collector while a training command imports; start its
    workers' server.

    Call it before nerfstudio imports its methods: `ns_multigpu.dataparsers` does.
    """
    _Entry.__post_init__ = _post_init
    warnings.filterwarnings("ignore", r"`torch\.cuda\.amp\.custom_", FutureWarning)  # of nerfstudio's `trunc_exp`
    if trains(sys.argv):
        gc.disable()
    if starts_workers(sys.argv):
        os.environ.setdefault(COUNT_BY_NVML, "1")  # CUDA's driver takes 0.3 s a GPU, and only workers need it
        preload(_OF_WORKERS)
        start_server()


def collect_again() -> None:
    """Enable the garbage collector after imports; it ignores all objects made so far."""
    gc.freeze()
    gc.enable()


def end_quickly() -> None:
    """Exclude all objects from the garbage collections at Python's exit, which take 0.5 to 2 s.

    Exit status, `atexit`, threads and objects without references to themselves are not affected.
    """
    atexit.unregister(gc.freeze)
    atexit.register(gc.freeze)


def _post_init(self: Any) -> None:
    """Do as nerfstudio's `__post_init__`: an entry that `get_external_methods` did not make was chosen by the user."""
    if sys._getframe(2).f_code.co_name != _LIST:  # this function's caller is the dataclass's `__init__`
        _ask_to_install(self)
