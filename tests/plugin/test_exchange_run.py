"""Runs of `splatfacto-pixel` whose layers travel as splats, too: the same model, bytes as foretold, on to the bit."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ns_multigpu.cells.exchange import PIXEL_BYTES, Exchange
from ns_multigpu.cells.options import PixelOptions
from ns_multigpu.core.pieces import routes_of
from ns_multigpu.core.plan import Plan
from ns_multigpu.core.planned_rows import PlannedRows
from ns_multigpu.core.types import View
from ns_multigpu.core.world import World
from ns_multigpu.plugin.blocks.graphs import StepGraphs
from ns_multigpu.plugin.blocks.training import Training
from tests.plugin.course import write_capture
from tests.plugin.resuming import differing, everything, in_double, part_of, start
from tests.plugin.test_placed_run import whole
from tests.ranks import run_ranks

pytestmark = pytest.mark.slow

STEPS, SAVED, VIEWS, CELLS = 24, 12, 2, 3
METHOD = "splatfacto-pixel"


def options_of(exchange: str, **more: Any) -> dict[str, Any]:
    options = {"views_per_step": VIEWS, "morton_order": True, "keep_checkpoints": 0, "exchange": exchange}
    return options | {"pixel": PixelOptions(cells=CELLS, imbalance=1.05, crossing="none")} | more


def saved_by(run: Path) -> Path:
    return run / "run" / METHOD / "now" / "nerfstudio_models"


def rows_of(trainer: Any, world: World) -> list[dict[str, float]]:
    """What was logged about the exchange."""
    written = trainer.config.get_base_dir() / "metrics.jsonl"
    rows = [json.loads(line) for line in written.read_text().splitlines()] if world.is_main else []
    return [row for row in rows if "layers_as_splats" in row]


def courses(world: World, capture: Path, out: Path) -> dict[str, Any]:
    """Ordinary steps: what differs between runs; on the first rank."""
    report, models, own = dict[str, Any](), dict[str, Any](), dict[str, Any]()

    def run(name: str, size: int, exchange: str, **more: Any) -> None:
        part = part_of(world, size) if size > 1 else (World.single() if world.is_main else None)
        if part is not None:
            options = options_of(exchange, fused_steps="never", **more)
            trainer = in_double(part, capture, out / name, STEPS, method=METHOD, **options)
            models[name], own[name] = whole(trainer, part), everything(trainer)
            report[f"rows {name}"] = rows_of(trainer, part)
        dist.barrier(group=world.control)

    run("three", 3, "auto", steps_per_save=SAVED)
    run("alone", 1, "auto")
    run("splats", 2, "splats")
    run("again", 3, "auto", load_dir=saved_by(out / "three"), load_step=SAVED)
    for name, size in (("ghosts", 3), ("ghosts alone", 1)):
        run(name, size, "auto", pixel=PixelOptions(cells=CELLS, imbalance=1.05))
    report["again"] = differing(own["again"], own["three"])
    if world.is_main:
        for name in ("alone", "splats"):
            a, b = ({k: v for k, v in models[n].items() if "rate" not in k} for n in (name, "three"))
            report[name] = differing(a, b, 1e-7)
        a, b = ({k: v for k, v in models[n].items() if "rate" not in k} for n in ("ghosts", "ghosts alone"))
        report["ghosts"] = differing(a, b, 1e-6)
    return report


def test_any_exchange_trains_the_model_of_one_rank(tmp_path: Path) -> None:
    write_capture(tmp_path / "capture", wide=False)
    reports = run_ranks(courses, 3, tmp_path / "capture", tmp_path)
    assert [report["again"] for report in reports] == [[], [], []], "a resumed run goes on bit for bit"
    assert reports[0]["alone"] == [] and reports[0]["splats"] == []
    rows = {name: reports[0][f"rows {name}"] for name in ("three", "splats", "alone")}
    assert any(0 < row["layers_as_splats"] < 1 for row in rows["three"]) and rows["alone"] == []
    assert reports[0]["ghosts"] == [] and any(row["layers_as_splats"] > 0 for row in reports[0]["rows ghosts"])
    assert rows["splats"] and all(row["layers_as_splats"] == 1 for row in rows["splats"])


class Watched:
    """Counts what each step sends, beside what its plan foretells."""

    def __init__(self, world: World) -> None:
        self.steps: list[tuple[int, int]] = []
        self.full = 0
        take, learn, begin = StepGraphs.take, Training._learn, PlannedRows.begin
        begun: list[PlannedRows] = []

        def taken(graphs: Any, plan: Plan, parts: Any, steps: int) -> Any:
            before, view = world.traffic.sent, View(torch.eye(4), torch.eye(3), 28, 24)
            images = take(graphs, plan, parts, steps)
            transport = begun.pop()
            routes = routes_of(plan, [view] * VIEWS, world.rank)
            pixels = PIXEL_BYTES * (sum(routes.send) + sum(routes.send_back))
            if plan.room:
                foreseen, there = (
                    [[n if a != b else 0 for b, n in enumerate(of)] for a, of in enumerate(pairs)]
                    for pairs in (plan.room, transport.pairs)
                )
                assert there == foreseen, "what is sent is what the plan foresaw"
            self.steps.append((world.traffic.sent - before, pixels + transport.step_bytes))
            return images

        def learnt(training: Any, status: Any, again: list[Any]) -> None:
            self.full += int(status.full)
            learn(training, status, again)

        def begins(rows: PlannedRows, plan: Plan, room: Any) -> None:
            begin(rows, plan, room)
            begun.append(rows)

        StepGraphs.take, Training._learn, PlannedRows.begin = taken, learnt, begins  # type: ignore[method-assign]
        self._undo = take, learn, begin

    def stop(self) -> None:
        StepGraphs.take, Training._learn, PlannedRows.begin = self._undo  # type: ignore[method-assign]


def fused(world: World, capture: Path, out: Path) -> dict[str, Any]:
    """Fused steps with each exchange: what they send, and their models."""
    found: dict[str, Any] = {}
    room = Exchange._splats

    def starved(*args: Any) -> int | None:
        return None if room(*args) is None else 1

    def run(name: str, exchange: str, **more: Any) -> None:
        options = options_of(exchange, fused_steps="always", **{"steps_per_save": SAVED, **more})
        watched = Watched(world) if exchange != "pixels" else None
        trainer = start(
            world, capture, out / name, STEPS, method=METHOD,
            **{**options, "pixel": PixelOptions(crossing="ghosts" if name == "ghosts" else "none")},
        )  # fmt: skip
        trainer.pipeline.model.config.camera_optimizer.mode = "off"
        trainer.train()
        if watched is not None:
            watched.stop()
            found[f"steps {name}"], found[f"full {name}"] = watched.steps, watched.full
        found[name] = {key: value for key, value in everything(trainer).items() if "camera" not in key}
        found[f"rows {name}"] = rows_of(trainer, world)

    run("pixels", "pixels")
    run("splats", "splats")
    run("auto", "auto")
    run("again", "auto", load_dir=saved_by(out / "auto"), load_step=SAVED)
    run("ghosts", "auto")
    Exchange._splats = starved  # type: ignore[method-assign]
    run("starved", "splats")
    Exchange._splats = room  # type: ignore[method-assign]
    return found


def test_fused_steps_send_what_was_foretold(tmp_path: Path) -> None:
    write_capture(tmp_path / "capture", wide=False)
    reports = run_ranks(fused, 2, tmp_path / "capture", tmp_path)
    for report in reports:
        for name in ("splats", "auto", "ghosts", "starved"):
            steps = report[f"steps {name}"]
            assert len(steps) >= STEPS and all(sent == foretold for sent, foretold in steps), name
        assert report["full starved"] > report["full splats"], "room that does not suffice is made"
        assert differing(report["again"], report["auto"]) == [], "a resumed run goes on bit for bit"
        assert differing(report["starved"], report["splats"]) == [], "steps that were taken again are the same"
    logged = reports[0]["rows auto"]
    assert any(row["mb_as_splats"] > 0 for row in logged) and all(0 <= row["layers_as_splats"] <= 1 for row in logged)
