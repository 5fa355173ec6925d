"""`StepTimer`: on a GPU few steps stand for all, and everything else is measured; here with events that only count."""

from typing import Any

import pytest
import torch

from ns_multigpu.plugin.blocks.timing import ONE_OF, StepTimer


class Gpu:
    """GPU with a clock that tests advance.

    Attributes:
        made, recorded, waits: numbers of events made and recorded, and of waits.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self.made = self.recorded = self.waits = 0

    def event(self, *, enable_timing: bool) -> "Event":
        assert enable_timing
        self.made += 1
        return Event(self)


class Event:
    def __init__(self, gpu: Gpu) -> None:
        self.gpu, self.at = gpu, -1.0

    def record(self) -> None:
        self.gpu.recorded += 1
        self.at = self.gpu.now

    def synchronize(self) -> None:
        self.gpu.waits += 1

    def elapsed_time(self, later: "Event") -> float:
        assert 0 <= self.at <= later.at
        return 1e3 * (later.at - self.at)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    gpu = Gpu()
    monkeypatch.setattr(torch.cuda, "Event", gpu.event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: pytest.fail("the timer waits for later work"))
    return gpu


def take_steps(timer: StepTimer, gpu: Gpu, steps: int, slower: float = 1.0) -> None:
    """A block, the first step of which takes `slower` times as long; then waits for a millisecond."""
    for step in range(steps):
        factor = slower if step == 0 else 1.0
        with timer.step():
            for part, seconds in (("data", 0.25), ("data", 0.5), ("compute", 2.0), ("exchange", 1.0), ("compute", 4.0)):
                with timer.measure(part):
                    gpu.now += factor * seconds
                gpu.now += 0.125  # between parts, not counted
    with timer.measure("waiting"):
        gpu.now += 0.001


@pytest.mark.parametrize("windows", [[1, 249, 250, 250], [10] * 7, [3] * 9, [1] * 20])
def test_sampled_steps_are_extrapolated_to_the_block(gpu: Gpu, windows: list[int]) -> None:
    timer, names = StepTimer(torch.device("cuda", 0)), list[str]()
    timer.listener = names.append
    for steps in windows:
        take_steps(timer, gpu, steps)
        expected = {"data": 0.75 * steps, "compute": 6.0 * steps, "exchange": 1.0 * steps, "waiting": 0.001}
        assert timer.take() == pytest.approx(expected)
    steps = sum(windows)
    assert names.count("compute") == 2 * steps, "the listener hears of parts that are not measured too"
    assert gpu.recorded == 2 * (5 * -(-steps // ONE_OF) + len(windows))


@pytest.mark.parametrize("groups", [[1, 1, 4, 4, 2], [4] * 9, [1, 9, 3], [3, 4] * 5])
def test_steps_that_are_taken_at_once_stand_for_as_many(gpu: Gpu, groups: list[int]) -> None:
    timer = StepTimer(torch.device("cuda", 0))
    measured, first = 0, 0
    for steps in groups:
        with timer.step(steps), timer.measure("compute"):
            gpu.now += 2.0 * steps
        measured += any(number % ONE_OF == 0 for number in range(first, first + steps))
        first += steps
    assert timer.take() == pytest.approx({"compute": 2.0 * sum(groups)})
    assert gpu.recorded == 2 * measured, "those among which is one that is measured in any case"


def test_measurements_can_be_read_later(gpu: Gpu) -> None:
    timer, other = StepTimer(torch.device("cuda", 0)), StepTimer(torch.device("cuda", 0))
    answers = []
    for count in (50, 21):
        for one in (timer, other):
            take_steps(one, gpu, count)
        answers.append((timer.cut(), other.take()))
    assert gpu.waits == 2, "the first was not read"
    assert all(later() == at_once for later, at_once in answers) and gpu.waits == 4 and timer.take() == {}


@pytest.mark.parametrize("block", [25, 50, 10])
def test_slow_first_step_of_a_block_counts_once(gpu: Gpu, block: int) -> None:
    timer = StepTimer(torch.device("cuda", 0))
    for _ in range(ONE_OF):
        take_steps(timer, gpu, block, slower=11.0)
    assert timer.take()["compute"] == pytest.approx(6.0 * ONE_OF * (block + 10))


def test_failed_step_does_not_change_the_timer(gpu: Gpu) -> None:
    timer = StepTimer(torch.device("cuda", 0))
    take_steps(timer, gpu, 1)
    with pytest.raises(ValueError), timer.step(), timer.measure("compute"):
        raise ValueError
    assert timer.part == "compute"
    timer.take()
    with timer.measure("compute"):
        gpu.now += 1.0
    assert timer.take() == {"compute": 1.0}


def test_on_a_processor_all_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    clock: Any = iter(range(1000))
    monkeypatch.setattr("ns_multigpu.plugin.blocks.timing.time.perf_counter", lambda: float(next(clock)))
    timer = StepTimer(torch.device("cpu"))
    for _ in range(10):
        with timer.step(), timer.measure("compute"):
            pass
    with timer.measure("waiting"):
        pass
    assert timer.take() == {"compute": 10.0, "waiting": 1.0}
    assert timer.take() == {}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_part_within_another_is_not_counted_twice(gpu: Gpu, monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    monkeypatch.setattr("ns_multigpu.plugin.blocks.timing.time.perf_counter", lambda: gpu.now)
    timer, names = StepTimer(torch.device(device)), list[str]()
    timer.listener = names.append
    for _ in range(2):
        with timer.measure("compute"):
            gpu.now += 1.0
            with timer.within("compute", "exchange"):
                gpu.now += 2.0
            assert timer.part == "compute", "what goes on is the part around"
            gpu.now += 4.0
        with timer.within("compute", "exchange"):
            gpu.now += 8.0
    assert timer.take() == {"compute": 10.0, "exchange": 4.0}
    assert names == ["compute", "exchange"] * 2
