"""Compile sources into one shared library, once per machine, sources and torch version.

`NativeLibrary` is the CPU operators' kind; `cuda_ext.build.cuda` derives that of the CUDA operators from it.

The result lies in a cache folder under a name that holds a hash of everything it depends on, so a change of sources,
flags, torch, Python or processor makes a new library and never reuses a wrong one. Several processes may ask at the
same moment (the ranks of a run): one compiles while the others wait on a file lock, which the kernel releases should
the compiling process die. The library appears by an atomic rename, so no process ever loads half of one.
"""

import contextlib
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import ClassVar

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

COMPILERS = ("c++", "g++", "clang++")
REFERENCE = "NS_MULTIGPU_OPS=reference to go on with the slow pure-torch operators"
"""Setting that messages offer where nothing compiles."""
REMEDY = (
    "Install one (Debian or Ubuntu: `apt install g++`; conda: `conda install gxx`), or name one in the environment "
    f"variable CXX, or set {REFERENCE}."
)


def language(version: str = torch.__version__) -> str:
    """Return the flag of the language of torch's headers: C++20 from torch 2.14 on, C++17 before."""
    return f"-std=c++{20 if tuple(map(int, version.split('.')[:2])) >= (2, 14) else 17}"


# Vectorisation needs the compiler to ignore errno and floating-point traps. -ffast-math would do the same and more:
# it flushes denormals in the whole process once the library is loaded and breaks checks for NaN, so it stays out.
FLAGS = (
    language(),
    "-O3",
    "-march=native",
    "-fopenmp",
    "-fPIC",
    "-DNDEBUG",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-ffp-contract=fast",
    "-Wno-unknown-pragmas",
)
LIBRARIES = ("-lc10", "-ltorch_cpu", "-ltorch")
_ERROR_LINES = 40
_UNITS = 4
"""Files that the sources are compiled in."""


class NativeBuildError(RuntimeError):
    """The native operators cannot be compiled or loaded; the message names the cause and the remedy."""


def load_library(path: Path, name: str, remedy: str) -> None:
    """Register the operators of a compiled library.

    Args:
        path: the library.
        name: the subject of the message where it does not load.
        remedy: the environment variable to set instead, and its effect.

    Raises:
        NativeBuildError: it does not load.
    """
    try:
        torch.ops.load_library(str(path))
    except OSError as error:
        raise NativeBuildError(
            f"{name} in {path} do not load ({error}). Delete that file to have them compiled again, or set {remedy}."
        ) from error


def cache_folder() -> Path:
    """Return the folder of compiled libraries: NS_MULTIGPU_CACHE, else below TORCH_EXTENSIONS_DIR, else the user's
    cache."""
    if own := os.environ.get("NS_MULTIGPU_CACHE"):
        return Path(own).expanduser()
    if shared := os.environ.get("TORCH_EXTENSIONS_DIR"):
        return Path(shared).expanduser() / "ns_multigpu"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ns_multigpu"


def find_compiler() -> list[str] | None:
    """Return the compiler as the start of a command line (CXX may hold arguments, such as `ccache g++`), or None."""
    if named := shlex.split(os.environ.get("CXX", "")):
        return named if shutil.which(named[0]) else None
    return next(([path] for name in COMPILERS if (path := shutil.which(name))), None)


def compiler_problem() -> str | None:
    """Return why nothing can be compiled on this machine, with the remedy, or None if a compiler is found."""
    if sys.platform != "linux":
        return f"The native operators are built on Linux only, and this is {sys.platform}. Use Linux or WSL 2. {REMEDY}"
    if find_compiler() is not None:
        return None
    if named := os.environ.get("CXX"):
        return f"No C++ compiler: the environment variable CXX names {named!r}, which is not on PATH. {REMEDY}"
    return f"No C++ compiler: none of {', '.join(COMPILERS)} is on PATH. {REMEDY}"


