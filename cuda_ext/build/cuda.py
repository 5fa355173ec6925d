"""Shared library of the CUDA operators: compile commands, and the description stored in a compiled library."""

import mmap
import platform
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from os import environ
from pathlib import Path
from typing import ClassVar

import torch

from cuda_ext.build import toolkit as _toolkit
from cuda_ext.build.native import (
    REFERENCE,
    NativeBuildError,
    NativeLibrary,
    compiler_problem,
    grouped,
    language,
    required_compiler,
    torch_folders,
)
from cuda_ext.build.toolkit import Toolkit

NAME = "cuda_operators"
# No -march=native: the library may run on another machine (ahead-of-time builds), and its host code only launches
# kernels.
HOST_FLAGS = (language(), "-O2", "-fPIC", "-DNDEBUG", "-fvisibility=hidden")
DEVICE_FLAGS = (
    "-std=c++17",
    "-O3",
    "-DNDEBUG",
    "-lineinfo",
    "--expt-relaxed-constexpr",
    "-Xcompiler=-fPIC,-fvisibility=hidden",
)
BINDING = "_bind"
"""End of the names of the sources that bind operators. Each has a namespace of its name: see `CudaLibrary.units`."""
_BINDING_FILES = 3
"""Files that the bindings are compiled in: each takes about as long as the slowest of the kernels."""
LIBRARIES = ("-lc10", "-lc10_cuda", "-ltorch_cpu", "-ltorch_cuda", "-ltorch")
_MARK = "ns_multigpu cuda_operators:"  # source_key.cpp writes it


@dataclass(frozen=True)
class CudaLibrary(NativeLibrary):
    """The CUDA operators: .cu files through nvcc, .cpp files (which see torch) through the C++ compiler.

    The result holds no Python and links the CUDA runtime statically, so it serves every Python and every CUDA that this
    torch comes with, on any processor of the same family.

    Attributes:
        toolkit: the CUDA compiler, or None where there is none.
        architectures: what to compile for, such as ("80", "90+PTX").
    """

    toolkit: Toolkit | None
    architectures: tuple[str, ...]

    files: ClassVar[str] = "files of the CUDA operators"
    duration: ClassVar[str] = "about two minutes on 2 cores for one kind of GPU"
    advice: ClassVar[str] = (
        "CUDA's compiler needs a C++ compiler that it knows (CXX names one), and the same torch that runs. "
        f"Or set {REFERENCE}."
    )

    def depends_on(self) -> list[str]:
        """Return all that the compiled library depends on in addition to the sources."""
        nvcc = "" if self.toolkit is None else self.toolkit.version
        parts = [*HOST_FLAGS, *DEVICE_FLAGS, torch.__version__, str(torch.compiled_with_cxx11_abi())]
        return [*parts, nvcc, ";".join(self.architectures), platform.machine()]

    def problem(self) -> str | None:
        """Return why this library cannot be compiled on this machine, with the remedy, or None."""
        if problem := _toolkit.toolkit_problem() or compiler_problem():
            return problem
        if not self.architectures:
            return (
                "There is no GPU in sight to compile the CUDA operators for: name its architecture, as in "
                "TORCH_CUDA_ARCH_LIST=9.0."
            )
        if old := [a for a in self.architectures if int(re.sub(r"\D", "", a)) < _toolkit.OLDEST_ARCHITECTURE]:
            return (
                f"The CUDA operators need a GPU of architecture sm_{_toolkit.OLDEST_ARCHITECTURE} (Ampere, 2020) or "
                f"newer, and this one is sm_{old[0]}. Use another, or set {REFERENCE}."
            )
        return None

    def compiler_name(self) -> str:
        """Return the compiler's name for messages."""
        names = ", ".join(f"sm_{name}" for name in self.architectures)
        return f"{self._nvcc().nvcc} (CUDA {self._nvcc().version}) for {names}"

    def compile_command(self, source: Path, object_: Path) -> list[str]:
        """Return the command that compiles one source."""
        if source.suffix == ".cu":
            return self._nvcc_command(source, object_)
        abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
        folders = [*torch_folders()[0], *self._nvcc().includes]
        includes = [f"-I{self.include}", *(f"-isystem{path}" for path in folders)]
        marks = [f'-DNSMG_BUILD_INFO="{self.info()}"'] if source.stem == "source_key" else []
        return [*required_compiler(), *HOST_FLAGS, abi, *marks, *includes, "-c", str(source), "-o", str(object_)]

    def units(self, folder: Path) -> tuple[Path, ...]:
        """Return the sources; those that bind operators are grouped."""
        bindings = [source for source in self.sources if source.stem.endswith(BINDING)]
        return (
            *grouped(bindings, _BINDING_FILES, folder), *(source for source in self.sources if source not in bindings)
        )  # fmt: skip

    def _nvcc_command(self, source: Path, object_: Path) -> list[str]:
        targets = [flag for name in self.architectures for flag in _target_flags(name)]
        threads = ["--threads=4"] if len(self.architectures) > 1 else []
        host = shlex.split(environ.get("CXX", ""))  # unless asked for, nvcc picks the g++ on PATH itself
        compiler = [f"-ccbin={host[-1]}"] if host else []
        command = [self._nvcc().nvcc, *DEVICE_FLAGS, *targets, *threads, *compiler, f"-I{self.include}"]
        return [*command, "-c", str(source), "-o", str(object_)]

    def link_command(self, objects: Sequence[Path], output: Path) -> list[str]:
        """Return the command that links the library. The CUDA runtime's symbols are hidden, since torch loads another
        runtime."""
        folders = [f"-L{path}" for path in torch_folders()[1]]
        inputs = [str(object_) for object_ in objects]
        runtime = [str(self._nvcc().runtime), "-ldl", "-lrt", "-lpthread", "-Wl,--exclude-libs,ALL"]
        return [*required_compiler(), "-shared", *inputs, *runtime, *folders, *LIBRARIES, "-o", str(output)]

    def info(self) -> str:
        """Return the description stored in the compiled library."""
        return (
            f"{_MARK} source={self.source_key()} torch={public_torch()} architectures={','.join(self.architectures)};"
        )

    def _nvcc(self) -> Toolkit:
        if self.toolkit is None:
            raise NativeBuildError(self.problem() or _toolkit.remedy())
        return self.toolkit


