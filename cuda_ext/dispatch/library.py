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
    """Define an operator. One that returns nothing, or gradients v_X of its inputs X alone, has its fake, too."""
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
    """Register functions of those names of a module as what operators do on a CPU."""
    for name in names:
        LIBRARY.impl(name, getattr(composed, name), "CPU")


def fake(name: str) -> Callable[[_F], _F]:
    """Register what is decorated as the operator's fake: see `torch.library.register_fake`.

    Operators that autograd calls have one. Nothing traces those of fused steps alone.

    torch notes in which file that is called, and goes through all loaded modules for each file that it has not met.
    Here it is one file for all operators; one each took a start 0.1 s, more where files are slow.
    """

    def register(function: _F) -> _F:
        torch.library.register_fake(f"{NAMESPACE}::{name}", function, lib=LIBRARY)
        return function

    return register
