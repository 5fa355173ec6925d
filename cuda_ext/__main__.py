"""`python -m cuda_ext`: compiles the CPU operators ahead of time and prints where they lie."""

import sys

from cuda_ext._build import NativeBuildError
from cuda_ext._load import build_native


def main() -> int:
    """Builds; returns the exit status."""
    try:
        print(build_native())
    except NativeBuildError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
