"""The world of this process. Nerfstudio builds its objects from configs, with no place to hand one through."""

import atexit
import sys

from ns_multigpu.core.world import World

_current: World | None = None


def set_world(world: World | None) -> None:
    """Makes `world` this process's; None forgets it."""
    global _current
    _current = world


def get_world(device: str = "cpu") -> World:
    """This process's world; a world of one on `device` where no launcher made one (ns-eval, ns-render, ns-viewer)."""
    return _current if _current is not None else World.single(device)


@atexit.register
def _leave() -> None:
    """Ends the groups of a process that torchrun has started, while Python is whole.

    torch asks for it. A thread of theirs that is at work after that may abort the process. Where an error ends it, the
    groups stay: other ranks may never come to the end.
    """
    if _current is not None and not hasattr(sys, "last_value"):
        _current.close()
