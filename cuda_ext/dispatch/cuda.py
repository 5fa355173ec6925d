"""The operators' library for CUDA: finds or compiles it, and loads it with the first CUDA call.

The environment variable NS_MULTIGPU_CUDA_LIBRARY names a compiled library to load as it is (`python -m cuda_ext build
--cuda --output DIR`). It must be of these sources, this torch and these GPUs. Without it the library is the one that an
ahead-of-time build put into this package (`NS_MULTIGPU_BUILD_CUDA=1 pip install --no-build-isolation .`). Otherwise it
is compiled with nvcc for the GPUs in sight and kept in the cache folder (`cuda_ext.build.native`).
"""

import os
import threading
from pathlib import Path

from cuda_ext.build import toolkit as _toolkit
from cuda_ext.build.cuda import NAME, CudaLibrary, prebuilt_problem
from cuda_ext.build.native import REFERENCE, NativeBuildError, load_library

PACKAGED = Path(__file__).parents[1] / f"{NAME}.so"
_CSRC = Path(__file__).parents[1] / "csrc"
_lock = threading.Lock()
_loaded = False


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
        NativeBuildError: NS_MULTIGPU_CUDA_LIBRARY names one that does not fit, or NS_MULTIGPU_CUDA is set.
    """
    if value := os.environ.get("NS_MULTIGPU_CUDA"):
        raise NativeBuildError(
            f"NS_MULTIGPU_CUDA={value}: the variable was removed, since our kernels serve on CUDA. Unset it, or set "
            f"{REFERENCE}."
        )
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
    if _loaded:
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
        NativeBuildError: they cannot be compiled or loaded.
    """
    global _loaded
    with _lock:
        if not _loaded:
            load_library(build(), "The CUDA operators", REFERENCE)
            _loaded = True
