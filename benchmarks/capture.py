"""A short name: `python -m benchmarks.capture` is the command of `benchmarks/captures/capture.py`."""

from benchmarks.captures.capture import main

if __name__ == "__main__":
    main()
