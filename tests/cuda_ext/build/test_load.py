"""Building, caching and choosing what serves the operators. Most build a tiny library in place of the real one."""

import ctypes
import importlib
import os
import pkgutil
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest
import torch

import cuda_ext
import cuda_ext.ops
from cuda_ext.build import native as _build
from cuda_ext.build.native import NativeBuildError, NativeLibrary, language, torch_folders
from cuda_ext.dispatch import load as _load
from cuda_ext.dispatch.schema import SCHEMAS
from tests.cuda_ext.scenes import random_scene

ROOT = Path(__file__).parents[3]
BUILD = """
import sys
from pathlib import Path
from cuda_ext.build.native import NativeLibrary
sources = tuple(sorted(Path(sys.argv[1]).glob("*.cpp")))
print(NativeLibrary("tiny", sources, (), Path(sys.argv[1])).build())
"""


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an empty cache folder, and NS_MULTIGPU_OPS unset."""
    monkeypatch.setenv("NS_MULTIGPU_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("NS_MULTIGPU_OPS", raising=False)
    return tmp_path / "cache"


@pytest.fixture
def nothing_loaded(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a new process that has an empty cache."""
    monkeypatch.setattr(_load, "_loaded", None)
    monkeypatch.setattr(_load, "_warned", False)


