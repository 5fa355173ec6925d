"""Exchanges within a graph count as exchange time, and the rest of the graph as computation."""

import time
from typing import Any

import pytest
import torch

from cuda_ext import add_clock
from cuda_ext.ops.common import clock
from ns_multigpu.core.exchange.transports import Collective, Parts
from ns_multigpu.plugin.blocks.graphs import GraphPool, StepGraphs
from ns_multigpu.plugin.blocks.timing import StepTimer
from tests.lib.ranks import DEVICES
from tests.lib.recorded import RecordedPool


def steps(graphs: StepGraphs, x: torch.Tensor, count: int, *, exchanges: int = 2, collective: bool = False) -> None:
    def parts() -> Parts[None]:
        for _ in range(exchanges):
            with graphs.measure("exchange"):
                x.add_(1)
            with graphs.measure("compute"):
                x.mul_(2)
        if collective:
            yield Collective(lambda: None)

    for _ in range(count):
        graphs.take("plan", parts)


@pytest.fixture
def sleeps(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a clock that goes on by 2 ms whenever it is read; how often it was."""
    reads: list[int] = []

    def now() -> int:
        reads.append(1)
        return 2_000_000 * len(reads)

    monkeypatch.setattr(clock.time, "perf_counter_ns", now)
    return reads


@pytest.mark.parametrize("collective", [False, True])
def test_exchanges_in_graphs_are_counted_for_each_replay(collective: bool, sleeps: list[int]) -> None:
    timer = StepTimer(torch.device("cpu"))
    graphs = StepGraphs(timer, lambda: None, RecordedPool())
    graphs.count_exchanges()  # there are no graphs yet
    steps(graphs, torch.zeros(1), 6, collective=collective)  # one as it comes, and five replays
    assert len(sleeps) >= 5 * 2 * 2
    timer.take()
    graphs.count_exchanges()
    assert not any(timer.take().values()), "the device's times are pending"
    graphs.count_exchanges()
    moved = timer.take()
    assert (moved["exchange"], moved["compute"]) == pytest.approx((5 * 2 * 2e-3, -5 * 2 * 2e-3))
    graphs.forget()
    for _ in range(2):
        graphs.count_exchanges()
        assert not any(timer.take().values()), "counted once"
    steps(graphs, torch.zeros(1), 3, collective=collective)
    timer.take()
    for _ in range(2):
        graphs.count_exchanges()
    assert timer.take()["exchange"] == pytest.approx(2 * 2 * 2e-3), "of other graphs, too"


def test_graphs_without_exchange_do_not_change_the_times() -> None:
    timer = StepTimer(torch.device("cpu"))
    graphs = StepGraphs(timer, lambda: None, RecordedPool())
    steps(graphs, torch.zeros(1), 4, exchanges=0)
    for _ in range(2):
        graphs.count_exchanges()
    assert timer.take().get("exchange", 0.0) == 0.0


@pytest.mark.gpu
def test_the_clock_in_graphs_on_a_gpu() -> None:
    """A sleep of the device shows."""
    device = torch.device("cuda:0")
    timer = StepTimer(device)
    graphs = StepGraphs(timer, lambda: None, GraphPool(device))

    def parts() -> Parts[Any]:
        with graphs.measure("exchange"):
            torch.cuda._sleep(20_000_000)
        yield from ()

    for _ in range(4):
        graphs.take("plan", parts)
    torch.cuda.synchronize()
    timer.take()
    graphs.count_exchanges()
    torch.cuda.synchronize()
    graphs.count_exchanges()
    assert 3 * 5e-3 < timer.take()["exchange"] < 3 * 50e-3


@pytest.mark.parametrize("device", DEVICES)
def test_a_clock_adds_how_long_something_took(device: str) -> None:
    total = torch.tensor([5], device=device)
    for sign in (-1, 1):
        add_clock(total, sign)
        time.sleep(0.01)
    assert 5 <= int(total) < 1_000_000_000
    torch.library.opcheck(
        torch.ops.ns_multigpu.add_clock.default, (total, 1), test_utils=("test_schema", "test_faketensor")
    )
    with pytest.raises(TypeError, match=r"total is torch\.float32"):
        add_clock(total.float(), 1)
    with pytest.raises(ValueError, match=r"sign 1 or -1, not 0"):
        add_clock(total, 0)
