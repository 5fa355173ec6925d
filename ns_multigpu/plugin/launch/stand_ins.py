"""Modules that are loaded when something is asked of them, not when they are imported."""

import importlib
import importlib.util
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

_LOADS = ("__path__", "__version__")
"""Whoever goes through all modules asks each for names of this kind, `__file__` above all. Who imports a package's
module asks for the first of these, who looks which release a package is for the second."""


class StandIn(ModuleType):
    """Stands in for a module in `sys.modules` until something is asked of it that it does not know.

    Then the module is loaded and takes its place for good. Whoever has imported the stand-in may keep it: what is asked
    of it is asked of the module.

    Args:
        name: of the module.
        package: whether others are in it.
        together: the names of stand-ins that give way with it, for whoever loads it loads these.
        loaded: called with the module once it has been loaded.
        known: what it knows.
    """

    def __init__(
        self,
        name: str,
        *,
        package: bool = False,
        together: Sequence[str] = (),
        loaded: Callable[[ModuleType], None] | None = None,
        **known: Any,
    ) -> None:
        super().__init__(name)
        vars(self).update(known, _package=package, _together=(name, *together), _when_loaded=loaded)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and not (self._package and name in _LOADS):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        return getattr(_load(self), name)


def stands_in(name: str) -> bool:
    """Whether a stand-in is in the place of the module of this name."""
    return isinstance(sys.modules.get(name), StandIn)


def real(name: str) -> ModuleType:
    """The module of a name, which is loaded now if it has not been."""
    there = sys.modules.get(name)
    return _load(there) if isinstance(there, StandIn) else importlib.import_module(name)


def stand_in_for(package: StandIn, *modules: StandIn) -> None:
    """Puts stand-ins in the places of a package and of modules in it, unless it has been loaded or is not there."""
    name = package.__name__
    if name in sys.modules or (spec := importlib.util.find_spec(name)) is None:
        return
    package.__spec__ = spec  # for whoever looks whether it is there
    for one in (package, *modules):
        sys.modules[one.__name__] = one


def _load(stand_in: StandIn) -> ModuleType:
    said = vars(stand_in)
    for name in said["_together"]:
        if stands_in(name):
            del sys.modules[name]
    module = importlib.import_module(stand_in.__name__)
    loaded, said["_when_loaded"] = said["_when_loaded"], None
    if loaded is not None:
        loaded(module)
    return module
