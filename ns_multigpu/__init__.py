"""Trains one 3D Gaussian Splatting model on several GPUs: a plugin for Nerfstudio and gsplat, and a library.

The library (`render`, `Step`, `make_strategy`, `World`) needs torch and no nerfstudio. It is imported when it is first
used, so that `import ns_multigpu` stays cheap.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ns_multigpu._moved import know_old_names

if TYPE_CHECKING:
    from ns_multigpu.api import Step as Step
    from ns_multigpu.api import World as World
    from ns_multigpu.api import make_strategy as make_strategy
    from ns_multigpu.api import render as render

__version__ = "0.1.0"
_LIBRARY = ("Step", "World", "make_strategy", "render")


def __getattr__(name: str) -> Any:
    if name not in _LIBRARY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("ns_multigpu.api"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_LIBRARY])


know_old_names()
