"""The order of a fused step's parts; on a GPU, that replays do what the first run did."""

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch

from ns_multigpu.core.world import World
from ns_multigpu.plugin.blocks.plan_graphs import PlanGraphs
from ns_multigpu.plugin.blocks.step_graphs import GraphPool, StepGraphs
from ns_multigpu.plugin.blocks.timing import StepTimer


class Step:
    """Notes what is called; its numbers show how often it ran on the device."""

    def __init__(self, notes: list[str], device: str = "cpu") -> None:
        self.notes = notes
        self.rendered, self.updated = (torch.zeros(3, device=device) for _ in range(2))

    def render(self) -> None:
        self.notes.append("render")
        self.rendered += 1

    def exchange(self) -> None:
        self.notes.append("exchange")

    def update(self) -> None:
        self.notes.append("update")
        self.updated += self.rendered


def several(world: World) -> World:
    """A world with a group, to which nothing is said."""
    return replace(world, size=2, group=object())  # type: ignore[arg-type]


@pytest.mark.parametrize("alone", [True, False])
def test_on_a_cpu_every_step_runs_as_it_is(alone: bool) -> None:
    world = World.single() if alone else several(World.single())
    notes: list[str] = []
    timer = StepTimer(world.device)
    timer.listener = lambda part: notes.append(f"<{part}>")
    graphs = StepGraphs(world, lambda: notes.append("computed"))
    step: Any = Step(notes)
    once = ["<compute>", "render", "update"]
    if not alone:
        once = ["<compute>", "render", "computed", "<exchange>", "exchange", "<compute>", "update"]
    for _ in range(3):
        graphs.take(step, timer)
    graphs.forget()
    graphs.take(step, timer)
    assert notes == 4 * once
    assert timer.take().keys() == ({"compute"} if alone else {"compute", "exchange"})
    assert step.rendered.tolist() == [4.0] * 3 and step.updated.tolist() == [10.0] * 3


@pytest.mark.gpu
@pytest.mark.parametrize("alone", [True, False])
def test_on_a_gpu_steps_are_replayed_until_they_change(alone: bool) -> None:
    world = World.single("cuda:0")
    world = world if alone else several(world)
    notes: list[str] = []
    graphs, timer = StepGraphs(world, lambda: None), StepTimer(world.device)
    step: Any = Step(notes, "cuda")
    for taken in range(1, 6):
        graphs.take(step, timer)
        assert step.rendered.tolist() == [float(taken)] * 3
        assert step.updated.tolist() == [taken * (taken + 1) / 2] * 3
    assert notes.count("render") == notes.count("update") == 2, "it ran once, and was captured once"
    other: Any = Step(notes, "cuda")
    graphs.forget()
    for _ in range(3):
        graphs.take(other, timer)
    assert other.updated.tolist() == [6.0] * 3 and step.rendered.tolist() == [5.0] * 3
    assert notes.count("render") == 4


@pytest.mark.parametrize(
    ("free", "peak", "spare", "kept"),
    [(9 << 30, 58, True, True), (9 << 30, 19, True, False), (3 << 30, 58, False, False)],
)
def test_graphs_are_made_where_there_is_room_for_two_sets_of_buffers(
    free: int, peak: int, spare: bool, kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sizes as the allocator would tell them; nothing is captured on a CPU, but it is asked for. What graphs of before
    hold is kept for the next ones, unless it is short, or three times what was ever in use (`peak`)."""
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 60 << 30)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 56 << 30)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: peak << 30)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free, 139 << 30))
    graphs = PlanGraphs(torch.device("cuda:0"))
    asked: list[object] = []

    class Asked(Exception):
        pass

    def capture(*parts: object) -> list[object]:
        asked.append(parts)
        raise Asked

    monkeypatch.setattr(GraphPool, "capture", lambda _, *parts: capture(*parts))
    runs: list[int] = []
    graphs.take("plan", lambda: runs.append(1))
    for _ in range(3):
        if spare:
            with pytest.raises(Asked):
                graphs.take("plan", lambda: runs.append(1))
        else:
            graphs.take("plan", lambda: runs.append(1))
    assert (len(asked), len(runs)) == ((3, 1) if spare else (0, 4))
    graphs._retired = ["a graph of the step before"]
    graphs.forget()
    graphs.take("plan", lambda: runs.append(1))
    pool = graphs._pool
    with pytest.raises(Asked) if spare else nullcontext():
        graphs.take("plan", lambda: runs.append(1))
    assert bool(graphs._retired) == (graphs._pool is pool) == kept, "graphs that nobody uses keep memory that is short"


def test_graphs_of_plans_that_are_not_made_any_more_go(monkeypatch: pytest.MonkeyPatch) -> None:
    class Graph:
        def __init__(self, part: Any) -> None:
            self.replay = part

    monkeypatch.setattr("ns_multigpu.plugin.blocks.plan_graphs.has_spare_room", lambda _: True)
    graphs, captures = PlanGraphs(torch.device("cuda:0")), list[int]()

    def capture(part: Any) -> list[Any]:
        part()
        return [Graph(lambda: None)]

    monkeypatch.setattr(graphs._pool, "capture", capture)
    for plan in [0, 0, *(p for p in range(1, 20) for _ in range(2)), 0, 19]:
        graphs.take(plan, lambda plan=plan: captures.append(plan))
    assert captures.count(0) == 3, "run, captured, and captured again after it had gone"
    assert captures.count(19) == 2 and len(graphs._captured) == 16


@pytest.mark.gpu
def test_pieces_that_fit_no_graph_any_more_are_given_back() -> None:
    """Steps that need a little more each time, as those of a growing model do."""
    world = World.single("cuda:0")
    graphs, timer = StepGraphs(world, lambda: None), StepTimer(world.device)

    class Growing(Step):
        size = 0

        def render(self) -> None:
            self.held = [torch.ones(self.size, 1 << 20, device="cuda") for _ in range(4)]
            self.rendered += 1

    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    for size in range(100, 400, 12):
        step: Any = Growing([], "cuda")
        step.size = size
        graphs.forget()
        for _ in range(3):
            graphs.take(step, timer)
        assert step.rendered.tolist() == [3.0] * 3
        del step
    peak, reserved = torch.cuda.max_memory_allocated(), torch.cuda.memory_reserved()
    assert peak > 4 << 30 and reserved < 3 * peak + (3 << 30)


@pytest.mark.gpu
def test_on_a_gpu_each_plan_has_a_graph_of_its_own() -> None:
    graphs = PlanGraphs(torch.device("cuda:0"))
    source, total = torch.zeros(1000, device="cuda"), torch.zeros(1000, device="cuda")
    runs: list[int] = []

    def step(factor: int) -> list[torch.Tensor]:
        runs.append(factor)
        scaled = source * factor  # memory of the pool, which the graphs share
        total.add_(scaled.square())
        return [scaled]

    expected = 0.0
    for number, factor in enumerate([2, 3, 2, 3, 2, 5, 3, 2, 3, 2]):
        source.fill_(float(number))
        (scaled,) = graphs.take(factor, lambda factor=factor: step(factor))
        expected += float((number * factor) ** 2)
        assert (scaled == number * factor).all() and (total == expected).all()
    assert sorted(runs) == [2, 2, 3, 3, 5], "each ran once as it is, and was captured when it came again"
    graphs.forget()
    for _ in range(3):
        (scaled,) = graphs.take(2, lambda: step(2))
    assert sorted(runs) == [2, 2, 2, 2, 3, 3, 5]
    assert (scaled == 18).all()
