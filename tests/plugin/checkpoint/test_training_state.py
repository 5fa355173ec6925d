"""State of a run, saved and restored; and the name of a job's run folder."""

import copy
import os
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from nerfstudio.engine.optimizers import AdamOptimizerConfig
from nerfstudio.engine.schedulers import (
    CosineDecaySchedulerConfig,
    ExponentialDecaySchedulerConfig,
    MultiStepSchedulerConfig,
)

from ns_multigpu.core.dist.machines import Place
from ns_multigpu.core.dist.world import World
from ns_multigpu.plugin.checkpoint.training_state import (
    Clock,
    move_schedulers,
    put_densifier,
    put_generators,
    put_optimizers,
    take_densifier,
    take_generators,
    take_optimizers,
)
from ns_multigpu.plugin.faults.errors import InputError
from ns_multigpu.plugin.launch import run_folder
from ns_multigpu.plugin.launch.ranks import Start, agent
from ns_multigpu.plugin.model.batch_scaling import RateSchedule, ScalingRule, scale_optimizer, scaled_scheduler


@pytest.mark.parametrize(
    "config",
    [
        ExponentialDecaySchedulerConfig(lr_final=1e-4, max_steps=100, warmup_steps=20, lr_pre_warmup=0),
        CosineDecaySchedulerConfig(max_steps=100, warm_up_end=8),
        MultiStepSchedulerConfig(max_steps=100, milestones=(20, 40, 80)),
    ],
)
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize(("rule", "at_end"), [("sqrt", 1.0), ("sqrt-to-none", 0.1)])
def test_advanced_schedulers_equal_stepped_ones(config: Any, batch: int, rule: ScalingRule, at_end: float) -> None:
    schedule = RateSchedule(rule, batch, 80, at_end)

    def fresh() -> tuple[torch.optim.Optimizer, Any]:
        optimizer = AdamOptimizerConfig(lr=0.01).setup(params=[torch.nn.Parameter(torch.ones(3))])
        scheduler = config.setup().get_scheduler(optimizer=optimizer, lr_init=0.01)
        scale_optimizer(optimizer, schedule)
        return optimizer, scaled_scheduler(optimizer, scheduler, schedule)

    (walker, walking), (mover, moving) = fresh(), fresh()
    for count in range(1, 33):
        walker.step()
        walking.step()
        mover, moving = fresh()
        counts = {"x": count} if at_end == 1 else {}  # of a run whose rates did not fall there are none
        move_schedulers({"x": moving}, counts, otherwise=count)
        assert mover.param_groups[0]["lr"] == walker.param_groups[0]["lr"], "the same bits"
    for optimizer, scheduler in ((walker, walking), (mover, moving)):  # and both go on alike
        optimizer.step()
        scheduler.step()
    assert mover.param_groups[0]["lr"] == walker.param_groups[0]["lr"]


def test_optimizers_resume_with_other_parameters() -> None:
    def fresh() -> tuple[torch.nn.Parameter, torch.optim.Optimizer]:
        param = torch.nn.Parameter(torch.ones(4))
        return param, torch.optim.Adam([param], lr=0.1)

    gradients = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))

    def walk(param: torch.nn.Parameter, optimizer: torch.optim.Optimizer, some: torch.Tensor) -> None:
        for gradient in some:
            param.grad = gradient.clone()
            optimizer.step()

    param, whole = fresh()
    walk(param, whole, gradients)
    first, stopped = fresh()
    walk(first, stopped, gradients[:3])
    tensors, values = take_optimizers({"x": stopped})
    assert set(tensors) == {f"optimizers/x/0/{name}" for name in ("step", "exp_avg", "exp_avg_sq")} and not values
    _, resumed = fresh()
    other = torch.nn.Parameter(first.detach().clone())
    put_optimizers({"x": resumed}, {"x": [other]}, copy.deepcopy(tensors), 1.0, "sqrt")
    walk(other, resumed, gradients[3:])
    assert torch.equal(other, param)

    put_optimizers({"x": resumed}, {"x": [other]}, copy.deepcopy(tensors), 4 / 2, "sqrt")
    assert float(resumed.state[other]["step"]) == 6.0
    assert torch.equal(resumed.state[other]["exp_avg_sq"], 2 * tensors["optimizers/x/0/exp_avg_sq"])
    assert torch.equal(resumed.state[other]["exp_avg"], tensors["optimizers/x/0/exp_avg"])
    put_optimizers({"x": resumed}, {"x": [other]}, copy.deepcopy(tensors), 4 / 2, "linear")
    assert torch.equal(resumed.state[other]["exp_avg_sq"], tensors["optimizers/x/0/exp_avg_sq"])


def _world(rank: int, size: int) -> World:
    return World(rank, size, rank, size, torch.device("cpu"))


