"""Decides what serves an operator: our compiled CPU or CUDA kernels, or the pure-torch reference.

Nothing is compiled at import. The first operator that needs compiled kernels builds them (`cuda_ext.build.native`), or
`build_native()` does so ahead of time (`python -m cuda_ext`). The environment variable NS_MULTIGPU_OPS chooses:

- `auto` (default): the compiled kernels; on CPU, on a machine without a compiler, the reference with one warning.
- `native`: the compiled kernels or an error.
- `reference`: always the pure-torch reference, on CUDA too.

The library for CUDA: `cuda_ext.dispatch.cuda`. For developers: NS_MULTIGPU_OPS_ONLY="cull,project" compiles only those
files of csrc/cpu; the other operators then have no CPU kernel.
"""

import os
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Literal, cast

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from cuda_ext.build import native as _build
from cuda_ext.build.native import NativeLibrary
from cuda_ext.dispatch import cuda as _cuda

Mode = Literal["auto", "native", "reference"]

_CSRC = Path(__file__).parents[1] / "csrc"
_forced: ContextVar[bool] = ContextVar("ns_multigpu_reference_forced", default=False)
_lock = threading.Lock()
_loaded: Path | None = None
_warned = False


def library() -> NativeLibrary:
    """Return the CPU operators: every .cpp file of csrc/cpu in one library."""
    sources = sorted((_CSRC / "cpu").rglob("*.cpp"))
    if only := os.environ.get("NS_MULTIGPU_OPS_ONLY"):
        sources = [path for path in sources if path.stem in only.split(",")]
    headers = sorted((*(_CSRC / "cpu").rglob("*.h"), *(_CSRC / "common").glob("*.h")))
    return NativeLibrary("cpu_operators", tuple(sources), tuple(headers), _CSRC)


def mode() -> Mode:
    """Return the mode that NS_MULTIGPU_OPS requests.

    Raises:
        ValueError: the variable holds something else than auto, native or reference.
    """
    value = os.environ.get("NS_MULTIGPU_OPS") or "auto"
    if value not in ("auto", "native", "reference"):
        raise ValueError(f"NS_MULTIGPU_OPS is {value!r}; it must be auto, native or reference.")
    return cast(Mode, value)


@contextmanager
def use_reference() -> Iterator[None]:
    """Run every operator on the pure-torch reference inside the `with` block, for this thread."""
    token = _forced.set(True)
    try:
        yield
    finally:
        _forced.reset(token)


def reference_forced() -> bool:
    """Return whether `use_reference` or NS_MULTIGPU_OPS=reference has switched the native operators off."""
    return _forced.get() or mode() == "reference"


def compiler_problem(device_type: str = "cpu") -> str | None:
    """Return why the operators of "cpu" or "cuda" cannot be compiled on this machine, with the remedy, or None.

    None too where they are not needed: already compiled, or NS_MULTIGPU_OPS=reference.
    Compiles nothing, so a front end can ask before training starts.
    """
    if device_type == "cuda":
        return None if reference_forced() else _cuda.problem()
    if reference_forced() or _loaded is not None or library().path().exists():
        return None
    return _build.compiler_problem()


def backend(device_type: str = "cpu") -> Literal["native", "reference"]:
    """Return the backend of the operators on tensors of "cpu" or "cuda". Nothing is compiled."""
    if reference_forced() or (device_type != "cuda" and mode() == "auto" and compiler_problem() is not None):
        return "reference"
    return "native"


def build_native(device_type: str = "cpu") -> Path:
    """Compile the operators of "cpu" or "cuda" now unless that has been done, and return the library's path.

    Raises:
        NativeBuildError: they cannot be compiled; the message says how to mend it.
    """
    return _cuda.build() if device_type == "cuda" else library().build()


def load_native() -> bool:
    """Make the compiled CPU operators callable. Return False if the reference is used instead.

    Raises:
        NativeBuildError: compiling or loading failed, or there is no compiler and NS_MULTIGPU_OPS=native.
    """
    global _loaded, _warned
    if reference_forced():
        return False
    if _loaded is not None:
        return True
    with _lock:
        if _loaded is not None:
            return True
        if mode() == "auto" and (problem := compiler_problem()):
            if not _warned:
                _warned = True
                warnings.warn(
                    f"{problem} Until then the pure-torch reference serves: tens of times slower.",
                    RuntimeWarning,
                    stacklevel=3,
                )
            return False
        path = build_native()
        _build.load_library(path, "The compiled operators", _build.REFERENCE)
        _loaded = path
    return True


def compiled_serves(tensor: Tensor) -> bool:
    """Return whether an operator on `tensor`'s device goes through torch.ops.ns_multigpu (else: through the reference).

    Raises:
        NativeBuildError: as `load_native` for CPU tensors, and as `cuda_ext.dispatch.cuda.load` for CUDA tensors.
    """
    kind = tensor.device.type
    if kind == "cpu" or (kind == "multigpu" and torch.ops.multigpu.is_host()):
        return load_native()
    if reference_forced():
        return False
    if kind in ("cuda", "multigpu") and not isinstance(tensor, FakeTensor):  # a fake one needs no kernel
        _cuda.load()
    return kind in ("cuda", "meta", "multigpu")


def kernels_serve(tensor: Tensor) -> bool:
    """Return whether our CUDA kernels are used. Otherwise torch's operators compute the same in several launches.

    Raises:
        NativeBuildError: they are, and cannot be compiled.
    """
    return tensor.device.type == "cuda" and compiled_serves(tensor)