def public_torch() -> str:
    """Return torch's version without the part behind "+": what decides about its C++ interface."""
    return torch.__version__.split("+")[0]


def _target_flags(name: str) -> list[str]:
    number = name.removesuffix("+PTX")
    flags = [f"-gencode=arch=compute_{number},code=sm_{number}"]
    return [*flags, f"-gencode=arch=compute_{number},code=compute_{number}"] if name.endswith("+PTX") else flags


def prebuilt_problem(path: Path, library: CudaLibrary, gpus: Sequence[str]) -> str | None:
    """Return why a library compiled earlier cannot be used on this machine, or None. The file is read, not loaded.

    Args:
        path: the library.
        library: what it would be if it were compiled here.
        gpus: the architectures of the GPUs in sight.
    """
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            match = re.search(re.escape(_MARK.encode()) + rb" source=(\w+) torch=(\S+) architectures=(\S*);", data)
            found = [part.decode() for part in match.groups()] if match else None
    except (OSError, ValueError) as error:  # ValueError: an empty file cannot be mapped
        return f"{path} cannot be read ({error})."
    if found is None:
        return f"{path} is not a library of the CUDA operators."
    source, version, architectures = found
    if source != library.source_key():
        return f"{path} was compiled from other sources ({source}, these are {library.source_key()})."
    if version != public_torch():
        return f"{path} was compiled for torch {version}, and this is {public_torch()}."
    for gpu in gpus:
        if not _toolkit.serves(tuple(architectures.split(",")), gpu):
            return f"{path} was compiled for the architectures {architectures}, and a GPU here is sm_{gpu}."
    return None
