"""A picture of a trace shows what is in it."""

import gzip
import json
from pathlib import Path

import pytest

from benchmarks.captures import timeline


def a_trace(file: Path) -> None:
    """Two steps of 2 ms, each with 1 ms of drawing, half a millisecond at a barrier and a launch; times in us."""
    events = [{"ph": "M", "name": "process_name"}]
    for begin in (0, 2000):
        events += [
            {"ph": "X", "cat": "cuda_runtime", "name": "cudaGraphLaunch", "ts": begin - 50, "dur": 40},
            {"ph": "X", "cat": "kernel", "name": "void nsmg::forward<3>(int)", "ts": begin, "dur": 400},
            {"ph": "X", "cat": "kernel", "name": "void nsmg::backward<3, true>(int)", "ts": begin + 400, "dur": 600},
            {"ph": "X", "cat": "kernel", "name": "symmetric_memory::barrier_kernel", "ts": begin + 1000, "dur": 500},
            {"ph": "X", "cat": "cuda_runtime", "name": "cudaEventSynchronize", "ts": begin + 900, "dur": 300},
        ]
    with gzip.open(file, "wt") as out:
        json.dump({"traceEvents": events}, out)


def test_timeline_shows_trace_events(tmp_path: Path) -> None:
    a_trace(file := tmp_path / "trace.json.gz")
    device, host, busy = timeline.bars(file, 0.0, 1.2)
    assert device == [("forward", 0.0, 0.4), ("backward", 0.4, 0.6), ("exchange", 1.0, 0.5)]
    assert host == [("waits", 0.9, 0.3)], "what began before is not shown"
    assert busy == pytest.approx(2000 / 3500), "a barrier is no work"
    later, _, _ = timeline.bars(file, 2000 / 3500, 1.2)
    assert [kind for kind, _, _ in later] == ["forward", "backward", "exchange"]


def test_a_picture_of_two_traces(tmp_path: Path) -> None:
    for name in ("one", "two"):
        a_trace(tmp_path / f"{name}.json.gz")
    traces = [f"{name}={tmp_path / name}.json.gz" for name in ("one", "two")]
    timeline.main(["draw", "--traces", *traces, "--picture", str(tmp_path / "steps.png")])
    assert (tmp_path / "steps.png").read_bytes()[:4] == b"\x89PNG"
