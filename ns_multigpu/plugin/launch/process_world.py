"""The world of this process. Nerfstudio builds its objects from configs, with no place to hand one through."""

import atexit
import sys
import time
from pathlib import Path

from ns_multigpu.core.dist.world import World

_GLOO = "pt_gloo_runloop"
"""Name of gloo's threads in torch."""

_REST = 0.005
"""Seconds in which a thread with work, if allowed to run, does some of it."""

_current: World | None = None


def set_world(world: World | None) -> None:
    """Set this process's `world`; None removes it."""
    global _current
    _current = world


def has_world() -> bool:
    """Return whether a launcher made this process's world."""
    return _current is not None


def get_world(device: str = "cpu") -> World:
    """Return this process's world; a world of one on `device` if no launcher made one (ns-eval, ns-render,
    ns-viewer)."""
    return _current if _current is not None else World.single(device)


def wait_for_gloo(limit: float = 2.0, tasks: Path = Path("/proc/self/task")) -> bool:
    """Wait until gloo's threads are idle.

    After a collective such a thread still holds its tensors, and takes Python's lock to release them. If Python has
    been finalized by then, the process aborts: "terminate called without an active exception". Waiting for the
    collective and `destroy_process_group` do not prevent it: the threads last as long as anything references the group.

    A thread that sleeps, and did not run while this one slept, waits for work, not for Python's lock, which was free.

    Args:
        limit: timeout in seconds.
        tasks: Linux's folder of this process's threads. On other systems it does not exist, and the call returns at
            once.

    Returns:
        True if the threads appear idle.
    """
    end = time.monotonic() + limit
    before: dict[str, list[str]] | None = None
    while (now := _gloo_threads(tasks)) != before or any(fields[0] != "S" for fields in now.values()):
        if time.monotonic() > end:
            return False
        before = now
        time.sleep(_REST)
    return True


def _gloo_threads(tasks: Path) -> dict[str, list[str]]:
    """Return the state and the numbers of context switches of each gloo thread."""
    found: dict[str, list[str]] = {}
    for status in tasks.glob("*/status"):
        try:
            lines = status.read_text().splitlines()
        except OSError:
            continue  # it has just ended
        if lines[0].split()[1:] == [_GLOO]:
            fields = [line.split()[1] for line in lines if line.startswith(("State:", "voluntary", "nonvoluntary"))]
            found[status.parent.name] = fields
    return found


@atexit.register
def _exit() -> None:
    """Destroy the process groups of a worker of torchrun before Python is finalized, as torch requires.

    Where an error ends it, the groups stay: other ranks may never come to the end.
    """
    if _current is None:
        return
    if not hasattr(sys, "last_value"):
        _current.close()
    if _current.size > 1:
        wait_for_gloo()
