"""Finds nvcc, and names what it compiles for: the CUDA toolkit and the GPUs' architectures."""

import contextlib
import ctypes
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from cuda_ext.build.native import REFERENCE

OLDEST_ARCHITECTURE = 80
OLDEST_TOOLKIT = (11, 8)  # the first that knows sm_89 and sm_90
# What a library compiled ahead of time serves, as far as nvcc knows it; the last also as PTX, for newer GPUs.
AHEAD_OF_TIME = ("80", "86", "89", "90", "100")


def remedy() -> str:
    """Return the remedy for a machine that cannot compile CUDA code."""
    major, minor = _torch_cuda()
    packages = " ".join(f'"nvidia-cuda-{name}=={major}.{minor}.*"' for name in ("nvcc", "cccl", "runtime"))
    pip = f"`pip install {packages}`, " if major >= 13 else ""  # before 13 the wheels held no whole toolkit
    return (
        f"Install CUDA's compiler ({pip}`conda install cuda-nvcc cuda-cudart-dev cuda-cccl`, or NVIDIA's CUDA toolkit) "
        "and have nvcc on PATH or its folder in CUDA_HOME; or name a library compiled before (`python -m cuda_ext "
        f"build --cuda --output DIR`) in NS_MULTIGPU_CUDA_LIBRARY; or set {REFERENCE}."
    )


@dataclass(frozen=True)
class Toolkit:
    """One installed CUDA compiler.

    Attributes:
        nvcc: its path.
        version: as printed, such as "13.0.88".
        includes: folders of CUDA's headers.
        runtime: the static CUDA runtime library, or None where the toolkit lacks it.
    """

    nvcc: str
    version: str
    includes: tuple[str, ...]
    runtime: str | None

    @property
    def release(self) -> tuple[int, int]:
        """Major and minor version."""
        major, minor = self.version.split(".")[:2]
        return int(major), int(minor)


def candidates() -> Iterator[str]:
    """Yield existing nvcc paths in order of preference."""
    folders = [os.environ.get(name) for name in ("CUDA_HOME", "CUDA_PATH")]
    paths = [Path(home) / "bin" / "nvcc" for home in folders if home]
    if on_path := shutil.which("nvcc"):
        paths.append(Path(on_path))
    packages = Path(torch.__file__).parents[1] / "nvidia"  # the wheels that torch itself came with
    paths += [packages / name / "bin" / "nvcc" for name in (f"cu{_torch_cuda()[0]}", "cuda_nvcc")]
    paths.append(Path("/usr/local/cuda/bin/nvcc"))
    return (str(path) for path in dict.fromkeys(paths) if os.access(path, os.X_OK))


def _torch_cuda() -> tuple[int, int]:
    version = torch.version.cuda
    return (int(version.split(".")[0]), int(version.split(".")[1])) if version else (0, 0)


def _newest_major() -> int:
    """Return the newest CUDA whose programs run here: the driver's, or torch's if the driver does not report it."""
    version = ctypes.c_int(0)
    with contextlib.suppress(OSError):
        if ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version)) == 0 and version.value > 0:
            return version.value // 1000
    return _torch_cuda()[0]


def find_toolkit() -> Toolkit | None:
    """Return the first toolkit that works and that the driver can serve, or None."""
    for nvcc in candidates():
        found = _inspect(nvcc)
        if found is not None and _refused(found) is None:
            return found
    return None


def _refused(toolkit: Toolkit) -> str | None:
    """Return why a toolkit cannot be used, or None."""
    if toolkit.release < OLDEST_TOOLKIT:
        return f"{toolkit.nvcc} is CUDA {toolkit.version}, older than {OLDEST_TOOLKIT[0]}.{OLDEST_TOOLKIT[1]}"
    if toolkit.release[0] > _newest_major():
        return f"{toolkit.nvcc} is CUDA {toolkit.version}, newer than the CUDA {_newest_major()} that runs here"
    if not any((Path(folder) / "cuda_runtime.h").is_file() for folder in toolkit.includes):
        return f"{toolkit.nvcc} (CUDA {toolkit.version}) lacks the header cuda_runtime.h (nvidia-cuda-runtime)"
    if not any((Path(folder) / "cub" / "cub.cuh").is_file() for folder in toolkit.includes):
        return f"{toolkit.nvcc} (CUDA {toolkit.version}) lacks the headers of CUB (nvidia-cuda-cccl)"
    if toolkit.runtime is None:
        return f"{toolkit.nvcc} (CUDA {toolkit.version}) lacks libcudart_static.a (nvidia-cuda-runtime)"
    return None


def toolkit_problem() -> str | None:
    """Return why no CUDA code can be compiled on this machine, with the remedy, or None."""
    if torch.version.cuda is None:
        return "This torch is built without CUDA. Install a CUDA build of torch (https://pytorch.org/get-started)."
    if find_toolkit() is not None:
        return None
    reasons = []
    for nvcc in candidates():
        found = _inspect(nvcc)
        reasons.append((found and _refused(found)) or f"{nvcc} does not run")
    said = "; ".join(reasons) or "no nvcc in CUDA_HOME, on PATH or in torch's pip packages"
    return f"The CUDA operators cannot be compiled: {said}. {remedy()}"


