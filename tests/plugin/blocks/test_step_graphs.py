"""The order of a step's parts, and that replays do what the first run did: on a CPU with graphs that are recorded."""

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from ns_multigpu.core.assign.assignment import MOST_KEPT
from ns_multigpu.core.exchange.transports import Collective, Parts
from ns_multigpu.plugin.blocks.graphs import WORTH_SEVERAL, GraphPool, StepGraphs
from ns_multigpu.plugin.blocks.timing import StepTimer
from tests.lib.ranks import DEVICES
from tests.lib.recorded import RecordedPool

CUT = 3
"""Collectives of a step that has some."""


class Step:
    """Step that records its calls; its numbers count its runs on the device.

    Args:
        notes: called for each launched part and each collective.
        cuts: collectives, with a part before each and one behind them.
    """

    def __init__(self, notes: list[str], cuts: int = 0, device: str = "cpu") -> None:
        self.notes, self.cuts = notes, cuts
        self.runs = torch.zeros(3, device=device)
        self.met = torch.zeros(3, device=device)
        self.total = torch.zeros(3, device=device)

    def parts(self, factor: float = 1.0) -> Parts[list[torch.Tensor]]:
        self.notes.append("part 0")
        self.runs.add_(1)
        scaled = self.runs * factor  # memory of the graphs' own
        for cut in range(self.cuts):
            yield Collective(self._meet)
            self.notes.append(f"part {cut + 1}")
            self.total.add_(self.met)
        self.total.add_(scaled)
        return [scaled]

    def _meet(self) -> None:
        self.notes.append("meets")
        self.met.copy_(10 * self.runs)

    def expected(self, runs: int, factor: float = 1.0) -> float:
        """Return `total` after so many steps."""
        return (10 * self.cuts + factor) * runs * (runs + 1) / 2


class Pool(RecordedPool):
    """Pool that records, and reports given amounts of free memory.

    Attributes:
        family: this pool and those that took its place, in order.
        prepared, captured: how often it was made ready for the graphs of a step, and its graphs.
        spare, full: its answers.
    """

    def __init__(self, family: "list[Pool] | None" = None) -> None:
        super().__init__()
        self.family = [] if family is None else family
        self.family.append(self)
        self.prepared, self.captured = 0, list[weakref.ref[Any]]()
        self.spare, self.full = True, False

    def afresh(self) -> "Pool":
        return Pool(self.family)

    def has_spare_capacity(self) -> bool:
        return self.spare

    def hoards(self) -> bool:
        return self.full

    def prepare(self) -> None:
        self.prepared += 1

    def capture(self, part: Callable[[], None], stream: Any = None) -> Any:
        graph = super().capture(part, stream)
        self.captured.append(weakref.ref(graph))
        return graph

    @property
    def alive(self) -> int:
        """Return the graphs that are referenced."""
        return sum(graph() is not None for graph in self.captured)


def make_graphs(device: str, notes: list[str], pool: GraphPool | None = None) -> tuple[StepGraphs, StepTimer]:
    """Graphs, and their timer, that note what is measured and `computed`."""
    timer = StepTimer(torch.device(device))
    timer.listener = lambda part: notes.append(f"<{part}>")
    pool = pool or (GraphPool(torch.device(device)) if device == "cuda" else Pool())
    return StepGraphs(timer, lambda: notes.append("computed"), pool), timer


@pytest.mark.parametrize("cuts", [0, CUT])
def test_without_graphs_every_step_runs_as_it_is(cuts: int) -> None:
    notes: list[str] = []
    timer = StepTimer(torch.device("cpu"))
    timer.listener = lambda part: notes.append(f"<{part}>")
    graphs, step = StepGraphs(timer, lambda: notes.append("computed"), None), Step(notes, cuts)
    once = ["part 0", "computed"]
    for cut in range(cuts):
        once += ["<exchange>", "meets", f"part {cut + 1}"]
    for taken in range(1, 5):
        if taken == 4:
            graphs.forget()
        (found,) = graphs.take("plan", step.parts)
        assert found.tolist() == [float(taken)] * 3 and step.total.tolist() == [step.expected(taken)] * 3
    assert notes == 4 * once, "and `computed` once a step, before the first that waits for others"
    assert timer.take().keys() == ({"exchange"} if cuts else set())


