"""torch's compiler and its symbolic shapes, loaded by whoever really needs them.

`import torch` does not load `torch._dynamo` and what that stands on, but a little use of torch does: torchvision's
roi_align takes a function from it, and an optimizer's methods ask it not to compile them. That is a second or two of
every start, more on slow cores, and our methods compile nothing.

A checkpoint's library stands on torch.distributed.tensor, which takes a function from torch's symbolic shapes, as
`torch.broadcast_shapes` does. They load sympy: half a second, and 2.7 s where files are slow. Our shapes are numbers.

Until then modules stand in for them. They know what torch asks while nothing is compiled, and answer it: there is
nothing to do. Whatever else is asked of them loads what they stand for, which takes their places for good.
"""

import functools
import importlib
import sys
from collections.abc import Callable
from types import FunctionType, ModuleType
from typing import Any

_NAME, _UTILS, _RULES = "torch._dynamo", "torch._dynamo.utils", "torch._dynamo.trace_rules"
_AROUND, _SHAPES = "torch.fx.experimental", "symbolic_shapes"


def load_later() -> None:
    """From now on torch's compiler and its symbolic shapes are loaded when they are needed, unless they have been."""
    if _NAME not in sys.modules:
        rules = _StandIn(_RULES, clear_lru_cache=_nothing_yet(_RULES, "clear_lru_cache"))
        graph_break = _nothing_yet(_NAME, "graph_break")
        sys.modules[_NAME] = _StandIn(_NAME, disable=_disable, graph_break=graph_break, trace_rules=rules)
        sys.modules[_UTILS] = _StandIn(_UTILS, is_compile_supported=_is_compile_supported)
    name = f"{_AROUND}.{_SHAPES}"
    if name not in sys.modules:
        known = {function: _of_numbers(name, function, answer) for function, answer in _OF_NUMBERS.items()}
        sys.modules[name] = _StandIn(name, **known)
        setattr(importlib.import_module(_AROUND), _SHAPES, sys.modules[name])  # as an import of it would
        importlib.import_module(f"{_AROUND}._config")  # which it would, too


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
    """What a module stands in for, which is loaded now if it has not been."""
    for each in (_NAME, _UTILS) if name in (_NAME, _UTILS) else (name,):
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


_OF_NUMBERS: dict[str, Callable[[Any], Any]] = {
    "expect_true": lambda value: value,
    "guard_or_false": lambda value: value,
    "has_hint": lambda _: True,
    "is_nested_int": lambda _: False,
    "size_hint": lambda value: value,
    "statically_known_true": lambda value: value,
}
"""What functions of symbolic shapes say of what is no symbol."""


def _of_numbers(module: str, name: str, answer: Callable[[Any], Any]) -> Callable[..., Any]:
    def call(value: Any, *args: Any, **options: Any) -> Any:
        plain = type(value) in (bool, int)
        return answer(value) if plain else getattr(_real(module), name)(value, *args, **options)

    return call