@lru_cache(maxsize=8)
def _inspect(nvcc: str) -> Toolkit | None:
    """Ask an nvcc, which may be a wrapper script, for its version and folders."""
    banner = _ask(nvcc, "--version")
    version = re.search(r"\bV(\d+\.\d+(?:\.\d+)*)", banner)
    if version is None:
        return None
    answer = _ask(nvcc, "--dryrun", "-c", "-x", "cu", os.devnull, "-o", os.devnull)
    lines = dict(re.findall(r"^#\$ (\w+)=(.*)$", answer, flags=re.MULTILINE))
    top = Path(lines.get("TOP", str(Path(os.path.realpath(nvcc)).parents[1])))
    nvcc_includes = shlex.split(f"{lines.get('INCLUDES', '')} {lines.get('SYSTEM_INCLUDES', '')}")
    includes = [word.removeprefix("-I") for word in nvcc_includes if word != "-isystem"]
    nvcc_libraries = shlex.split(lines.get("LIBRARIES", ""))
    libraries = [word.removeprefix("-L") for word in nvcc_libraries]
    includes += [str(top / "include"), str(top / "include" / "cccl")]
    libraries += [str(top / "lib64"), str(top / "lib")]
    runtimes = (Path(folder) / "libcudart_static.a" for folder in libraries)
    runtime = next((str(path) for path in runtimes if path.is_file()), None)
    return Toolkit(nvcc, version[1], tuple(i for i in dict.fromkeys(includes) if Path(i).is_dir()), runtime)


def _ask(nvcc: str, *arguments: str) -> str:
    try:
        done = subprocess.run([nvcc, *arguments], capture_output=True, text=True, check=False, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout + done.stderr


def visible_architectures() -> tuple[str, ...]:
    """Return the architectures of the GPUs that torch sees, such as ("90",), without creating a CUDA context.

    Where all GPUs of the machine are alike the driver is not asked: to start it takes a quarter of a second for each
    GPU, and `ns-train` has no other use for it where several workers are to come.
    """
    if not torch.cuda.device_count():
        return ()
    found = set[tuple[int, int]]() if torch.cuda.is_initialized() else _managed_architectures()
    if len(found) != 1:
        if not torch.cuda.is_available():
            return ()
        found = {torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())}
    return tuple(str(10 * major + minor) for major, minor in sorted(found))


def _managed_architectures() -> set[tuple[int, int]]:
    """Return the architectures of all GPUs of this machine, visible or not, from the driver's management library
    (NVML). Empty without it."""
    found = set[tuple[int, int]]()
    try:
        nvml, count = _nvml(), ctypes.c_uint()
        if nvml.nvmlInit_v2() or nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)):
            return set()
        for number in range(count.value):
            gpu, major, minor = ctypes.c_void_p(), ctypes.c_int(), ctypes.c_int()
            if nvml.nvmlDeviceGetHandleByIndex_v2(number, ctypes.byref(gpu)):
                return set()
            if nvml.nvmlDeviceGetCudaComputeCapability(gpu, ctypes.byref(major), ctypes.byref(minor)):
                return set()
            found.add((major.value, minor.value))
    except (OSError, AttributeError):  # there is none, or it is too old
        return set()
    return found


def _nvml() -> Any:
    return ctypes.CDLL("libnvidia-ml.so.1")


def listed_architectures() -> tuple[str, ...]:
    """Return the architectures in TORCH_CUDA_ARCH_LIST ("8.0;9.0+PTX" is ("80", "90+PTX")) that are at least sm_80.

    Raises:
        ValueError: an entry is not of the form 9.0, 9.0a or 9.0+PTX.
    """
    entries = re.split(r"[;,\s]+", os.environ.get("TORCH_CUDA_ARCH_LIST", "").strip())
    found = []
    for entry in filter(None, entries):
        match = re.fullmatch(r"(\d+)\.(\d)([af]?)(\+PTX)?", entry)
        if match is None:
            raise ValueError(f"TORCH_CUDA_ARCH_LIST holds {entry!r}; write architectures as in 8.0;9.0+PTX.")
        if int(match[1] + match[2]) >= OLDEST_ARCHITECTURE:
            found.append(match[1] + match[2] + match[3] + (match[4] or ""))
    return tuple(dict.fromkeys(found))


def ahead_of_time_architectures(toolkit: Toolkit) -> tuple[str, ...]:
    """Return TORCH_CUDA_ARCH_LIST, or else all of `AHEAD_OF_TIME` that this nvcc supports."""
    known = set(re.findall(r"compute_(\d+)", _ask(toolkit.nvcc, "--list-gpu-arch")))
    default = [name for name in AHEAD_OF_TIME if name in known]
    return listed_architectures() or (*default[:-1], f"{default[-1]}+PTX")


def serves(architectures: tuple[str, ...], gpu: str) -> bool:
    """Return whether a library compiled for `architectures` runs on a GPU of architecture `gpu` (both as in "90")."""
    for name in architectures:
        number, ptx = int(re.sub(r"\D", "", name)), name.endswith("+PTX")
        if "a" in name or "f" in name:
            if number == int(gpu):
                return True
        elif number <= int(gpu) and (ptx or number // 10 == int(gpu) // 10):
            return True
    return False
