"""A short name: `python -m benchmarks.tile` is the command of `benchmarks/scaling/tile.py`."""

import sys

from benchmarks.scaling.tile import main

if __name__ == "__main__":
    sys.exit(main())
