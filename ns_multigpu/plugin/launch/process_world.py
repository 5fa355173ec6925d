"""The world of this process. Nerfstudio builds its objects from configs, with no place to hand one through."""

import atexit
import sys
import time
from pathlib import Path

from ns_multigpu.core.dist.world import World

_GLOO = "pt_gloo_runloop"
"""What torch calls gloo's threads."""

_REST = 0.005
"""Seconds in which a thread that has something to do, and is let, does some of it."""

_current: World | None = None


def set_world(world: World | None) -> None:
    """Makes `world` this process's; None forgets it."""
    global _current
    _current = world


def get_world(device: str = "cpu") -> World:
    """This process's world; a world of one on `device` where no launcher made one (ns-eval, ns-render, ns-viewer)."""
    return _current if _current is not None else World.single(device)


def wait_for_gloo(limit: float = 2.0, tasks: Path = Path("/proc/self/task")) -> bool:
    """Waits until gloo's threads have nothing to do.

    After a collective such a thread still holds its tensors. To let go of them it takes Python's lock. If Python has
    come to its end by then, the process aborts: "terminate called without an active exception". It helps neither that
    the collective was waited for, nor `destroy_process_group`: the threads last as long as anything holds the group.

    A thread that sleeps, and did not run while this one slept, waits for work, not for Python's lock: that was free.

    Args:
        limit: seconds after which it gives up.
        tasks: where Linux tells of this process's threads. Elsewhere there is no such place, and nothing is waited for.

    Returns:
        Whether they have nothing to do, as far as one can tell.
    """
    end = time.monotonic() + limit
    before: dict[str, list[str]] | None = None
    while (now := _gloo_threads(tasks)) != before or any(told[0] != "S" for told in now.values()):
        if time.monotonic() > end:
            return False
        before = now
        time.sleep(_REST)
    return True


def _gloo_threads(tasks: Path) -> dict[str, list[str]]:
    """By thread: its state, and how often it has been called and left by a processor."""
    found: dict[str, list[str]] = {}
    for status in tasks.glob("*/status"):
        try:
            lines = status.read_text().splitlines()
        except OSError:
            continue  # it has ended meanwhile
        if lines[0].split()[1:] == [_GLOO]:
            told = [line.split()[1] for line in lines if line.startswith(("State:", "voluntary", "nonvoluntary"))]
            found[status.parent.name] = told
    return found


@atexit.register
def _leave() -> None:
    """Ends the groups of a process that torchrun has started, while Python is whole: torch asks for it.

    Where an error ends it, the groups stay: other ranks may never come to the end.
    """
    if _current is None:
        return
    if not hasattr(sys, "last_value"):
        _current.close()
    if _current.size > 1:
        wait_for_gloo()
