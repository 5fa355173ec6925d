"""torch's compiler, loaded by whoever really needs it.

`import torch` does not load `torch._dynamo` and what that stands on, but a little use of torch does: torchvision's
roi_align takes a function from it, and an optimizer's methods ask it not to compile them. That is a second or two of
every start, more on slow cores, and our methods compile nothing.

Until then modules stand in for it. They know what torch asks while nothing is compiled, and answer it: there is nothing
to do. Whatever else is asked of them loads the compiler, which takes their places for good.
"""

import functools
import importlib
import sys
from collections.abc import Callable
from types import FunctionType, ModuleType
from typing import Any

_NAME, _UTILS, _RULES = "torch._dynamo", "torch._dynamo.utils", "torch._dynamo.trace_rules"


def load_later() -> None:
    """From now on torch's compiler is loaded when it is needed, unless it has been."""
    if _NAME not in sys.modules:
        rules = _StandIn(_RULES, clear_lru_cache=_nothing_yet(_RULES, "clear_lru_cache"))
        graph_break = _nothing_yet(_NAME, "graph_break")
        sys.modules[_NAME] = _StandIn(_NAME, disable=_disable, graph_break=graph_break, trace_rules=rules)
        sys.modules[_UTILS] = _StandIn(_UTILS, is_compile_supported=_is_compile_supported)


class _StandIn(ModuleType):
    def __init__(self, name: str, **known: Any) -> None:
        super().__init__(name)
        vars(self).update(known)

    def __getattr__(self, name: str) -> Any:
        # Whoever goes through all modules asks for such names, `__file__` above all. Who imports a module of the
        # compiler's asks for `__path__`.
        if name.startswith("__") and (self.__name__, name) != (_NAME, "__path__"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        return getattr(_real(self.__name__), name)


def _real(name: str) -> ModuleType:
    """A module of the compiler, which is loaded now if it has not been."""
    for each in (_NAME, _UTILS):
        if isinstance(sys.modules.get(each), _StandIn):
            del sys.modules[each]
    return importlib.import_module(name)


def _loaded() -> bool:
    return not isinstance(sys.modules.get(_NAME), _StandIn)


def _disable(fn: Any = None, *args: Any, **options: Any) -> Any:
    """See `torch._dynamo.disable`. torch keeps what this returns; so it asks for the compiler in every call."""
    if not isinstance(fn, FunctionType):
        return _real(_NAME).disable(fn, *args, **options)
    disabled = functools.cache(lambda: _real(_NAME).disable(fn, *args, **options))

    @functools.wraps(fn)
    def call(*given: Any, **named: Any) -> Any:
        return (disabled() if _loaded() else fn)(*given, **named)

    return call


def _nothing_yet(module: str, name: str) -> Callable[..., None]:
    """A function of the compiler's that has nothing to do before it is loaded."""

    def call(*args: Any, **options: Any) -> None:
        if _loaded():
            getattr(_real(module), name)(*args, **options)

    return call


def _is_compile_supported(device_type: Any) -> Any:
    return _real(_UTILS).is_compile_supported(device_type)