@lru_cache(maxsize=1)
def _processor() -> str:
    """Return the processor features that -march=native uses. A library must not run on a machine that lacks one."""
    with contextlib.suppress(OSError), open("/proc/cpuinfo") as file:
        lines = [line for line in file if line.startswith(("model name", "flags", "Features", "CPU part"))]
        return platform.machine() + "".join(sorted(set(lines)))
    return platform.machine() + platform.processor()


@dataclass(frozen=True)
class NativeLibrary:
    """One shared library.

    Attributes:
        name: the stem of the file in the cache.
        sources: the .cpp files, each compiled to its own object.
        headers: files that the sources include; their contents are part of the cache key.
        include: the folder that the sources' own #include lines start from.
    """

    name: str
    sources: tuple[Path, ...]
    headers: tuple[Path, ...]
    include: Path

    files: ClassVar[str] = "C++ files of the native operators"
    duration: ClassVar[str] = "about a minute on 2 cores"
    advice: ClassVar[str] = (
        "A complete GCC 9 or newer is needed (`apt install g++`), and the same torch that runs; another compiler "
        f"is named by CXX. Or set {REFERENCE}."
    )

    def depends_on(self) -> list[str]:
        """Return all that the compiled library depends on in addition to the sources."""
        parts = [*FLAGS, torch.__version__, str(torch.compiled_with_cxx11_abi()), _processor()]
        return [*parts, str(sysconfig.get_config_var("SOABI"))]

    def source_key(self) -> str:
        """Return a hash of the sources and headers."""
        digest = hashlib.sha256()
        for path in sorted((*self.sources, *self.headers)):
            digest.update(f"\n{path.name}\n".encode() + path.read_bytes())
        return digest.hexdigest()[:20]

    def key(self) -> str:
        """Return a hash of all that the compiled library depends on."""
        return hashlib.sha256("\n".join([*self.depends_on(), self.source_key()]).encode()).hexdigest()[:20]

    def problem(self) -> str | None:
        """Return why this library cannot be compiled on this machine, with the remedy, or None."""
        return compiler_problem()

    def compiler_name(self) -> str:
        """Return the compiler's name for messages."""
        return " ".join(required_compiler())

    def compile_command(self, source: Path, object_: Path) -> list[str]:
        """Return the command that compiles one source."""
        abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
        includes = [f"-I{self.include}", *(f"-isystem{path}" for path in torch_folders()[0])]
        return [*required_compiler(), *FLAGS, abi, *includes, "-c", str(source), "-o", str(object_)]

    def units(self, folder: Path) -> tuple[Path, ...]:
        """Return the files to compile, one object each: they are written to `folder`, and include several sources."""
        return grouped(self.sources, _UNITS, folder)

    def link_command(self, objects: Sequence[Path], output: Path) -> list[str]:
        """Return the command that links the library."""
        folders = [f"-L{path}" for path in torch_folders()[1]]
        inputs = [str(object_) for object_ in objects]
        return [*required_compiler(), "-shared", "-fopenmp", *inputs, *folders, *LIBRARIES, "-o", str(output)]

    def path(self) -> Path:
        """Return the path of the compiled library, which may not exist yet."""
        return cache_folder() / f"{self.name}-{self.key()}.so"

    def build(self) -> Path:
        """Compile the library unless it is in the cache. Wait if another process is compiling it.

        Raises:
            NativeBuildError: no compiler, a compiler error, or a cache folder that cannot be written.
        """
        target = self.path()
        if target.exists():
            return target
        if problem := self.problem():
            raise NativeBuildError(problem)
        try:
            with locked(target.with_suffix(".lock")):
                if not target.exists():
                    self._build_to(target)
        except OSError as error:
            raise NativeBuildError(
                f"The native operators cannot be stored in {target.parent} ({error}). Name a folder that can be "
                "written in the environment variable NS_MULTIGPU_CACHE."
            ) from error
        return target

    def _build_to(self, target: Path) -> None:
        for stale in target.parent.glob(f".{target.stem}-*"):  # this process holds the lock, so their writer has died
            shutil.rmtree(stale, ignore_errors=True)
        workshop = Path(tempfile.mkdtemp(prefix=f".{target.stem}-", dir=target.parent))
        try:
            _compile_and_link(self, workshop / target.name)
            if self.path() != target:
                raise NativeBuildError(
                    "The sources of the native operators changed while they were compiled: run again."
                )
            os.replace(workshop / target.name, target)
        finally:
            shutil.rmtree(workshop, ignore_errors=True)


