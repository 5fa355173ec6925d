"""`ProgressLog`: what the ranks measured, put together in one line of metrics.jsonl."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import nerfstudio.configs.base_config  # noqa: F401  # the writer and it import each other, and it must be first
import pytest
import torch
from nerfstudio.utils import writer

from ns_multigpu.core.dist.world import World
from ns_multigpu.plugin.run import progress
from ns_multigpu.plugin.run.objective import LogEntry
from ns_multigpu.plugin.run.progress import ProgressLog
from ns_multigpu.plugin.splats.objective import changes_of
from tests.lib.ranks import run_ranks

SECONDS = (
    {"data": 0.1, "compute": 0.5, "exchange": 0.5, "waiting for the device": 9.0},
    {"data": 0.3, "compute": 0.7, "exchange": 0.1},
)
"""Of the two ranks: the first is ready 0.4 s before the second, and waits for it inside the exchange."""


def _log(world: World, folder: Path, seconds: Any) -> list[tuple[str, Any]]:
    """Logs the steps 0 and 10; returns what nerfstudio's writers were handed."""
    scalars: list[tuple[str, Any]] = []
    writer.put_scalar = lambda name, scalar, step: scalars.append((name, scalar))  # type: ignore[method-assign]
    writer.put_dict = lambda name, scalar_dict, step: scalars.append((name, scalar_dict))  # type: ignore[method-assign]
    progress.peak_memory = lambda world: 2.0 + world.rank  # type: ignore[method-assign]
    log = ProgressLog(world, folder)
    log.restart_clock()
    changes = {"split": 3}
    part = torch.tensor(0.25 * (1 + world.rank), requires_grad=True)
    measured = (2 * part, {"main_loss": part, "scale_reg": part}, {"mse": torch.tensor(0.0005)})
    for step, times in ((0, {}), (10, seconds[world.rank])):
        timer: Any = SimpleNamespace(cut=lambda times=times: lambda: dict(times))
        row = {"gaussians": 77.0, **changes_of(SimpleNamespace(changes=changes))}
        entry = LogEntry(measured, 4, row, {"gaussian_count": 77}, {"means": 0.25}, {"own": 3.0 + world.rank}, dict)
        log.log(step, timer, entry, {"save_ms": 5.0})()
    return scalars


def _rows(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_process_on_a_cpu_knows_its_memory() -> None:
    assert 0.05 < progress.peak_memory(World.single()) < 100


def test_two_ranks_are_put_together(tmp_path: Path) -> None:
    scalars, _ = run_ranks(_log, 2, tmp_path, SECONDS)
    first, row = _rows(tmp_path)
    assert first["step"] == 0 and row["step"] == 10 and first["data_ms"] == first["waiting_ms"] == 0.0
    assert row["data_ms"] == pytest.approx(20.0) and row["compute_ms"] == pytest.approx(60.0)
    assert row["waiting_ms"] == pytest.approx(20.0), "0.4 s on one of two ranks, in ten steps"
    assert row["exchange_ms"] == pytest.approx(30.0 - 20.0)
    assert row["loss"] == 1.5 and row["main_loss"] == row["scale_reg"] == 0.75
    assert row["psnr"] == pytest.approx(30.0) and "mse" not in row
    assert row["gaussians"] == 77 and row["save_ms"] == 5.0
    assert first["split"] == 3 and "split" not in row, "reported once"
    assert row["own"] == [3.0, 4.0], "of each rank"
    assert row["memory_gib"] == 3.0, "of the fullest"
    assert not any("own" in values for name, values in scalars if name == "Step"), "writers take numbers alone"
    assert row["images_per_s"] == pytest.approx(4e3 / row["step_ms"], rel=1e-3)
    assert ("Train Loss", 1.5) in scalars and ("learning_rate/means", 0.25) in scalars
    losses = [values for name, values in scalars if name == "Train Loss Dict"]
    assert losses == [{"main_loss": 0.75, "scale_reg": 0.75}] * 2


def test_single_rank_waits_for_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("put_scalar", "put_dict"):
        monkeypatch.setattr(writer, name, getattr(writer, name))  # put back afterwards
    _log(World.single(), tmp_path, SECONDS)
    row = _rows(tmp_path)[-1]
    assert (row["data_ms"], row["compute_ms"], row["exchange_ms"], row["waiting_ms"]) == (10.0, 50.0, 50.0, 0.0)
    assert row["loss"] == 0.5


def test_drop_within_1000_steps_is_reported_at_any_log_interval(tmp_path: Path) -> None:
    for period, after in ((10, 100), (50, 20), (500, 20)):
        watch = ProgressLog(World.single(), tmp_path, period).psnr
        said = [bool(watch.look(25.0 if log < 200 else 5.0, log * period)) for log in range(400)]
        assert said.index(True) - 200 == pytest.approx(after, rel=0.4), period
