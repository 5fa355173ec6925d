"""`--pipeline.exchange auto` goes by time: ways are timed on all ranks, and the fastest is taken as if asked for.

On GPUs alone: here CPUs are let do so, with clocks that say what a step is to have taken.
"""

import json
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ns_multigpu.cells.options import PixelOptions
from ns_multigpu.core import trials
from ns_multigpu.core.planned_rows import PlannedRows
from ns_multigpu.core.trials import Trials
from ns_multigpu.core.world import World
from ns_multigpu.plugin.blocks import ways
from ns_multigpu.plugin.blocks.graphs import StepGraphs
from ns_multigpu.plugin.blocks.training import Training
from strategies.pixel import TIMED_ON
from tests.plugin.course import write_capture
from tests.plugin.resuming import differing, everything, start
from tests.ranks import run_ranks

STEPS, SAVED, VIEWS = 48, 41, 2
METHOD = "splatfacto-pixel"
PIXELS = {"mixed": (9.0, 9.0), "pixels": (5.0, 6.0), "splats": (7.0, 7.0)}
"""Milliseconds a step on the first and on the second rank."""
SPLATS = {"mixed": (9.0, 9.0), "pixels": (1.0, 12.0), "splats": (8.0, 4.0)}


class Steps:
    """Counts and times the steps of a run by a clock that each of them turns."""

    def __init__(self, world: World, times: dict[str, tuple[float, float]]) -> None:
        self.taken: list[dict[str, Any]] = []
        clock, take, render = [0.0], StepGraphs.take, Training._take
        now: list[Training] = []

        def rendered(training: Training, *args: Any) -> int:
            now[:] = [training]
            return render(training, *args)

        def taken(graphs: Any, plan: Any, parts: Any, steps: int) -> Any:
            strategy, step, before = now[0]._pipeline.strategy, now[0]._step, world.traffic.sent
            found = take(graphs, plan, parts, steps)
            choice = now[0]._ways._strategy.choice
            way = "" if choice is None else choice.trials.way
            clock[0] += times[way][world.rank] / 1e3 if way else 0.0
            assert step is not None
            self.taken.append(
                {
                    "way": way, "trying": choice is not None and choice.trials.trying, "room": plan.room,
                    "homes": plan.homes, "planned": isinstance(step._transport, PlannedRows),
                    "legs": [type(leg).__name__ for leg in (strategy.rows, strategy.pixels, strategy.gradients)],
                    "told": tuple(step.learnt.shape), "owned": plan.owned, "sent": world.traffic.sent - before,
                    "block": len(now[0]._block),
                }
            )  # fmt: skip
            return found

        self._undo = take, render, ways.time, ways.CONSOLE
        self.told: list[str] = []
        StepGraphs.take, Training._take = taken, rendered  # type: ignore[method-assign]
        ways.time = SimpleNamespace(perf_counter=lambda: clock[0])  # type: ignore[assignment]
        ways.CONSOLE = SimpleNamespace(print=lambda text, **_: self.told.append(text))

    def stop(self) -> None:
        StepGraphs.take, Training._take, ways.time, ways.CONSOLE = self._undo  # type: ignore[method-assign]


def run(world: World, capture: Path, out: Path, exchange: str, times: Any = PIXELS, crossing: Any = "ghosts",
        **more: Any) -> dict[str, Any]:  # fmt: skip
    """A run of fused steps, what each of them was like, and what is left of it."""
    trials.FIRST, trials.WARM, trials.TIMED, trials.MOST = 6, 2, 4, 4
    if "cpu" not in TIMED_ON:
        TIMED_ON.append("cpu")
    steps = Steps(world, times)
    try:
        trainer = start(
            world, capture, out, STEPS, method=METHOD, exchange=exchange, fused_steps="always", views_per_step=VIEWS,
            pixel=PixelOptions(crossing=crossing), morton_order=True, keep_checkpoints=0, refine_every=30,
            steps_per_checksum=0, **more,
        )  # fmt: skip
        trainer.pipeline.model.config.camera_optimizer.mode = "off"
        trainer.train()
    finally:
        steps.stop()
    written = trainer.config.get_base_dir() / "metrics.jsonl"
    rows = [json.loads(line) for line in written.read_text().splitlines()] if world.is_main else []
    left = {key: value for key, value in everything(trainer).items() if "camera" not in key}
    known = [row for row in trainer.pipeline.strategy.assignment.knowledge() if Trials.owns(row)]
    return {"steps": steps.taken, "rows": rows, "left": left, "known": known, "told": steps.told}


