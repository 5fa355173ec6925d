"""gsplat 1.4.0's low-level kernels, imported when a CUDA operator first runs: gsplat may compile them then.

Modules that have something to serve with them say so when they are imported (`in_gsplat_mode`).
"""

import sys
from collections.abc import Callable
from contextlib import nullcontext
from importlib import import_module
from typing import Any

from torch.library import Library

from cuda_ext.build.native import NativeBuildError, cache_folder, locked

_BACKEND = "gsplat.cuda._backend"
Register = Callable[[Library], None]
_registrations: list[Register] = []


def in_gsplat_mode(register: Register) -> Register:
    """Decorate a function that registers operators for CUDA, to be called where gsplat's kernels serve."""
    _registrations.append(register)
    return register


def serve_with_gsplat(library: Library) -> None:
    """Register gsplat's kernels, and torch's operators around them, for CUDA.

    Raises:
        NativeBuildError: gsplat is missing, or has no kernels; then nothing is registered.
    """
    gsplat_kernels()
    for register in _registrations:
        register(library)


def gsplat_kernels() -> Any:
    """Return gsplat's module of compiled kernels.

    One process compiles them at a time: another that imports gsplat would delete its folder.

    Raises:
        NativeBuildError: gsplat is missing, or holds no kernels because there is no CUDA toolkit to compile them.
    """
    try:
        with nullcontext() if _BACKEND in sys.modules else locked(cache_folder() / "gsplat.lock"):
            kernels = import_module(_BACKEND)._C
    except ImportError as error:
        raise NativeBuildError(
            f"On CUDA the operators run through gsplat 1.4.0, which does not import ({error}): "
            "`pip install gsplat==1.4.0`."
        ) from error
    if kernels is None:
        raise NativeBuildError(
            "gsplat has no CUDA kernels here, as no CUDA toolkit was found to compile them: put `nvcc` on PATH (CUDA "
            "toolkit of torch.version.cuda), or install a compiled gsplat wheel (https://docs.gsplat.studio/whl). "
            "NS_MULTIGPU_OPS=reference goes on with the slow pure-torch operators."
        )
    return kernels
