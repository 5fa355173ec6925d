"""The time of an exchange within a step counts as exchange time, not as computation."""

import json
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from ns_multigpu.core.dist.world import World
from ns_multigpu.core.exchange import exchanged_rows, halo, transports
from ns_multigpu.plugin.render import pictures
from ns_multigpu.plugin.run.trainer import DistributedTrainer
from tests.lib.ranks import run_ranks
from tests.lib.training_run import follow, write_capture

STEPS, SLOW, DOWNSCALES = 4, 0.05, "pipeline.model.num_downscales"
PLACES = [(exchanged_rows, "all_gather_ints"), (transports, "all_to_all_segments"), (halo, "exchange_rows")]
PICTURES = [(pictures, "exchange_rows")]


def _train(world: World, capture: Path, runs: Path) -> dict[str, Any]:
    """Train with `tile` and ordinary steps, over a link that is slow."""
    calls: list[tuple[str, str, bool]] = []
    logged: list[int] = []
    places = PLACES + PICTURES
    usual = [getattr(place, name) for place, name in places]

    def ready(trainer: DistributedTrainer) -> None:
        pipeline, log = trainer.pipeline, trainer._log

        def slowed(number: int) -> Any:
            def delayed_exchange(*args: Any) -> Any:
                calls.append((f"{places[number][0].__name__}.{number}", pipeline.timer.part, pipeline.model.training))
                time.sleep(SLOW)
                return usual[number](*args)

            return delayed_exchange

        for number, (place, name) in enumerate(places):
            setattr(place, name, slowed(number))
        trainer._log = lambda *args: (logged.append(len(calls)), log(*args))[1]  # type: ignore[method-assign]

    options = {"fused_steps": "never", "logging.steps_per_log": 1, "pipeline.views_per_step": 1, DOWNSCALES: 0}
    try:
        trainer = follow(world, capture, runs, options, STEPS, 1, method="splatfacto-tile", double=False, ready=ready)
    finally:
        for (place, name), function in zip(places, usual, strict=True):
            setattr(place, name, function)
    lines = (trainer.base_dir / "metrics.jsonl").read_text().splitlines() if world.is_main else []
    return {"calls": calls, "logged": logged, "rows": [json.loads(line) for line in lines]}


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("exchange")
    write_capture(folder / "tiny")
    return run_ranks(_train, 2, folder / "tiny", folder / "runs")


def test_all_exchanges_are_measured(reports: list[dict[str, Any]]) -> None:
    for report in reports:
        parts = {(place, part) for place, part, training in report["calls"] if training}
        assert {part for _, part in parts} == {"exchange"}, parts
        assert len(parts) == len(PLACES), "counts and rows of splats, and gradients of halos"


def test_evaluation_exchanges_are_not_attributed(reports: list[dict[str, Any]]) -> None:
    for report in reports:
        parts = {part for _, part, training in report["calls"] if not training}
        assert parts and "exchange" not in parts


def test_the_log_has_it(reports: list[dict[str, Any]]) -> None:
    rows, logged = reports[0]["rows"], reports[0]["logged"]
    assert len(rows) == STEPS
    is_exchanged = [b - a for a, b in pairwise([0, *logged])]
    for row, count in zip(rows, is_exchanged, strict=True):
        assert count >= 4, "there and back"
        assert row["exchange_ms"] > 0
        assert row["exchange_ms"] + row["waiting_ms"] > 1e3 * SLOW * count
        whole = row["data_ms"] + row["compute_ms"] + row["exchange_ms"] + row["waiting_ms"]
        assert whole < 1.05 * row["step_ms"], "what is in one part is not in another"