def grouped(sources: Sequence[Path], count: int, folder: Path) -> tuple[Path, ...]:
    """Write files that include several sources each, and return their paths.

    Reading torch's headers takes 4 s, most of what compiling a source takes. Names in sources must not collide: each
    source has a namespace of its own.

    Args:
        sources: .cpp files. count: most files. folder: where they are written.
    """
    by_size = sorted(sources, key=lambda source: source.stat().st_size)  # units of about the same length
    units = tuple(folder / f"operators_{k}.cpp" for k in range(min(len(sources), count)))
    for k, unit in enumerate(units):
        unit.write_text("".join(f'#include "{source}"\n' for source in by_size[k :: len(units)]))
    return units


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold a lock that one process of this machine has at a time, by a file."""
    import fcntl  # not on Windows, where compiler_problem() has already said no

    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            Console(stderr=True).print("Waiting for another process to compile the native operators ...")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield  # closing the file releases the lock, and so does the kernel if this process dies


def _cores() -> int:
    limit = os.environ.get("MAX_JOBS", "")
    return max(1, int(limit) if limit.isdigit() else len(os.sched_getaffinity(0)))


def required_compiler() -> list[str]:
    """Return `find_compiler`, or a NativeBuildError that says why there is none."""
    compiler = find_compiler()
    if compiler is None:
        raise NativeBuildError(compiler_problem() or f"No C++ compiler. {REMEDY}")
    return compiler


@lru_cache(maxsize=1)
def torch_folders() -> tuple[list[str], list[str]]:
    """Return the folders of torch's headers and libraries."""
    logger = logging.getLogger("torch.utils.cpp_extension")
    level = logger.level
    logger.setLevel(logging.ERROR)  # on import it warns of a CUDA toolkit without a GPU, which is of no concern here
    try:
        from torch.utils import cpp_extension
    finally:
        logger.setLevel(level)
    return cpp_extension.include_paths(), cpp_extension.library_paths()


def _compile_and_link(library: NativeLibrary, output: Path) -> None:
    objects = {unit: output.parent / f"{unit.name}.o" for unit in library.units(output.parent)}
    console, start = Console(stderr=True), time.monotonic()
    console.print(
        f"Compiling {len(objects)} {library.files} with {library.compiler_name()} (once per machine; "
        f"typically {library.duration}) ...",
        soft_wrap=True,
    )
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress, ThreadPoolExecutor(_cores()) as pool:
        task = progress.add_task("Compiling", total=len(objects) + 1)
        jobs = {
            pool.submit(_run, library.compile_command(source, object_), library.advice): source
            for source, object_ in objects.items()
        }
        try:
            for job in as_completed(jobs):
                job.result()
                progress.update(task, advance=1, description=f"Compiled {jobs[job].name}")
        except BaseException:  # Ctrl-C too: start no further compiler
            pool.shutdown(wait=False, cancel_futures=True)
            raise
        _run(library.link_command(list(objects.values()), output), library.advice)
        progress.update(task, advance=1)
    console.print(
        f"Compiled the native operators in {time.monotonic() - start:.0f} s, kept in {output.parents[1]}",
        soft_wrap=True,
    )


def _run(command: Sequence[str], advice: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        said = "\n".join((done.stdout + done.stderr).strip().splitlines()[:_ERROR_LINES])
        raise NativeBuildError(
            f"The native operators could not be compiled: `{command[0]}` ended with status {done.returncode}:\n{said}\n"
            f"{advice}\nThe command was: {shlex.join(command)}"
        )