@pytest.mark.parametrize("cuts", [0, CUT])
@pytest.mark.parametrize("device", DEVICES)
def test_steps_are_replayed_until_they_change(device: str, cuts: int) -> None:
    notes: list[str] = []
    graphs, timer = make_graphs(device, notes)
    step = Step(notes, cuts, device)
    for taken in range(1, 6):
        notes.clear()
        (found,) = graphs.take("plan", step.parts)
        assert step.runs.tolist() == [float(taken)] * 3 and found.tolist() == [float(taken)] * 3
        assert step.total.tolist() == [step.expected(taken)] * 3
        launched = [note for note in notes if note.startswith("part")]
        assert launched == [f"part {k}" for k in range(cuts + 1) if taken < 3], "it ran once, and was captured"
        assert notes.count("meets") == cuts, "what no graph holds is launched each time, and not while it is captured"
        assert notes.count("computed") == 1
        if taken > 2:
            replay = ["<compute>", "computed"]
            for _ in range(cuts):
                replay += ["<exchange>", "meets", "<compute>"]
            assert notes == replay
    assert timer.take().keys() == ({"compute", "exchange"} if cuts else {"compute"})
    notes.clear()
    other = Step(notes, cuts, device)
    graphs.forget()
    for _ in range(3):
        graphs.take("plan", other.parts)
    assert other.total.tolist() == [other.expected(3)] * 3 and step.runs.tolist() == [5.0] * 3
    assert notes.count("part 0") == 2


@pytest.mark.parametrize("cuts", [0, CUT])
@pytest.mark.parametrize("device", DEVICES)
def test_each_plan_has_its_own_graphs(device: str, cuts: int) -> None:
    notes: list[str] = []
    graphs, _ = make_graphs(device, notes)
    step = Step(notes, cuts, device)
    launched, expected = dict[int, int](), 0.0

    def parts(factor: int) -> Parts[Any]:
        launched[factor] = launched.get(factor, 0) + 1
        return step.parts(float(factor))

    for number, factor in enumerate([2, 3, 2, 3, 2, 5, 3, 2, 3, 2], start=1):
        (scaled,) = graphs.take(factor, lambda factor=factor: parts(factor))
        expected += 10 * cuts * number + factor * number
        assert scaled.tolist() == [float(number * factor)] * 3 and step.total.tolist() == [expected] * 3
    assert launched == {2: 2, 3: 2, 5: 1}, "each ran once as it is, and was captured when it came again"
    assert notes.count("meets") == 10 * cuts
    graphs.forget()
    for _ in range(3):
        (scaled,) = graphs.take(2, lambda: parts(2))
    assert launched == {2: 4, 3: 2, 5: 1} and scaled.tolist() == [26.0] * 3


@pytest.mark.parametrize("device", DEVICES)
def test_several_steps_are_one_launch_where_one_has_lasted(device: str) -> None:
    notes: list[str] = []
    graphs, _ = make_graphs(device, notes)
    step = Step(notes, device=device)
    for taken in range(1, WORTH_SEVERAL + 2):
        assert graphs.at_once("plan", 4) == 1, f"{taken - 1} were taken"
        graphs.take("plan", step.parts)
    assert graphs.at_once("plan", 4) == 4 and graphs.at_once("other", 4) == 1
    for taken, captured in ((WORTH_SEVERAL + 5, 4), (WORTH_SEVERAL + 9, 0)):
        notes.clear()
        (found,) = graphs.take("plan", step.parts, 4)
        assert step.runs.tolist() == found.tolist() == [float(taken)] * 3
        assert step.total.tolist() == [step.expected(taken)] * 3, "each step has gone on from the one before"
        assert notes == [*["part 0"] * captured, "<compute>", "computed"]
    (found,) = graphs.take("plan", step.parts)
    assert found.tolist() == [float(WORTH_SEVERAL + 10)] * 3
    graphs.forget()
    graphs.take("plan", step.parts)
    graphs.take("plan", step.parts)
    assert graphs.at_once("plan", 4) == 1, "it is another step"


def test_steps_with_collectives_are_launched_one_by_one() -> None:
    graphs, _ = make_graphs("cpu", [])
    step = Step([], CUT)
    for _ in range(WORTH_SEVERAL + 9):
        graphs.take("plan", step.parts)
    assert graphs.at_once("plan", 4) == 1


def test_several_steps_are_taken_where_no_graph_can_hold_them() -> None:
    notes, pool = list[str](), Pool()
    pool.spare = False
    graphs, _ = make_graphs("cpu", notes, pool)
    step = Step(notes, CUT)
    (found,) = graphs.take("plan", step.parts, 3)
    assert found.tolist() == [3.0] * 3 and step.total.tolist() == [step.expected(3)] * 3
    assert pool.captured == [] and notes.count("computed") == 1 and notes.count("meets") == 3 * CUT


