"""Backend of the operators on CUDA: our kernels, or gsplat 1.4.0's. The first CUDA call selects it.

Environment variables:

- NS_MULTIGPU_CUDA: `native` (default), our kernels; or `gsplat`, gsplat 1.4.0's kernels with torch around them: slower,
  for machines without nvcc and for comparisons. It lacks what only our kernels do (the fused forward and update).
- NS_MULTIGPU_CUDA_LIBRARY: a compiled library to load as it is (`python -m cuda_ext build --cuda --output DIR`). It
  must be of these sources, this torch and these GPUs.

Our kernels come from that library, else from the one that an ahead-of-time build put into this package
(`NS_MULTIGPU_BUILD_CUDA=1 pip install --no-build-isolation .`), else they are compiled with nvcc for the GPUs in sight
and kept in the cache folder (`cuda_ext.build.native`).
"""

import os
import threading
from pathlib import Path
from typing import Literal, cast

from cuda_ext.build import toolkit as _toolkit
from cuda_ext.build.cuda import NAME, CudaLibrary, prebuilt_problem
from cuda_ext.build.native import NativeBuildError, load_library
from cuda_ext.dispatch.gsplat_kernels import serve_with_gsplat
from cuda_ext.dispatch.library import LIBRARY

Mode = Literal["native", "gsplat"]

PACKAGED = Path(__file__).parents[1] / f"{NAME}.so"
_CSRC = Path(__file__).parents[1] / "csrc"
_lock = threading.Lock()
_native: Mode | None = None


def mode() -> Mode:
    """Return the selected backend, or the one that NS_MULTIGPU_CUDA requests if no call has selected it.

    Raises:
        ValueError: the variable holds something else than native or gsplat.
    """
    if _native is not None:
        return _native
    value = os.environ.get("NS_MULTIGPU_CUDA") or "native"
    if value not in ("native", "gsplat"):
        raise ValueError(f"NS_MULTIGPU_CUDA is {value!r}; it must be native or gsplat.")
    return cast(Mode, value)


def library(architectures: tuple[str, ...] | None = None) -> CudaLibrary:
    """Return the CUDA operators: csrc/cuda in one library, for these architectures.

    Args:
        architectures: such as ("80", "90+PTX"); None: those of the GPUs in sight, else of TORCH_CUDA_ARCH_LIST.
    """
    if architectures is None:
        architectures = _toolkit.visible_architectures() or _toolkit.listed_architectures()
    sources = sorted((_CSRC / "cuda").rglob("*.cu"), key=lambda path: (-path.stat().st_size, path.name))
    sources += sorted((_CSRC / "cuda").rglob("*.cpp"))  # behind the .cu files, which take longer
    headers = [*(_CSRC / "cuda").rglob("*.h"), *(_CSRC / "common").glob("*.h"), _CSRC / "cpu" / "common" / "patches.h"]
    return CudaLibrary(NAME, tuple(sources), tuple(sorted(headers)), _CSRC, _toolkit.find_toolkit(), architectures)


def ahead_of_time_library() -> CudaLibrary:
    """Return the CUDA operators for every GPU of `_toolkit.AHEAD_OF_TIME`, or for TORCH_CUDA_ARCH_LIST.

    Raises:
        NativeBuildError: there is no nvcc.
    """
    toolkit = _toolkit.find_toolkit()
    if toolkit is None:
        raise NativeBuildError(_toolkit.toolkit_problem() or _toolkit.remedy())
    return library(_toolkit.ahead_of_time_architectures(toolkit))


def _named() -> Path | None:
    named = os.environ.get("NS_MULTIGPU_CUDA_LIBRARY")
    return Path(named).expanduser() if named else None


def _prebuilt(ours: CudaLibrary) -> Path | None:
    """Return the library compiled earlier that fits, or None.

    Raises:
        NativeBuildError: NS_MULTIGPU_CUDA_LIBRARY names one that does not fit.
    """
    gpus = _toolkit.visible_architectures()
    if named := _named():
        if problem := prebuilt_problem(named, ours, gpus):
            raise NativeBuildError(
                f"NS_MULTIGPU_CUDA_LIBRARY: {problem} Compile it again from this version with `python -m cuda_ext "
                "build --cuda --output DIR`, or unset the variable."
            )
        return named
    if PACKAGED.exists() and prebuilt_problem(PACKAGED, ours, gpus) is None:
        return PACKAGED
    return None


def problem() -> str | None:
    """Return why the CUDA operators cannot run on this machine, with the remedy, or None. Nothing is compiled."""
    if mode() == "gsplat" or _native is not None:
        return None
    ours = library()
    try:
        if _prebuilt(ours) is not None:
            return None
    except NativeBuildError as error:
        return str(error)
    if ours.toolkit is not None and ours.architectures and ours.path().exists():
        return None
    return ours.problem()


def build() -> Path:
    """Return the library of our kernels, compiled now unless that has been done.

    Raises:
        NativeBuildError: it cannot be compiled; the message says how to mend it.
    """
    ours = library()
    return _prebuilt(ours) or ours.build()


def load() -> None:
    """Make the operators callable on CUDA tensors, once per process.

    Raises:
        NativeBuildError: our kernels cannot be compiled or loaded, or gsplat's are not there.
    """
    global _native
    if _native is not None:
        return
    with _lock:
        if _native is not None:
            return
        chosen = mode()
        if chosen == "gsplat":
            serve_with_gsplat(LIBRARY)
        else:
            remedy = "NS_MULTIGPU_CUDA=gsplat to be served by gsplat 1.4.0's kernels (slower)"
            load_library(build(), "The CUDA operators", remedy)
        _native = chosen
