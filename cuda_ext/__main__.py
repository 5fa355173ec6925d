"""`python -m cuda_ext`: compiles the operators ahead of time and prints where they lie.

python -m cuda_ext                                 the CPU operators, into the cache folder
python -m cuda_ext build --cuda                    the CUDA operators for the GPUs in sight, into the cache folder
python -m cuda_ext build --cuda --output DIR       for all GPUs (or TORCH_CUDA_ARCH_LIST), as DIR/cuda_operators.so,
                                                   to be named in NS_MULTIGPU_CUDA_LIBRARY
"""

import argparse
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from cuda_ext.build.cuda import NAME
from cuda_ext.build.native import NativeBuildError
from cuda_ext.dispatch import cuda as _cuda
from cuda_ext.dispatch.load import build_native


def build_cuda_into(folder: Path) -> Path:
    """Compile the CUDA operators for all GPUs, write the library to `folder` and return its path.

    Raises:
        NativeBuildError: they cannot be compiled, or the folder cannot be written; the message says how to mend it.
    """
    library = _cuda.ahead_of_time_library()
    try:  # before minutes are spent
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise NativeBuildError(f"{folder} cannot be written ({error}): name another folder.") from error
    return Path(shutil.copy(library.build(), folder / f"{NAME}.so"))


def main(arguments: Sequence[str] | None = None) -> int:
    """Build the library that the arguments name and return the exit status."""
    parser = argparse.ArgumentParser("python -m cuda_ext", description="Compiles the native operators ahead of time.")
    parser.add_argument("action", nargs="?", choices=["build"], default="build")
    parser.add_argument("--cuda", action="store_true", help="the CUDA operators instead of those for CPU")
    parser.add_argument("--output", type=Path, help=f"with --cuda: the folder to put {NAME}.so into, for all GPUs")
    given = parser.parse_args(arguments)
    if given.output is not None and not given.cuda:
        parser.error("--output needs --cuda")
    try:
        if given.output is not None:
            print(build_cuda_into(given.output))
        else:
            print(build_native("cuda" if given.cuda else "cpu"))
    except (NativeBuildError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
