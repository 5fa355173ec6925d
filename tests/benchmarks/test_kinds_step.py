"""The benchmark of a training step of each kind of point: both of its ways draw something, and train."""

import pytest
import torch

from benchmarks.kernels import kinds_step
from ns_multigpu.primitives.registry import KINDS
from tests.recorded import RecordedPool


@pytest.mark.parametrize("kind", KINDS)
def test_both_ways_train(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kinds_step, "GraphPool", lambda _: RecordedPool())
    both = kinds_step.Both(kind, 60, (48, 40), torch.device("cpu"))
    work, step = both.captured()
    step.status()
    for way, turns in ((both.ordinary(), 1), (work, 3)):
        for _ in range(turns):
            before = {name: value.detach().clone() for name, value in both.params.items()}
            way()
            assert all(bool((value.detach() != before[name]).any()) for name, value in both.params.items())
    status = step.status()
    assert status.done == 3 and not status.full and float(step.report[-1]) == 0
    assert status.rows > 30 and status.intersections > status.rows
