# pyright: reportAttributeAccessIssue=false
"""Workers that need not import anything: they are forked from a process that has done so.

A worker that is spawned imports torch and nerfstudio anew, which takes as long again as the start of `ns-train` did.
Python's fork server forks workers from a process that imports what they need; it would take that long itself. So
here the server is this process's own fork, made in the moment when all has been imported and nothing else has been
done: no thread runs, no GPU has been touched, nothing has been computed. From then on Python's own code serves.
"""

import contextlib
import ctypes
import os
import signal
import socket
import sys
import threading
from collections.abc import Sequence
from multiprocessing import connection, forkserver, resource_tracker
from pathlib import Path

_DEVICES = "--machine.num-devices"
_FILE = "--load-config"


def wanted(argv: Sequence[str]) -> bool:
    """Whether a command line is that of a run which this process will start several workers for, or may.

    Args:
        argv: as in `sys.argv`.
    """
    if len(argv) < 2 or "train" not in Path(argv[0]).name or not argv[1].startswith("splatfacto-"):
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


def serve() -> bool:
    """Makes this process's fork server, if that can be done now; says whether there is one."""
    if sys.platform != "linux" or threading.active_count() > 1 or _cuda_begun() or serving():
        return serving()
    server = forkserver._forkserver
    resource_tracker.ensure_running()
    with socket.socket(socket.AF_UNIX) as listener:
        address = connection.arbitrary_address("AF_UNIX")
        listener.bind(address)
        os.chmod(address, 0o600)
        listener.listen()
        alive_read, alive_write = os.pipe()
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            os.close(alive_write)
            _be_server(listener.detach(), alive_read, parent)
        os.close(alive_read)
    server._forkserver_address, server._forkserver_alive_fd, server._forkserver_pid = address, alive_write, pid
    return True


def serving() -> bool:
    """Whether this process has a fork server of its own making or Python's."""
    return forkserver._forkserver._forkserver_pid is not None


def die_with(parent: int) -> None:
    """Has the kernel kill this process should its parent, `parent`, die: no handler of Python's runs in a collective,
    and a server's clients keep it alive."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        if os.getppid() != parent:
            os.kill(os.getpid(), signal.SIGKILL)


def _be_server(listener: int, alive: int, parent: int) -> None:
    """Serves until the parent ends; never returns."""
    code = 1
    try:
        die_with(parent)
        with contextlib.suppress(SystemExit):
            forkserver.main(listener, alive, [])
        code = 0
    finally:
        os._exit(code)


def _cuda_begun() -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and torch.cuda.is_initialized()
