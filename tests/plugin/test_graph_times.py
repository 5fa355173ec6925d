"""What a graph exchanges within itself is the exchange's time, though the graph as a whole is the computation's."""

from typing import Any

import pytest
import torch

from ns_multigpu.core.transports import Collective, Parts
from ns_multigpu.plugin.blocks.graphs import GraphPool, StepGraphs
from ns_multigpu.plugin.blocks.timing import StepTimer
from tests.recorded import RecordedPool


class Event:
    """Notes nothing: 2 ms lie between any two."""

    def record(self) -> None:
        return

    def elapsed_time(self, other: "Event") -> float:
        return 2.0


class TimedPool(RecordedPool):
    """A pool whose graphs have events."""

    def event(self) -> Event:
        return Event()


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


@pytest.mark.parametrize("collective", [False, True])
def test_exchanges_in_graphs_are_counted_for_each_replay(collective: bool) -> None:
    timer = StepTimer(torch.device("cpu"))
    graphs = StepGraphs(timer, lambda: None, TimedPool())
    steps(graphs, torch.zeros(1), 6, collective=collective)  # one as it comes, and five replays
    before = dict(timer._seconds)
    graphs.count_exchanges()
    assert timer._seconds["exchange"] == pytest.approx(before["exchange"] + 5 * 2 * 2e-3)
    assert timer._seconds["compute"] == pytest.approx(before["compute"] - 5 * 2 * 2e-3)
    graphs.count_exchanges()
    assert timer._seconds["exchange"] == pytest.approx(before["exchange"] + 5 * 2 * 2e-3), "counted once"
    steps(graphs, torch.zeros(1), 3, collective=collective)
    graphs.forget()
    graphs.count_exchanges()
    assert timer._seconds["exchange"] < before["exchange"] + 5 * 2 * 2e-3 + 1e-3, "graphs that are gone tell nothing"


def test_graphs_that_exchange_nothing_leave_the_times_alone() -> None:
    timer = StepTimer(torch.device("cpu"))
    graphs = StepGraphs(timer, lambda: None, TimedPool())
    steps(graphs, torch.zeros(1), 4, exchanges=0)
    graphs.count_exchanges()
    assert timer.take().get("exchange", 0.0) == 0.0


@pytest.mark.gpu
def test_events_in_graphs_on_a_gpu() -> None:
    """A sleep of the device between two of them shows."""
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
    assert 3 * 5e-3 < timer.take()["exchange"] < 3 * 50e-3
