"""Steps are drawn a few at a time, which changes nothing of what is trained."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ns_multigpu.core.assign.assignment import Feedback
from ns_multigpu.core.dist.world import World
from ns_multigpu.core.step.step_settings import Status
from ns_multigpu.plugin.blocks import graphs, step_inputs
from ns_multigpu.plugin.blocks.step_capacities import StepCapacities
from ns_multigpu.plugin.blocks.step_inputs import StepInputsMaker
from ns_multigpu.plugin.blocks.training import Training
from ns_multigpu.plugin.capture.datamanager import DistributedDataManager
from tests.lib.training_run import follow, write_capture
from tests.plugin.blocks.tried_steps import start_with_small_capacity, take_from_graphs

OPTIONS = {
    "fused_steps": "always",
    "steps_per_checksum": 0,
    "steps_per_numeric_check": 8,
    "pipeline.model.num_downscales": 0,
    "pipeline.model.background_color": "random",
    "batch_scaling": "sqrt-to-none",
}


def train(
    folder: Path,
    together: int,
    monkeypatch: pytest.MonkeyPatch,
    *,
    steps: int = 15,
    captured: bool = False,
    tight: bool = False,
) -> tuple[dict[str, torch.Tensor], list[str]]:
    """Train with steps of two views. Return the model and the host's actions: D draws a step, T takes it. F reads the
    device's status after a block that exceeded its capacity, with the number of that step.

    Args:
        captured: take steps from graphs, which are recorded here, and several at once if one was replayed twice.
        tight: capacities are the demand so far, without spare.
    """
    done: list[str] = []
    draw, take, learn = StepInputsMaker.draw, Training._take, Training._learn

    def drawn(self: StepInputsMaker, step: int, *args: Any) -> Any:
        done.append(f"D{step}")
        return draw(self, step, *args)

    def taken(self: Training, step: Any, feeds: Any) -> int:
        count = take(self, step, feeds)
        done.append(f"T{feeds[0].step}" + (f"-{feeds[0].step + count - 1}" if count > 1 else ""))
        return count

    def recorded(self: Training, status: Status) -> None:
        done.extend(["F"] if status.full else [])
        learn(self, status)

    def fitted(self: StepCapacities, needed: Any, full: bool, images: int) -> None:
        if full and self._now is not None:
            (rows, pairs, intersections), (more, _, many) = self._now, needed
            self._now = max(rows, more), pairs, max(intersections, many)

    with monkeypatch.context() as patched:
        if captured:
            take_from_graphs(patched)
            patched.setattr(graphs, "WORTH_SEVERAL", 2)
        if tight:
            start_with_small_capacity(patched)
            patched.setattr(StepCapacities, "spare", lambda *args, **spared: None)
            patched.setattr(StepCapacities, "learn", fitted)
        patched.setattr(Training, "_learn", recorded)
        patched.setattr(step_inputs, "TOGETHER", together)
        patched.setattr(StepInputsMaker, "draw", drawn)
        patched.setattr(Training, "_take", taken)
        runs = folder / f"runs-{together}-{captured}-{tight}"
        trainer = follow(World.single(), folder / "tiny", runs, OPTIONS, steps, 2, double=False)
    return {name: value.detach().clone() for name, value in trainer.pipeline.model.gauss_params.items()}, done


@pytest.mark.parametrize("captured", [False, True])
def test_steps_drawn_together_equal_steps_drawn_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, captured: bool
) -> None:
    """Captured steps are launched together, too: three by the graph of three."""
    write_capture(tmp_path / "tiny", wide=False)
    alone, usual = train(tmp_path, 1, monkeypatch, steps=17, captured=captured)
    together, done = train(tmp_path, 3, monkeypatch, steps=17, captured=captured)
    assert usual == [word for step in range(17) for word in (f"D{step}", f"T{step}")]
    assert done == [
        *("D0", "T0"),  # a block of one step, for the log
        *("D1", "T1", "D2", "T2", "D3", "D4", "T3", "T4"),  # as many as were before, as a block begins
        *("D5", "D6", "D7", *(["T5-7"] if captured else ["T5", "T6", "T7"])),
        *("D8", "T8"),  # none beyond its end
        *("D9", "T9", "D10", "T10", "D11", "D12", "T11", "T12"),
        *("D13", "D14", "D15", *(["T13-15"] if captured else ["T13", "T14", "T15"])),
        *("D16", "T16"),
    ]
    assert alone.keys() == together.keys() and all(torch.equal(alone[name], together[name]) for name in alone)


def test_graph_steps_beyond_capacity_are_retried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_capture(tmp_path / "tiny", wide=False)
    # All steps look at one view but the second of a graph of three, whose view meets more tiles.
    views = lambda self, step, size: [3 if step == 14 else 0] * size  # noqa: E731
    monkeypatch.setattr(DistributedDataManager, "train_batch", views)
    alone, _ = train(tmp_path, 1, monkeypatch, steps=17)
    at_once, done = train(tmp_path, 3, monkeypatch, steps=17, captured=True, tight=True)
    taken = done.index("T13-15")
    assert done[taken:] == ["T13-15", "D16", "T16", "F", "T14", "T15", "T16"], "13 has been taken, the others not"
    assert alone.keys() == at_once.keys() and all(torch.equal(alone[name], at_once[name]) for name in alone)


@pytest.mark.parametrize(
    ("between", "follow_each_other"),
    [({}, True), ({"noise": True}, False), ({"observed": True}, False), ({"needles": True}, False),
     ({"shows": False}, False), ({"plan": 2}, False), ({"count": 7}, False)],
)  # fmt: skip
def test_steps_with_host_work_between_run_one_by_one(between: dict[str, Any], follow_each_other: bool) -> None:
    given = {"noise": False, "observed": [], "needles": None, "shows": True, "plan": 1, "count": 8} | between
    queue = SimpleNamespace(shows=lambda buffers: given["shows"])
    model = SimpleNamespace(seed=1, config=SimpleNamespace(background_color="random"))
    fed = StepInputsMaker(SimpleNamespace(model=model), None, 0, SimpleNamespace())  # type: ignore[arg-type]
    one: Any = SimpleNamespace(
        _noise=SimpleNamespace(active=given["noise"]),
        _observed=given["observed"],
        _needles=given["needles"],
        _queue=queue,
        _buffers=None,
        _inputs_maker=fed,
    )
    feeds: Any = [SimpleNamespace(plan=plan) for plan in (*[1] * 7, given["plan"])][-given["count"] :]
    assert Training._follow(one, feeds) == follow_each_other


@pytest.mark.parametrize("learns", list(Feedback))
@pytest.mark.parametrize("lookahead", [0, 3])
def test_steps_waiting_for_plans_or_images_run_alone(learns: Feedback, lookahead: int) -> None:
    model = SimpleNamespace(seed=1, config=SimpleNamespace(background_color="random"))
    pipeline = SimpleNamespace(
        model=model,
        strategy=SimpleNamespace(assignment=SimpleNamespace(learns=learns)),
        datamanager=SimpleNamespace(train_share=SimpleNamespace(lookahead=lookahead)),
    )
    drawn = [StepInputsMaker(pipeline, None, 0, SimpleNamespace()).together(place) for place in (0, 1, 2, 5, 8, 40)]  # type: ignore[arg-type]
    assert drawn == ([1, 1, 2, 5, 8, 8] if learns is Feedback.NOTHING and lookahead == 0 else [1] * 6)


def test_each_batch_is_prefetched_once_at_its_final_size() -> None:
    prefetched: list[list[list[tuple[int, int]]]] = []
    known = [True]

    def coming(steps: range, size: int) -> list[list[int]]:
        return [[step * size + i for i in range(size)] for step in steps] if known[0] else []

    pipeline: Any = SimpleNamespace(
        model=SimpleNamespace(seed=1, config=SimpleNamespace(background_color="random")),
        strategy=SimpleNamespace(assignment=SimpleNamespace(prefetch_plans=prefetched.append)),
        datamanager=SimpleNamespace(coming=coming),
        batch_size=2,
    )
    cameras: Any = lambda index, factor: ((index, factor), None)  # noqa: E731 - the view stands for itself
    fed = StepInputsMaker(pipeline, None, 0, cameras)
    for steps in (range(3), range(3, 6), range(6, 8)):
        fed.prefetch_plans(steps, 2, lambda step: 4 if step < 7 else 1)
    batches = [[(2 * step, 4 if step < 7 else 1), (2 * step + 1, 4 if step < 7 else 1)] for step in range(10)]
    assert prefetched == [batches[:5], batches[5:8], batches[8:]]
    known[0] = False  # a sequence that is drawn as it comes
    fed.prefetch_plans(range(8, 10), 2, lambda step: 1)
    assert prefetched[3:] == [[]]
