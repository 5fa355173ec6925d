"""The wheel: one top-level package that holds all that runs, and works without the repository."""

import ast
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("ns_multigpu", "strategies", "cuda_ext")
SETUPTOOLS = "77"  # as in pyproject.toml

pytest.importorskip("setuptools", minversion=SETUPTOOLS, reason=f"needs setuptools {SETUPTOOLS}, which builds wheels")


def build(folder: Path, hook: str) -> Path:
    """Return what a hook of the build backend makes of the sources in `folder`. Nothing is downloaded."""
    program = f"from setuptools import build_meta; print(build_meta.{hook}('dist'))"
    done = subprocess.run([sys.executable, "-c", program], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder / "dist" / done.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sources")
    for name in (*PACKAGES, "docs", "benchmarks/results"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    stale = folder / "build" / "lib" / "strategies"  # an older version's
    stale.mkdir(parents=True)
    (stale / "gone.py").touch()
    return folder


@pytest.fixture(scope="module")
def wheel(sources: Path) -> zipfile.ZipFile:
    return zipfile.ZipFile(build(sources, "build_wheel"))


@pytest.fixture(scope="module")
def unpacked(wheel: zipfile.ZipFile, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("unpacked")
    wheel.extractall(folder)
    return folder


def test_one_top_level_name(wheel: zipfile.ZipFile) -> None:
    tops = {name.split("/")[0] for name in wheel.namelist()}
    assert {name for name in tops if not name.endswith(".dist-info")} == {"ns_multigpu"}
    listed = next(name for name in wheel.namelist() if name.endswith("top_level.txt"))
    assert wheel.read(listed).split() == [b"ns_multigpu"]


def test_all_sources_are_packaged(unpacked: Path) -> None:
    """Python files, native sources and pages: none more, none less."""
    trees = {"": "ns_multigpu", **{name: name for name in ("strategies", "cuda_ext", "docs", "benchmarks/results")}}
    wanted = {
        Path("ns_multigpu", below, path.relative_to(ROOT / tree))
        for below, tree in trees.items()
        for path in (ROOT / tree).rglob("*")
        if path.suffix in (".py", ".typed", ".cpp", ".h", ".cu", ".cuh", ".md")
    }
    found = {path.relative_to(unpacked) for path in (unpacked / "ns_multigpu").rglob("*") if path.is_file()}
    assert found == wanted


def test_all_imports_are_rewritten(unpacked: Path) -> None:
    for path in unpacked.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
            assert not {name.split(".")[0] for name in names} & {"strategies", "cuda_ext"}, path


def test_messages_name_what_is_there(unpacked: Path) -> None:
    text = "\n".join(path.read_text("utf8") for path in (unpacked / "ns_multigpu").rglob("*.py"))
    pages = set(re.findall(r"\b(?:docs|benchmarks/results)/[\w/-]+\.md", text))
    assert pages and all((unpacked / "ns_multigpu" / page).is_file() for page in pages), pages
    modules = set(re.findall(r"python -m ((?:ns_multigpu|cuda_ext|strategies)[\w.]*)", text))
    assert modules == {"ns_multigpu.cuda_ext"}


def test_wheel_of_the_sdist_is_the_same(wheel: zipfile.ZipFile, sources: Path, tmp_path: Path) -> None:
    shutil.unpack_archive(build(sources, "build_sdist"), tmp_path, filter="data")
    (folder,) = tmp_path.iterdir()
    again, contents = zipfile.ZipFile(build(folder, "build_wheel")), []
    for one in (again, wheel):
        contents.append({name: one.read(name) for name in one.namelist()})
    assert contents[0] == contents[1]


def test_editable_install_serves_the_repository(sources: Path) -> None:
    editable = zipfile.ZipFile(build(sources, "build_editable"))
    finder = next(name for name in editable.namelist() if name.endswith("_finder.py"))
    mapping = re.search(r"^MAPPING.*= (\{.*\})$", editable.read(finder).decode(), re.MULTILINE)
    assert mapping and ast.literal_eval(mapping[1]) == {name: str(sources / name) for name in PACKAGES}


ALONE = """
import sys
sys.path[:] = [path for path in sys.path if "site-packages" not in path] + {path!r}
import importlib, importlib.util, pkgutil
assert not any(map(importlib.util.find_spec, ("strategies", "cuda_ext")))
import nerfstudio.scripts.train  # first, as commands do
import ns_multigpu, torch
assert ns_multigpu.__file__.startswith({path[0]!r})
for module in pkgutil.walk_packages(ns_multigpu.__path__, "ns_multigpu."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
assert ns_multigpu.cli.docs_folder().samefile({path[0]!r} + "/ns_multigpu/docs")
from importlib.metadata import entry_points
for group in ("nerfstudio.method_configs", "nerfstudio.dataparser_configs"):
    for one in entry_points(group=group):
        assert one.load() and sys.modules[one.module].__file__.startswith({path[0]!r})
(command,) = entry_points(group="console_scripts", name="ns-multigpu")
command.load()(["plan", "--points", "1M", "--image", "1920x1080", "--gpus", "2"])
{render}
print(ns_multigpu.cuda_ext.backend(), image.double().sum().item(), image.std().item() > 0.01)
"""
RENDER = """
torch.manual_seed(0)
means, quats, scales = torch.randn(100, 3), torch.randn(100, 4), torch.full((100, 3), 0.2)
view, K = torch.eye(4)[None], torch.tensor([[[60.0, 0, 32], [0, 60.0, 32], [0, 0, 1]]])
view[0, 2, 3] = 4.0
image, _, _ = ns_multigpu.render(means, quats, scales, torch.rand(100), torch.rand(100, 3), view, K, 64, 64)
"""


def test_wheel_works_without_the_repository(unpacked: Path, tmp_path: Path) -> None:
    """Every module can be imported, entry points load, and compiled operators draw what the repository's draw."""
    import torch

    import cuda_ext
    import ns_multigpu

    here = {"torch": torch, "ns_multigpu": ns_multigpu}
    exec(RENDER, here)
    path = [str(unpacked), sysconfig.get_paths()["purelib"]]
    program = ALONE.format(path=path, render=RENDER)
    # Without `site`: an editable install of the repository in this environment is not found.
    words = [sys.executable, "-I", "-S", "-W", "ignore", "-c", program]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == f"{cuda_ext.backend()} {here['image'].double().sum().item()} True"
