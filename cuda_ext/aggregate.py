"""The library of the aggregate device: csrc/aggregate, a backend of torch without kernels of its own."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import ClassVar

import torch

from cuda_ext.build.native import LIBRARIES, NativeLibrary, language, load_library, required_compiler, torch_folders
from cuda_ext.build.toolkit import find_toolkit

_CSRC = Path(__file__).parent / "csrc" / "aggregate"
# Only dispatch: what runs on data is torch's. The macro spares half of torch's headers.
_FLAGS = (language(), "-O1", "-fPIC", "-DAT_PER_OPERATOR_HEADERS")


@dataclass(frozen=True)
class AggregateLibrary(NativeLibrary):
    """Library compiled from one file that includes all sources: most compile time is spent on torch's
    headers."""

    files: ClassVar[str] = "file of the aggregate device"
    duration: ClassVar[str] = "25 seconds on 1 core"
    advice: ClassVar[str] = "A complete GCC 9 or newer is needed (`apt install g++`), and the same torch that runs."

    def depends_on(self) -> list[str]:
        """Return all that the compiled library depends on in addition to the sources."""
        return [*_FLAGS, torch.__version__, str(torch.compiled_with_cxx11_abi()), *_cuda_folders()]

    def units(self, folder: Path) -> tuple[Path, ...]:
        """Return one file that includes the sources."""
        file = folder / "aggregate.cpp"
        file.write_text("".join(f'#include "{source}"\n' for source in self.sources))
        return (file,)

    def compile_command(self, source: Path, object_: Path) -> list[str]:
        """Return the command that compiles one source."""
        abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
        includes = [f"-I{self.include}", *(f"-isystem{path}" for path in (*torch_folders()[0], *_cuda_folders()))]
        return [*required_compiler(), *_FLAGS, abi, *includes, "-c", str(source), "-o", str(object_)]

    def link_command(self, objects: Sequence[Path], output: Path) -> list[str]:
        """Return the command that links the library; CUDA's driver is looked up when it is first needed."""
        folders = [f"-L{path}" for path in torch_folders()[1]]
        inputs = [str(object_) for object_ in objects]
        return [*required_compiler(), "-shared", *inputs, *folders, *LIBRARIES, "-ldl", "-o", str(output)]


def _cuda_folders() -> tuple[str, ...]:
    toolkit = find_toolkit() if torch.version.cuda else None
    return () if toolkit is None else toolkit.includes


def library() -> AggregateLibrary:
    """Return the library of the aggregate device."""
    headers = sorted(_CSRC.glob("*.h"))
    return AggregateLibrary("aggregate", tuple(sorted(_CSRC.glob("*.cpp"))), tuple(headers), _CSRC)


@lru_cache(maxsize=1)
def load() -> None:
    """Compile the library unless that has been done, and register the backend with torch.

    Raises:
        NativeBuildError: there is no compiler, or it does not compile.
    """
    load_library(library().build(), "The aggregate device's operators", "another device")