@pytest.fixture
def no_compiler(nothing_loaded: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine without a compiler."""
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", "/nonexistent")


@pytest.fixture
def compiler() -> list[str]:
    """Return the machine's compiler; skips where there is none."""
    found = _build.find_compiler()
    if found is None:
        pytest.skip(str(_build.compiler_problem()))
    return found


def tiny(folder: Path, **sources: str) -> NativeLibrary:
    """Return a library of these sources, by stem."""
    folder.mkdir(exist_ok=True)
    for stem, text in sources.items():
        (folder / f"{stem}.cpp").write_text(text)
    return NativeLibrary("tiny", tuple(sorted(folder.glob("*.cpp"))), (), folder)


def logging_compiler(folder: Path, real: list[str], seconds: float) -> tuple[Path, Path]:
    """Return a compiler that notes each call in a file and takes its time: its path and the file's."""
    log, script = folder / "calls", folder / "slow-c++"
    script.write_text(f'#!/bin/sh\necho call >> {log}\n/bin/sleep {seconds}\nexec {" ".join(real)} "$@"\n')
    script.chmod(0o755)
    return script, log


def start_build(sources: Path, **environment: str) -> subprocess.Popen[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    command = [sys.executable, "-c", BUILD, str(sources)]
    return subprocess.Popen(
        command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )


@pytest.mark.usefixtures("compiler")
def test_build_runs_once_with_a_message(cache: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    library = tiny(tmp_path / "src", answer='extern "C" int answer() { return 42; }', other="int x;")
    path = library.build()
    assert path.parent == cache and ctypes.CDLL(str(path)).answer() == 42
    said = capfd.readouterr().err
    assert "Compiling 2 C++ files" in said and "typically" in said and "Compiled the native operators in" in said
    stamp = path.stat().st_mtime_ns
    assert library.build() == path and path.stat().st_mtime_ns == stamp
    assert capfd.readouterr().err == ""
    assert not [entry for entry in cache.iterdir() if entry.is_dir()]  # the workshop is gone


def test_language_is_that_of_torchs_headers() -> None:
    assert [language(version) for version in ("2.9.1", "2.13.0+cpu", "2.14.1+cu130", "3.0.0a0")] == [
        *2 * ["-std=c++17"], *2 * ["-std=c++20"],
    ]  # fmt: skip
    header = next(path for folder in torch_folders()[0] if (path := Path(folder) / "torch/all.h").is_file())
    assert ("__cplusplus < 202002L" in header.read_text()) == (language() == "-std=c++20")


def test_each_source_is_compiled_once_in_a_namespace_of_its_own(tmp_path: Path) -> None:
    library = _load.library()
    units = library.units(tmp_path)
    included = [Path(line.split('"')[1]) for unit in units for line in unit.read_text().splitlines()]
    assert len(units) < len(included) / 3 and sorted(included) == sorted(library.sources)
    assert all(f"namespace nsmg::{path.stem}_cpu {{" in path.read_text("utf8") for path in included)


def test_key_covers_what_the_library_depends_on(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = tiny(tmp_path / "src", a="int a;")
    header = tmp_path / "a.h"
    header.write_text("1")
    library = NativeLibrary("tiny", library.sources, (header,), library.include)
    keys = {library.key()}
    header.write_text("2")
    keys.add(library.key())
    library.sources[0].write_text("int b;")
    keys.add(library.key())
    for target, name, value in ((_build, "FLAGS", ("-O0",)), (torch, "__version__", "0"), (_build, "_processor", str)):
        with monkeypatch.context() as patch:
            patch.setattr(target, name, value)
            keys.add(library.key())
    assert len(keys) == 6
    assert library.key() in keys


def test_two_processes_build_once(compiler: list[str], cache: Path, tmp_path: Path) -> None:
    tiny(tmp_path / "src", a="int a;", b="int b;")
    script, log = logging_compiler(tmp_path, compiler, 0.5)
    ranks = [start_build(tmp_path / "src", CXX=str(script)) for _ in range(3)]
    outputs = [rank.communicate(timeout=240) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0, 0], outputs
    assert len({out for out, _ in outputs}) == 1 and Path(outputs[0][0].strip()).exists()
    assert len(log.read_text().split()) == 3  # two compilations and one link, by one of them
    assert sum("Compiled the native" in err for _, err in outputs) == 1


def test_a_killed_builder_leaves_no_lock(compiler: list[str], cache: Path, tmp_path: Path) -> None:
    library = tiny(tmp_path / "src", a='extern "C" int answer() { return 7; }')
    script, log = logging_compiler(tmp_path, compiler, 60)
    victim = start_build(tmp_path / "src", CXX=str(script))
    while not log.exists():  # it holds the lock from before the first call on
        assert victim.poll() is None, victim.communicate()
        time.sleep(0.05)
    os.kill(victim.pid, signal.SIGKILL)
    victim.wait()
    try:
        assert [entry for entry in cache.iterdir() if entry.is_dir()]  # the dead builder's workshop
        assert ctypes.CDLL(str(library.build())).answer() == 7
        assert not [entry for entry in cache.iterdir() if entry.is_dir()]
    finally:
        os.killpg(victim.pid, signal.SIGKILL)  # its compiler still sleeps
        victim.communicate()


@pytest.mark.usefixtures("compiler")
def test_compiler_errors_are_shown(cache: Path, tmp_path: Path) -> None:
    library = tiny(tmp_path / "src", good="int a;", broken="int b = nonsense;")
    with pytest.raises(NativeBuildError) as error:
        library.build()
    text = str(error.value)
    assert "broken.cpp" in text and "nonsense" in text and "apt install g++" in text
    assert "NS_MULTIGPU_OPS=reference" in text
    assert not [entry for entry in cache.iterdir() if entry.suffix != ".lock"]


@pytest.mark.usefixtures("compiler")
def test_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("NS_MULTIGPU_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(NativeBuildError, match="NS_MULTIGPU_CACHE"):
        tiny(tmp_path / "src", a="int a;").build()


def test_cache_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NS_MULTIGPU_CACHE", "TORCH_EXTENSIONS_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    assert _build.cache_folder() == Path.home() / ".cache" / "ns_multigpu"
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert _build.cache_folder() == Path("/x/ns_multigpu")
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", "/t")
    assert _build.cache_folder() == Path("/t/ns_multigpu")
    monkeypatch.setenv("NS_MULTIGPU_CACHE", "/n")
    assert _build.cache_folder() == Path("/n")


@pytest.mark.usefixtures("no_compiler")
def test_no_compiler_warns_once_and_the_reference_serves() -> None:
    problem = cuda_ext.compiler_problem()
    assert problem is not None and "c++, g++, clang++" in problem and "apt install g++" in problem
    assert cuda_ext.backend() == "reference" and cuda_ext.backend("cuda") == "native"
    scene = random_scene(points=50)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        rows = scene.cull()
        scene.project(*rows)
    ours = [str(w.message) for w in caught if w.category is RuntimeWarning]
    assert len(ours) == 1 and problem in ours[0] and "slow" in ours[0]
    with cuda_ext.use_reference():
        assert torch.equal(scene.cull()[1], rows[1]) and len(rows[0]) > 0


@pytest.mark.usefixtures("no_compiler")
def test_native_without_a_compiler_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NS_MULTIGPU_OPS", "native")
    assert cuda_ext.backend() == "native" and cuda_ext.compiler_problem() is not None
    with pytest.raises(NativeBuildError, match=r"apt install g\+\+.*CXX.*NS_MULTIGPU_OPS=reference"):
        random_scene(points=5).cull()


@pytest.mark.usefixtures("no_compiler")
def test_reference_needs_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NS_MULTIGPU_OPS", "reference")
    assert cuda_ext.compiler_problem() is None and cuda_ext.backend() == "reference" and cuda_ext.reference_forced()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        random_scene(points=5).cull()


@pytest.mark.usefixtures("nothing_loaded")
def test_cxx_that_names_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "/no/such/compiler -O1")
    problem = cuda_ext.compiler_problem()
    assert problem is not None and "'/no/such/compiler -O1', which is not on PATH" in problem
    assert cuda_ext.backend() == "reference"
    with pytest.raises(NativeBuildError, match="CXX"):
        cuda_ext.build_native()


@pytest.mark.usefixtures("no_compiler")
def test_a_cached_library_needs_no_compiler() -> None:
    path = _load.library().path()
    path.parent.mkdir(parents=True)
    path.write_bytes(b"not a library")
    assert cuda_ext.compiler_problem() is None and cuda_ext.backend() == "native"
    with pytest.raises(NativeBuildError, match="Delete that file"):
        random_scene(points=5).cull()


def test_unknown_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NS_MULTIGPU_OPS", "fast")
    with pytest.raises(ValueError, match="auto, native or reference"):
        cuda_ext.backend()


@pytest.mark.usefixtures("nothing_loaded")
def test_use_reference_nests_and_loads_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> Path:
        raise AssertionError("built inside use_reference")

    monkeypatch.setattr(_load, "build_native", refuse)
    assert not cuda_ext.reference_forced()
    with cuda_ext.use_reference():
        with cuda_ext.use_reference():
            assert cuda_ext.backend() == "reference"
        assert cuda_ext.reference_forced()
        random_scene(points=5).cull()
    assert not cuda_ext.reference_forced()


def test_import_compiles_nothing_and_ahead_of_time_does(compiler: list[str], tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "NS_MULTIGPU_CACHE": str(tmp_path / "cache"), "CXX": "/bin/false"}
    run = subprocess.run([sys.executable, "-c", "import cuda_ext"], env=env, capture_output=True, text=True)
    assert run.returncode == 0 and not (tmp_path / "cache").exists(), run.stderr
    run = subprocess.run([sys.executable, "-m", "cuda_ext"], env=env, capture_output=True, text=True)
    assert run.returncode == 1 and "could not be compiled: `/bin/false`" in run.stderr and run.stdout == ""


@pytest.mark.usefixtures("native")
def test_ahead_of_time_prints_the_path() -> None:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    run = subprocess.run([sys.executable, "-m", "cuda_ext"], env=env, capture_output=True, text=True)
    assert run.returncode == 0 and Path(run.stdout.strip()) == _load.library().path(), run.stderr


@pytest.mark.usefixtures("native")
def test_every_operator_has_a_cpu_kernel() -> None:
    assert _load.load_native()
    for module in pkgutil.walk_packages(cuda_ext.ops.__path__, "cuda_ext.ops."):  # some register their own for the CPU
        importlib.import_module(module.name)
    names = [schema.split("(")[0] for schema in SCHEMAS]
    absent = {n for n in names if not torch._C._dispatch_has_kernel_for_dispatch_key(f"ns_multigpu::{n}", "CPU")}
    composed = {"bilateral_map", "bilateral_map_backward", "bilateral_variation_backward"}
    assert absent <= composed, "those are functions of torch's operators on a CPU"