def courses(world: World, capture: Path, out: Path, crossing: str) -> dict[str, Any]:
    made = partial(run, world, capture)
    found = {"auto": made(out / "auto", "auto", PIXELS, crossing, steps_per_save=SAVED)}
    found["pixels"] = made(out / "pixels", "pixels", PIXELS, crossing)
    saved = out / "auto" / "run" / METHOD / "now" / "nerfstudio_models"
    more = {"load_dir": saved, "load_step": SAVED, "steps_per_save": SAVED}
    found["again"] = made(out / "auto again", "auto", SPLATS, crossing, **more)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("crossing", ["ghosts", "none"])
def test_where_pixels_are_fastest_steps_are_those_of_pixels(crossing: str, tmp_path: Path) -> None:
    write_capture(tmp_path / "capture", wide=False)
    reports = run_ranks(courses, 2, tmp_path / "capture", tmp_path, crossing)
    for report in reports:
        steps, alone = report["auto"]["steps"], report["pixels"]["steps"]
        assert {step["way"] for step in steps if step["trying"]} == {"mixed", "pixels", "splats"}
        assert all(step["planned"] == (step["way"] != "pixels") for step in steps)
        assert all(step["block"] <= 4 for step in steps if step["trying"])
        chosen = [step for step in steps if step["way"] == "pixels" and not step["trying"]]
        assert len(chosen) >= 10 and steps[-len(chosen) :] == chosen, "from then on"
        what = ("room", "homes", "planned", "legs", "told")
        same = [{name: step[name] for name in what} for step in alone]
        assert [{name: step[name] for name in what} for step in chosen] == same[-len(chosen) :], "nothing is counted"
        assert report["again"]["known"] == report["auto"]["known"] and len(report["again"]["known"]) == 1
        again = report["again"]["steps"]
        assert {(step["way"], step["trying"]) for step in again} == {("pixels", False)}, "it goes on with what it had"
        assert differing(report["again"]["left"], report["auto"]["left"]) == [], "bit for bit"
    last = reports[0]["auto"]["rows"][-1]
    assert [last[f"exchange_ms_{way}"] for way in ("mixed", "pixels", "splats")] == [9.0, 6.0, 7.0], (
        "the slowest rank's"
    )
    assert last["exchange_trials_cost"] > 0 and "exchange_ms_pixels" not in reports[0]["pixels"]["rows"][-1]


def only_auto(world: World, capture: Path, out: Path) -> dict[str, Any]:
    return run(world, capture, out, "auto", SPLATS)


@pytest.mark.slow
def test_all_ranks_go_by_the_slowest(tmp_path: Path) -> None:
    """Each of the two has another favourite, which is the slowest on the other."""
    write_capture(tmp_path / "capture", wide=False)
    one, other = run_ranks(only_auto, 2, tmp_path / "capture", tmp_path)
    assert [step["way"] for step in one["steps"]] == [step["way"] for step in other["steps"]]
    last = one["steps"][-1]
    assert last["way"] == "splats" and last["planned"] and not last["trying"]
    assert one["told"] == ["--pipeline.exchange auto: splats, 8.0 ms a step; mixed 9.0, pixels 12.0"]
    assert other["told"] == [], "it is said once"
