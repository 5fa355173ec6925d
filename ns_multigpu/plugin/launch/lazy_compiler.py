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
from types import FunctionType
from typing import Any

from ns_multigpu.plugin.launch.stand_ins import StandIn, real, stands_in

_NAME, _UTILS, _RULES = "torch._dynamo", "torch._dynamo.utils", "torch._dynamo.trace_rules"
_AROUND, _SHAPES = "torch.fx.experimental", "symbolic_shapes"


def load_later() -> None:
    """From now on torch's compiler and its symbolic shapes are loaded when they are needed, unless they have been."""
    if _NAME not in sys.modules:
        sys.modules[_NAME] = StandIn(
            _NAME,
            package=True,
            together=[_UTILS],
            disable=_disable,
            graph_break=_nothing_yet(_NAME, "graph_break"),
            trace_rules=StandIn(_RULES, clear_lru_cache=_nothing_yet(_RULES, "clear_lru_cache")),
        )
        sys.modules[_UTILS] = StandIn(_UTILS, together=[_NAME], is_compile_supported=_is_compile_supported)
    name = f"{_AROUND}.{_SHAPES}"
    if name not in sys.modules:
        known: dict[str, Any] = {
            function: _of_numbers(name, function, answer) for function, answer in _OF_NUMBERS.items()
        }
        sys.modules[name] = StandIn(name, **known)
        setattr(importlib.import_module(_AROUND), _SHAPES, sys.modules[name])  # as an import of it would
        importlib.import_module(f"{_AROUND}._config")  # which it would, too


def _loaded() -> bool:
    return not stands_in(_NAME)


def _disable(fn: Any = None, *args: Any, **options: Any) -> Any:
    """See `torch._dynamo.disable`. torch keeps what this returns; so it asks for the compiler in every call."""
    if not isinstance(fn, FunctionType):
        return real(_NAME).disable(fn, *args, **options)
    disabled = functools.cache(lambda: real(_NAME).disable(fn, *args, **options))

    @functools.wraps(fn)
    def call(*given: Any, **named: Any) -> Any:
        return (disabled() if _loaded() else fn)(*given, **named)

    return call


def _nothing_yet(module: str, name: str) -> Callable[..., None]:
    """A function of the compiler's that has nothing to do before it is loaded."""

    def call(*args: Any, **options: Any) -> None:
        if _loaded():
            getattr(real(module), name)(*args, **options)

    return call


def _is_compile_supported(device_type: Any) -> Any:
    return real(_UTILS).is_compile_supported(device_type)


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
        return answer(value) if plain else getattr(real(module), name)(value, *args, **options)

    return call
