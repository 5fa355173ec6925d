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
for _schema in SCHEMAS:
    LIBRARY.define(_schema)


def fake(name: str) -> Callable[[_F], _F]:
    """Register what is decorated as the operator's fake: see `torch.library.register_fake`.

    torch notes in which file that is called, and goes through all loaded modules for each file that it has not met.
    Here it is one file for all operators; one each took a start 0.1 s, more where files are slow.
    """

    def register(function: _F) -> _F:
        torch.library.register_fake(f"{NAMESPACE}::{name}", function, lib=LIBRARY)
        return function

    return register
