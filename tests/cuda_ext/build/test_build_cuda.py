"""Discovery, compilation and selection of the CUDA operators. No GPU is needed; tests that compile need nvcc."""

import ctypes
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import cuda_ext
from cuda_ext.build import cuda as _build_cuda
from cuda_ext.build import toolkit as _toolkit
from cuda_ext.build.cuda import CudaLibrary
from cuda_ext.build.native import NativeBuildError
from cuda_ext.dispatch import cuda as _cuda
from cuda_ext.dispatch.schema import HOST_ONLY, SCHEMAS

ROOT = Path(__file__).parents[3]
ADD_ONE = """
__global__ void kernel(int* x) { *x += 1; }
extern "C" __attribute__((visibility("default"))) int add_one(int* x) {
  kernel<<<1, 1>>>(x);
  return static_cast<int>(cudaGetLastError());
}
"""


@pytest.fixture
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """As in a new process with one sm_90 GPU, an empty cache and no variable of ours set; returns the cache folder."""
    for name in ("OPS", "CUDA", "CUDA_LIBRARY"):
        monkeypatch.delenv(f"NS_MULTIGPU_{name}", raising=False)
    monkeypatch.setenv("NS_MULTIGPU_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(_cuda, "_loaded", False)
    monkeypatch.setattr(_cuda, "PACKAGED", tmp_path / "no.so")
    monkeypatch.setattr(_toolkit, "visible_architectures", lambda: ("90",))
    return tmp_path / "cache"


@pytest.fixture
def no_nvcc(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine without the CUDA toolkit, with a torch for CUDA 13."""
    monkeypatch.setattr(_toolkit, "candidates", lambda: iter(()))
    monkeypatch.setattr(torch.version, "cuda", "13.0")


@pytest.fixture
def nvcc() -> None:
    """The test compiles CUDA code: skipped, with the reason, where nothing can."""
    if problem := _toolkit.toolkit_problem():
        pytest.skip(problem)


def written(path: Path, info: str) -> Path:
    """Return a file that says of itself what a compiled library says."""
    path.write_bytes(b"\x7fELF" + info.encode() + b"\0")
    return path


@pytest.mark.usefixtures("no_nvcc")
def test_no_nvcc_names_both_remedies() -> None:
    problem = cuda_ext.compiler_problem("cuda")
    assert problem is not None and cuda_ext.backend("cuda") == "native"
    for part in ("no nvcc", "CUDA_HOME", 'pip install "nvidia-cuda-nvcc==13.0.*"', "NS_MULTIGPU_OPS=reference", "slow"):
        assert part in problem
    with pytest.raises(NativeBuildError, match="NS_MULTIGPU_OPS=reference"):
        cuda_ext.build_native("cuda")
    with pytest.raises(NativeBuildError, match="NS_MULTIGPU_OPS=reference"):
        _cuda.load()


@pytest.mark.usefixtures("no_nvcc")
def test_the_reference_needs_no_nvcc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NS_MULTIGPU_OPS", "reference")
    assert cuda_ext.compiler_problem("cuda") is None and cuda_ext.backend("cuda") == "reference"


@pytest.mark.parametrize("value", ["gsplat", "native"])
def test_the_removed_variable_is_named_with_the_remedy(
    value: str, fresh: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NS_MULTIGPU_CUDA_LIBRARY", str(written(tmp_path / "good.so", _cuda.library().info())))
    assert cuda_ext.compiler_problem("cuda") is None
    monkeypatch.setenv("NS_MULTIGPU_CUDA", value)
    said = f"NS_MULTIGPU_CUDA={value}: .* Unset it, or set NS_MULTIGPU_OPS=reference"
    assert re.match(said, str(cuda_ext.compiler_problem("cuda")))
    for act in (_cuda.build, _cuda.load):
        with pytest.raises(NativeBuildError, match=said):
            act()


def test_fake_tensors_compile_nothing(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    monkeypatch.setattr(_cuda, "load", lambda: pytest.fail("compiled for a fake tensor"))
    with FakeTensorMode():
        pred = torch.empty(20, 20, 3, device="cuda")
        assert cuda_ext.l1_ssim(pred, pred, [0, 0, 20, 20])[2].shape == (20, 20, 3)


def test_old_and_new_toolkits_are_refused(tmp_path: Path, fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(_toolkit, "_newest_major", lambda: 13)
    for version, said in (("10.2.89", "older than 11.8"), ("14.0.1", "newer than the CUDA 13"), ("13.0.1", "lacks")):
        script = tmp_path / f"nvcc-{version}"
        script.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release x, V{version}'\n")
        script.chmod(0o755)
        monkeypatch.setattr(_toolkit, "candidates", lambda script=script: iter((str(script),)))
        problem = _toolkit.toolkit_problem()
        assert problem is not None and said in problem and str(script) in problem
    monkeypatch.setattr(_toolkit, "candidates", lambda: iter(("/bin/false",)))
    assert "/bin/false does not run" in str(_toolkit.toolkit_problem())
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "built without CUDA" in str(_toolkit.toolkit_problem())


def test_architectures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "7.5;8.0 8.6,9.0a+PTX")
    assert _toolkit.listed_architectures() == ("80", "86", "90a+PTX")
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "Hopper")
    with pytest.raises(ValueError, match="'Hopper'"):
        _toolkit.listed_architectures()
    for names, gpu, serves in (
        (("80",), "86", True), (("86",), "80", False), (("80",), "90", False), (("80+PTX",), "90", True),
        (("90+PTX",), "89", False), (("90a",), "90", True), (("100a",), "103", False), (("80", "90"), "90", True),
    ):  # fmt: skip
        assert _toolkit.serves(names, gpu) is serves, (names, gpu)


def test_no_gpu_and_an_old_one(fresh: Path, monkeypatch: pytest.MonkeyPatch, nvcc: None) -> None:
    monkeypatch.setattr(_toolkit, "visible_architectures", lambda: ("75", "90"))
    assert "sm_80 (Ampere, 2020) or newer, and this one is sm_75" in str(cuda_ext.compiler_problem("cuda"))
    monkeypatch.setattr(_toolkit, "visible_architectures", lambda: ())
    monkeypatch.delenv("TORCH_CUDA_ARCH_LIST", raising=False)
    assert "TORCH_CUDA_ARCH_LIST=9.0" in str(cuda_ext.compiler_problem("cuda"))


def test_a_prebuilt_library_must_fit(fresh: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = _cuda.library(("90",))
    good = written(tmp_path / "good.so", ours.info())
    assert _build_cuda.prebuilt_problem(good, ours, ["90"]) is None
    other = ours.info().replace(ours.source_key(), "0" * 20)
    for info, said in (
        (other, "other sources"),
        (ours.info().replace("torch=", "torch=1"), "for torch 1"),
        (ours.info().replace("=90", "=80"), "a GPU here is sm_90"),
        ("nothing", "not a library of the CUDA operators"),
        ("", "not a library"),
    ):
        bad = written(tmp_path / "bad.so", info)
        monkeypatch.setenv("NS_MULTIGPU_CUDA_LIBRARY", str(bad))
        problem = cuda_ext.compiler_problem("cuda")
        assert problem is not None and said in problem and "python -m cuda_ext build --cuda" in problem, problem
        with pytest.raises(NativeBuildError, match=said):
            cuda_ext.build_native("cuda")
    monkeypatch.setenv("NS_MULTIGPU_CUDA_LIBRARY", str(tmp_path / "absent.so"))
    assert "cannot be read" in str(cuda_ext.compiler_problem("cuda"))
    monkeypatch.setenv("NS_MULTIGPU_CUDA_LIBRARY", str(good))
    assert cuda_ext.compiler_problem("cuda") is None and cuda_ext.build_native("cuda") == good
    with pytest.raises(NativeBuildError, match=r"do not load.*NS_MULTIGPU_OPS=reference"):
        _cuda.load()


def test_the_packaged_library_serves_if_it_fits(fresh: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_cuda, "PACKAGED", tmp_path / "packaged.so")
    ours = _cuda.library()
    written(_cuda.PACKAGED, ours.info())
    assert cuda_ext.build_native("cuda") == _cuda.PACKAGED
    written(_cuda.PACKAGED, ours.info().replace("=90", "=80"))
    monkeypatch.setattr(CudaLibrary, "build", lambda self: Path("/compiled"))
    assert cuda_ext.build_native("cuda") == Path("/compiled")


def test_key_covers_what_the_library_depends_on(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = _cuda.library(("90",))
    toolkit = _toolkit.Toolkit("nvcc", "13.0.1", (), None)
    keys = {library.key(), replace(library, toolkit=toolkit).key(), replace(library, architectures=("80",)).key()}
    for name in ("HOST_FLAGS", "DEVICE_FLAGS"):
        with monkeypatch.context() as patch:
            patch.setattr(_build_cuda, name, ("-O0",))
            keys.add(library.key())
    with monkeypatch.context() as patch:
        patch.setattr(torch, "__version__", "0+cu1")
        keys.add(library.key())
    assert len(keys) == 6 and library.key() in keys


def test_build_groups_bindings_and_compiles_each_source_once(tmp_path: Path) -> None:
    library = _cuda.library(("90",))
    units = library.units(tmp_path)
    files = [unit for unit in units if unit.parent == tmp_path]
    included = [Path(line.split('"')[1]) for file in files for line in file.read_text().splitlines()]
    assert 1 < len(files) < len(included) / 2 and all(path.stem.endswith(_build_cuda.BINDING) for path in included)
    assert sorted([*included, *(unit for unit in units if unit not in files)]) == sorted(library.sources)
    assert all(f"namespace {path.stem} {{" in path.read_text("utf8") for path in included), "names of one are not all's"


@pytest.mark.slow
@pytest.mark.usefixtures("nvcc")
def test_compiles_for_several_architectures(fresh: Path, tmp_path: Path) -> None:
    """A tiny library, through the whole build: its kernels are there for both, and its runtime is inside it."""
    (tmp_path / "add.cu").write_text(ADD_ONE)
    key = ROOT / "cuda_ext/csrc/cuda/common/source_key.cpp"
    library = replace(_cuda.library(("80", "90+PTX")), name="tiny", sources=(tmp_path / "add.cu", key), headers=())
    path = library.build()
    loaded = ctypes.CDLL(str(path))
    loaded.nsmg_source_key.restype = ctypes.c_char_p
    assert loaded.nsmg_source_key().decode() == library.info()
    assert _build_cuda.prebuilt_problem(path, library, ["80", "86", "90", "100"]) is None
    assert "sm_75" in str(_build_cuda.prebuilt_problem(path, library, ["75"]))
    if not torch.cuda.is_available():
        assert loaded.add_one(None) != 0  # the runtime itself answers: there is no device


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.usefixtures("nvcc")
def test_the_operators_compile_for_sm_90_and_register() -> None:
    """Into the usual cache; loading needs no GPU."""
    program = """
import sys, torch
from cuda_ext.dispatch import cuda as _cuda
torch.ops.load_library(str(_cuda.library(("90",)).build()))
has = torch._C._dispatch_has_kernel_for_dispatch_key
print([name for name in sys.argv[1:] if not has(f"ns_multigpu::{name}", "CUDA")])
"""
    names = [name for schema in SCHEMAS if (name := schema.split("(")[0]) not in HOST_ONLY]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", program, *names], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0 and done.stdout.strip() == "[]", done.stdout + done.stderr


@pytest.mark.usefixtures("no_nvcc")
def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from cuda_ext.__main__ import main

    assert main(["build", "--cuda", "--output", str(tmp_path / "out")]) == 1
    assert "NS_MULTIGPU_CUDA_LIBRARY" in capsys.readouterr().err and not (tmp_path / "out").exists()
    with pytest.raises(SystemExit):
        main(["build", "--output", str(tmp_path)])
    assert "--output needs --cuda" in capsys.readouterr().err


def test_an_output_that_cannot_be_written_is_refused_before_compiling(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from cuda_ext import __main__
    from cuda_ext.dispatch import cuda as _cuda

    monkeypatch.setattr(
        _cuda, "ahead_of_time_library", lambda: SimpleNamespace(build=lambda: pytest.fail("it compiled"))
    )
    (tmp_path / "file").write_text("")
    assert __main__.main(["build", "--cuda", "--output", str(tmp_path / "file" / "folder")]) == 1
    assert "name another folder" in capsys.readouterr().err
