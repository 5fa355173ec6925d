"""What pyproject.toml cannot say: with NS_MULTIGPU_BUILD_CUDA=1 the CUDA operators are compiled into the package.

    NS_MULTIGPU_BUILD_CUDA=1 pip install --no-build-isolation .

Needs nvcc, and the torch that will run, which is why pip must not isolate the build. Architectures:
TORCH_CUDA_ARCH_LIST, else all that are supported. Without the variable the operators are compiled when first used.
"""

import os
import sys
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent
BUILD_CUDA = os.environ.get("NS_MULTIGPU_BUILD_CUDA", "") not in ("", "0")


class BuildWithCuda(build_py):
    """Copies the Python files and puts cuda_operators.so beside them."""

    def run(self) -> None:
        """Raises SystemExit where torch or nvcc is missing, or does not compile."""
        super().run()
        if BUILD_CUDA:
            _build_cuda_into((ROOT if self.editable_mode else Path(self.build_lib)) / "cuda_ext")


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
        """For any Python 3, without its ABI."""
        return "py3", "none", super().get_tag()[2]


class WithLibrary(Distribution):
    """A package that is not of Python alone."""

    def has_ext_modules(self) -> bool:
        """Makes the wheel one of this platform."""
        return True


if BUILD_CUDA:
    setup(distclass=WithLibrary, cmdclass={"build_py": BuildWithCuda, "bdist_wheel": PlatformWheel})
else:
    setup()
