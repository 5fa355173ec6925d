"""Defines the operators: torch.ops.ns_multigpu.* exist from here on, with or without a compiler."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch.library
from torch.library import Library

from cuda_ext.dispatch.schema import SCHEMAS

_F = TypeVar("_F", bound=Callable[..., Any])

NAMESPACE = "ns_multigpu"

# Kept for the life of the process: the definitions go when this object goes.
LIBRARY = Library(NAMESPACE, "DEF")


def _define(text: str) -> None:
    """Define an operator. Register its fake if it returns nothing, or only gradients v_X of its inputs X."""
    LIBRARY.define(text)
    schema = torch._C.parse_schema(f"{NAMESPACE}::{text}")
    places = {f"v_{argument.name}": k for k, argument in enumerate(schema.arguments)}
    if not all(returned.name in places for returned in schema.returns):
        return
    wanted = [places[returned.name] for returned in schema.returns]

    def like_inputs(*inputs: Any, **_: Any) -> Any:
        found = tuple(torch.empty_like(inputs[k], memory_format=torch.contiguous_format) for k in wanted)
        return found[0] if len(found) == 1 else found or None

    torch.library.register_fake(schema.name, like_inputs, lib=LIBRARY)


for _schema in SCHEMAS:
    _define(_schema)


def serve_cpu(composed: Any, *names: str) -> None:
    """Register a module's functions as the CPU implementations of the operators of the same names."""
    for name in names:
        LIBRARY.impl(name, getattr(composed, name), "CPU")


def fake(name: str) -> Callable[[_F], _F]:
    """Register the decorated function as an operator's fake: see `torch.library.register_fake`.

    Operators that autograd calls have one. Nothing traces those of fused steps alone. torch records the calling file,
    and for each new file iterates over all loaded modules. So all operators register from this one file; otherwise a
    start took 0.1 s longer, more with slow files.
    """

    def register(function: _F) -> _F:
        torch.library.register_fake(f"{NAMESPACE}::{name}", function, lib=LIBRARY)
        return function

    return register
