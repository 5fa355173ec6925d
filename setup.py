"""Build steps that pyproject.toml cannot state.

A wheel holds one top-level package: `strategies`, `cuda_ext`, `docs` and the pages of `benchmarks/results` lie below
`ns_multigpu`, and the imports of its files are rewritten accordingly. An editable install serves the repository as it
is.

    NS_MULTIGPU_BUILD_CUDA=1 pip install --no-build-isolation .

also compiles the CUDA operators into the package. That needs nvcc, and the torch that will run, which is why pip must
not isolate the build. Architectures: TORCH_CUDA_ARCH_LIST, else all that are supported. Without the variable the
operators are compiled when first used.
"""

import os
import re
import shutil
import sys
from pathlib import Path

from setuptools import Distribution, find_packages, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py
from setuptools.command.editable_wheel import editable_wheel

ROOT = Path(__file__).parent
BUILD_CUDA = os.environ.get("NS_MULTIGPU_BUILD_CUDA", "") not in ("", "0")
PACKAGE, BELOW = "ns_multigpu", ("strategies", "cuda_ext")
"""The package of a wheel, and the packages of the repository that a wheel holds below it."""
_NAMES = "|".join(BELOW)
_REWRITES = (
    (re.compile(rf"^( *)from ({_NAMES})\b", re.MULTILINE), rf"\1from {PACKAGE}.\2"),
    (re.compile(rf"^( *)import ({_NAMES})$", re.MULTILINE), rf"\1from {PACKAGE} import \2"),
    (re.compile(rf"\bpython -m ({_NAMES})\b"), rf"python -m {PACKAGE}.\1"),
)


def packages(*names: str) -> list[str]:
    """Return the packages of the repository with these names, and all packages in them."""
    return find_packages(str(ROOT), include=[pattern for name in names for pattern in (name, f"{name}.*")])


class BuildBelow(build_py):
    """Copies the packages and rewrites imports and commands that name a package which lies elsewhere in a wheel."""

    def run(self) -> None:
        """Raise SystemExit if the CUDA operators are wanted and torch or nvcc is missing, or does not compile."""
        below = Path(self.build_lib)
        if not self.editable_mode:
            for name in (PACKAGE, *BELOW):  # files of an older build would be installed
                shutil.rmtree(below / name, ignore_errors=True)
        super().run()
        if not self.editable_mode:
            for path in (*below.rglob("*.py"), *below.rglob("*.md")):
                text = path.read_text("utf8")
                for pattern, replacement in _REWRITES:
                    text = pattern.sub(replacement, text)
                path.write_text(text, "utf8")
        if BUILD_CUDA:
            _build_cuda_into((ROOT if self.editable_mode else below / PACKAGE) / "cuda_ext")


class EditableTree(editable_wheel):
    """Installs the repository's own folders: developers import, test and type-check the same files."""

    def finalize_options(self) -> None:
        """Replace the packages of a wheel by those of the repository."""
        self.distribution.packages = packages(PACKAGE, *BELOW)
        self.distribution.package_dir = {}
        super().finalize_options()


def _build_cuda_into(folder: Path) -> None:
    sys.path.insert(0, str(ROOT))
    try:
        from cuda_ext.__main__ import build_cuda_into
    except ModuleNotFoundError as error:
        raise SystemExit(
            f"NS_MULTIGPU_BUILD_CUDA=1 needs the packages that will run ({error}): install requirements.lock first, "
            "then `NS_MULTIGPU_BUILD_CUDA=1 pip install --no-build-isolation --no-deps .`"
        ) from error
    try:
        print(build_cuda_into(folder))
    except (RuntimeError, OSError) as error:
        raise SystemExit(str(error)) from error


class PlatformWheel(bdist_wheel):
    """The library holds no Python: one wheel serves all of them, on this platform."""

    def get_tag(self) -> tuple[str, str, str]:
        """Return the tag of any Python 3, without its ABI."""
        return "py3", "none", super().get_tag()[2]


class WithLibrary(Distribution):
    """A package that is not of Python alone."""

    def has_ext_modules(self) -> bool:
        """Return True: the wheel is one of this platform."""
        return True


pages = {f"{PACKAGE}.docs": "docs", f"{PACKAGE}.benchmarks.results": "benchmarks/results"}
commands: dict[str, type] = {"build_py": BuildBelow, "editable_wheel": EditableTree}
setup(
    packages=[*packages(PACKAGE), *(f"{PACKAGE}.{name}" for name in packages(*BELOW)), *pages],
    package_dir={**{f"{PACKAGE}.{name}": name for name in BELOW}, **pages},
    package_data={
        PACKAGE: ["py.typed"],
        f"{PACKAGE}.cuda_ext": [f"csrc/**/*.{suffix}" for suffix in ("cpp", "h", "cu", "cuh")],
        **{name: ["**/*.md"] for name in pages},
    },
    cmdclass={**commands, "bdist_wheel": PlatformWheel} if BUILD_CUDA else commands,
    distclass=WithLibrary if BUILD_CUDA else Distribution,
)