def test_captured_step_runs_once() -> None:
    """A capture runs nothing; and one that fails leaves the next step as it comes."""
    notes: list[str] = []
    graphs, _ = make_graphs("cpu", notes)
    step = Step(notes, CUT)
    graphs.take("plan", step.parts)

    def short(factor: float = 1.0) -> Parts[Any]:
        yield from step.parts(factor)
        raise MemoryError

    with pytest.raises(MemoryError):
        graphs.take("plan", short)
    assert step.runs.tolist() == [1.0] * 3 and notes.count("meets") == CUT, "nothing has been taken"
    with graphs.measure("compute"):
        assert notes[-1] == "<compute>", "nothing is being captured any more"
    for taken in (2, 3):
        graphs.take("plan", step.parts)
        assert step.total.tolist() == [step.expected(taken)] * 3


@pytest.mark.parametrize(
    ("free", "peak", "spare", "hoards"),
    [(9 << 30, 58, True, False), (9 << 30, 19, True, True), (3 << 30, 58, False, False)],
)
def test_graphs_need_memory_for_two_sets_of_buffers(
    free: int, peak: int, spare: bool, hoards: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sizes as the allocator gives them; memory is hoarded that is three times what was ever in use (`peak`)."""
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 60 << 30)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 56 << 30)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: peak << 30)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free, 139 << 30))
    pool = GraphPool(torch.device("cuda:0"))
    assert (pool.has_spare_capacity(), pool.hoards()) == (spare, hoards)


def test_retired_graph_is_released_when_the_next_exists() -> None:
    """Its pool is released only if it is full of unused blocks, or if memory is exhausted."""
    notes, first = list[str](), Pool()
    graphs, _ = make_graphs("cpu", notes, first)
    step = Step(notes, CUT)

    def take(plan: str = "plan", times: int = 2) -> None:
        for _ in range(times):
            graphs.take(plan, step.parts)

    take()
    assert (first.prepared, first.alive) == (1, CUT + 1)
    for _ in range(2):  # a step that is soon replaced is not captured, and what is retired stays
        graphs.forget()
        take(times=1)
        assert len(first.captured) == first.alive == CUT + 1
    take(times=1)
    assert len(first.captured) == 2 * first.alive == 2 * (CUT + 1) and first.prepared == 2
    first.full = True
    take("other")
    assert first.family == [first], "graphs of this step are in it"
    graphs.forget()
    take()
    _, second = first.family
    assert (first.prepared, second.prepared, first.alive, second.alive) == (3, 1, 0, CUT + 1)
    second.spare = False
    notes.clear()
    take(times=1)
    assert "part 0" not in notes, "captured parts need no more memory"
    take("other")
    assert second.alive == len(second.captured) == CUT + 1 and len(first.family) == 2
    graphs.forget()
    take()
    assert second.alive == 0 and len(first.family) == 3
    runs = int(step.runs[0])
    assert step.total.tolist() == [step.expected(runs)] * 3


def test_graphs_of_obsolete_plans_are_released() -> None:
    notes, pool = list[str](), Pool()
    graphs, _ = make_graphs("cpu", notes, pool)
    step, captures, taken = Step(notes), list[int](), 0

    def take(plan: int) -> None:
        nonlocal taken
        taken += 1
        graphs.take(plan, lambda: captures.append(plan) or step.parts())

    for plan in [0, 0, *(p for p in range(1, MOST_KEPT + 4) for _ in range(2)), 0, MOST_KEPT + 3]:
        take(plan)
    assert captures.count(0) == 3, "run, captured, and captured again after it had gone"
    assert captures.count(MOST_KEPT + 3) == 2 and pool.alive == MOST_KEPT
    # The one that goes is the one that was used longest ago, and not the one that was captured first.
    captures.clear()
    for plan in (5, -1, -1, 5, 6):
        take(plan)
    assert captures == [-1, -1, 6] and pool.alive == MOST_KEPT
    assert step.total.tolist() == [step.expected(taken)] * 3


@pytest.mark.gpu
def test_memory_blocks_too_small_for_graphs_are_released() -> None:
    """Steps that need a little more each time, as those of a growing model do."""
    graphs, _ = make_graphs("cuda", [])

    class Growing(Step):
        size = 0

        def parts(self, factor: float = 1.0) -> Parts[Any]:
            self.held = [torch.ones(self.size, 1 << 20, device="cuda") for _ in range(4)]
            return (yield from super().parts(factor))

    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_reserved()  # by graphs of other tests
    for size in range(100, 400, 12):
        step: Any = Growing([], CUT, "cuda")
        step.size = size
        graphs.forget()
        for _ in range(3):
            graphs.take("plan", step.parts)
        assert step.total.tolist() == [step.expected(3)] * 3
        del step
    peak, reserved = torch.cuda.max_memory_allocated(), torch.cuda.memory_reserved() - before
    assert peak > 4 << 30 and reserved < 3 * peak + (3 << 30)
