"""The shape of the project: who may import whom, what is installed, how long files may grow."""

import ast
import shutil
import subprocess
import sys
from collections import Counter
from importlib import import_module
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
PACKAGES = ("ns_multigpu", "strategies", "cuda_ext", "benchmarks")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf8"))
LONGEST = 600
LONGEST_FUNCTION = 80
FULLEST = 25


BREACHES = [
    ("ns_multigpu/core/types.py", "strategies"),
    ("ns_multigpu/core/dist/world.py", "numpy"),
    ("ns_multigpu/primitives/__init__.py", "nerfstudio"),
    ("strategies/single.py", "ns_multigpu.primitives"),
    ("ns_multigpu/methods.py", "strategies"),
    ("benchmarks/lib/stopwatch.py", "benchmarks.kernels"),
]


def test_import_contract_notices_each_breach(tmp_path: Path) -> None:
    """`make lint` checks that this tree keeps the contract."""
    for package in PACKAGES:
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__", "csrc"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for file, imported in BREACHES:
        with (tmp_path / file).open("a") as broken:
            broken.write(f"\nimport {imported}\n")
    program = "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports(no_cache=True))"
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "BROKEN" in done.stdout, done.stdout + done.stderr
    said = " ".join(done.stdout.split())
    for file, imported in BREACHES:
        importer = file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        assert f"{importer} -> {imported}" in said, said


def test_importing_the_package_imports_nothing() -> None:
    program = "import sys, ns_multigpu; print(ns_multigpu.__version__, 'torch' in sys.modules, 'numpy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [import_module("ns_multigpu").__version__, "False", "False"]


def test_entry_points_lead_somewhere() -> None:
    """Also where nerfstudio is imported first, which imports ours while it is being imported itself.

    torchmetrics, which loads other installed packages, is not imported by that.
    """
    tables = [PROJECT["project"]["scripts"], *PROJECT["project"]["entry-points"].values()]
    targets = [target.split(":") for table in tables for target in table.values()]
    program = "import importlib, nerfstudio.engine.trainer\n" + "\n".join(
        f"importlib.import_module({module!r}).{name}" for module, name in targets
    )
    program += "\nimport sys; assert 'torchmetrics' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_locked_versions_are_within_the_bounds() -> None:
    lines = [line for line in (ROOT / "requirements.lock").read_text("utf8").splitlines() if line and line[0] != "#"]
    locked = {
        canonicalize_name(one.name): one for one in map(Requirement, lines) if not one.marker or one.marker.evaluate()
    }
    wanted = PROJECT["project"]["dependencies"] + PROJECT["project"]["optional-dependencies"]["dev"]
    for one in map(Requirement, wanted):
        version = str(locked[canonicalize_name(one.name)].specifier).lstrip("=")
        assert one.specifier.contains(version), f"{one} does not allow the locked {version}"


FOLDERS = (*PACKAGES, "tests", "demo", "examples", "tools")


def _docstring_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    docstring = ast.get_docstring(function, clean=False)
    return 0 if docstring is None else docstring.count("\n") + 1


def test_functions_are_short() -> None:
    lengths = {
        f"{path.relative_to(ROOT)}: {node.name}": (node.end_lineno or 0) - node.lineno + 1 - _docstring_lines(node)
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text("utf8")))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    assert len(lengths) > 1000
    assert {function: lines for function, lines in lengths.items() if lines > LONGEST_FUNCTION} == {}


def test_folders_are_small() -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    counts = Counter(str(Path(name).parent) for name in listed.splitlines() if (ROOT / name).exists())
    assert len(counts) > 30
    assert {folder: files for folder, files in counts.items() if files > FULLEST} == {}


def test_files_are_short() -> None:
    folders, suffixes = FOLDERS, (".py", ".cpp", ".h", ".cu", ".cuh")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix in suffixes]
    lengths = {str(path.relative_to(ROOT)): len(path.read_text("utf8").splitlines()) for path in files}
    assert len(lengths) > 30
    assert {path: lines for path, lines in lengths.items() if lines > LONGEST} == {}
