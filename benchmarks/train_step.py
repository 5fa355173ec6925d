"""A short name: `python -m benchmarks.train_step` is the command of `benchmarks/kernels/train_step.py`."""

import sys

from benchmarks.kernels.train_step import main

if __name__ == "__main__":
    sys.exit(main())