def _saved(ranks: int) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    tables: dict[str, torch.Tensor] = {}
    for rank in range(ranks):
        state = {"grad2d": torch.tensor([1.0, 2.0]) * (rank + 1), "radii": torch.tensor([rank, 9.0 - rank]), "x": None}
        tensors, values = take_densifier(state, rank)
        assert values == {"x": None}
        tables.update(tensors)
    total = {"grad2d": torch.tensor([1.0, 2.0]) * sum(range(1, ranks + 1)), "radii": torch.tensor([ranks - 1, 9.0])}
    return tables, total


@pytest.mark.parametrize(("before", "after"), [(4, 2), (2, 3), (3, 1), (1, 4), (5, 3)])
def test_statistics_keep_their_sums_on_any_number_of_ranks(before: int, after: int) -> None:
    tables, total = _saved(before)
    states: list[dict[str, Any]] = [{"grad2d": None, "radii": None} for _ in range(after)]
    for rank, state in enumerate(states):
        world = _world(rank, after)
        put_densifier(state, list(tables), lambda names: {n: tables[n] for n in names}, before, world, world.device)
    assert torch.equal(sum(state["grad2d"] for state in states), total["grad2d"])  # type: ignore[arg-type]
    assert torch.equal(torch.stack([state["radii"] for state in states]).amax(0), total["radii"])


def test_an_unknown_statistic_is_not_merged_by_guess() -> None:
    tables = {f"rank{r}/densifier/new": torch.tensor([float(r)]) for r in range(2)}

    def put(world: World) -> dict[str, Any]:
        state: dict[str, Any] = {}
        put_densifier(state, list(tables), lambda names: {n: tables[n] for n in names}, 2, world, world.device)
        return state

    assert put(_world(1, 2))["new"] == 1.0
    with pytest.raises(InputError, match=r"'new' differs between the 2 workers .* Resume with 2 workers"):
        put(_world(0, 3))
    tables["rank1/densifier/new"] = tables["rank0/densifier/new"]
    assert put(_world(2, 3))["new"] == 0.0


def test_generators() -> None:
    def draw() -> list[float]:
        return [torch.rand(1).item(), random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn()]  # noqa: NPY002

    draw()
    random.gauss(0, 1)  # leaves the second of a pair behind
    saved = take_generators(World.single())
    expected = [draw(), draw()]
    put_generators(list(saved), lambda names: {n: saved[n] for n in names}, World.single())
    assert [draw(), draw()] == expected
    put_generators(list(saved), lambda names: {n: saved[n] for n in names}, _world(3, 4))
    assert draw() == expected[0], "a new rank takes rank 0's"


@pytest.mark.parametrize(
    ("steps", "old", "new", "expected"), [(5, 2, 1, 10), (5, 2, 3, 3), (7, 4, 4, 7), (3, 4, 24, 0)]
)
def test_clock_leaves_no_image_out(steps: int, old: int, new: int, expected: int) -> None:
    before, now = Clock(steps, old), Clock(steps, old).convert(new)
    assert now.steps == expected and 0 <= before.images - now.images < new


def test_a_restarted_job_keeps_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_folder, "_restarts", 0)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job-7")
    here, there, later = (Start(Place(0, "node"), agent) for agent in ("node 12 345", "other 12 345", "later 67 8"))
    assert run_folder.recall(tmp_path, [here, there]) is None and run_folder.restarts() == 0
    run_folder.note_name(tmp_path, "2026-01-01_000000", [here, here, there])
    for ranks in ([here, there], [later, there], [here]):  # torchrun counts a machine that came again as no restart
        assert run_folder.recall(tmp_path, ranks) == "2026-01-01_000000" and run_folder.restarts() == 1
    assert run_folder.recall(tmp_path, [later]) is None and run_folder.restarts() == 0, "all is new: another job"
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job-8")
    assert run_folder.recall(tmp_path, [here, there]) is None, "another job's"
    monkeypatch.delenv("TORCHELASTIC_RUN_ID")
    assert run_folder.recall(tmp_path, [here, there]) is None, "not torchrun's"
    run_folder.note_name(tmp_path, "x", [later])
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    assert run_folder.recall(tmp_path, [later]) is None
    for note in (tmp_path / ".jobs").iterdir():
        note.write_text("[")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job-7")
    assert run_folder.recall(tmp_path, [here]) is None
    assert run_folder.recall(tmp_path, [here, replace(there, restarts=2)]) is None and run_folder.restarts() == 2
    monkeypatch.setattr(run_folder, "_restarts", 0)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "3")
    assert run_folder.restarts() == 3


def test_an_agent_is_one_process() -> None:
    mine = agent()
    assert mine == agent() and str(os.getppid()) in mine.split()
    output = subprocess.run(
        [sys.executable, "-c", "from ns_multigpu.plugin.launch.ranks import agent; print(agent())"],
        capture_output=True, text=True, check=True,
    ).stdout.strip()  # fmt: skip
    assert output.split()[1] == str(os.getpid()) and output != mine
