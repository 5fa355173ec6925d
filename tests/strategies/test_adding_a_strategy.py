"""The strategy on the page that says how to add one: it keeps the law, and it trains as one rank does."""

import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from ns_multigpu.core.dist.world import World
from ns_multigpu.core.strategy import Strategy
from ns_multigpu.primitives.gaussians.functions import Gaussians
from strategies import STRATEGIES
from tests.lib.ranks import run_ranks
from tests.lib.training_run import follow
from tests.strategies.test_law import PRIMITIVES, Outcome, check, one_step, take_step
from tests.strategies.test_law_steps import KERNELS, MODES, POINTS, PORTRAIT, check_outcomes, take_one

PAGE = Path(__file__).parents[2] / "docs" / "internals" / "adding-a-strategy.md"


def of_the_page(world: World) -> Strategy:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    module = ModuleType("blocks")
    exec(compile(code, str(PAGE), "exec"), module.__dict__)
    return module.__dict__["blocks"](world)


def step(world: World) -> Outcome:
    return take_step(of_the_page(world), "gaussians", 5, 150, torch.float64)


def test_it_keeps_the_law() -> None:
    expected = one_step(World.single(), "single", "gaussians", 5, 150, torch.float64)
    check(run_ranks(step, 3), expected, torch.float64)


def fused(world: World, mode: str, primitive: str) -> Outcome:
    kind = PRIMITIVES[primitive]()
    assert isinstance(kind, Gaussians)
    return take_one(of_the_page(world), kind, 6, PORTRAIT, mode)


@pytest.mark.parametrize("mode", MODES)
def test_it_keeps_the_law_in_steps_that_read_nothing_back(mode: str) -> None:
    expected = one_step(World.single(), "single", KERNELS[0], 6, POINTS, torch.float32, PORTRAIT)
    check_outcomes(run_ranks(fused, 2, mode, KERNELS[0]), expected, 6, PORTRAIT, replicated=True)


def trained(world: World, capture: Path, runs: Path, name: str, fused: str) -> dict[str, torch.Tensor]:
    STRATEGIES["blocks"] = of_the_page
    options: dict[str, Any] = {
        "pipeline.strategy": name, "pipeline.views_per_rank": 1, "pipeline.views_per_step": 2, "fused_steps": fused,
        "pipeline.model.refine_every": 4, "pipeline.model.warmup_length": 2, "pipeline.model.num_downscales": 0,
    }  # fmt: skip
    folder = runs / f"{name}-{world.size}-{fused}"
    trainer = follow(world, capture, folder, options, 6, 1, double=fused == "never")
    return {name: value.detach().clone() for name, value in trainer.pipeline.model.gauss_params.items()}


def test_it_trains_as_one_rank_does(tmp_path: Path, capture: Path) -> None:
    (expected,) = run_ranks(trained, 1, capture, tmp_path / "runs", "batch", "never")
    for outcome in run_ranks(trained, 2, capture, tmp_path / "runs", "blocks", "never"):
        for name, value in expected.items():
            assert outcome[name].shape == value.shape, "the same densification"
            torch.testing.assert_close(outcome[name], value, rtol=1e-6, atol=1e-8)


def test_it_trains_in_fused_steps_as_batch_does(tmp_path: Path, capture: Path) -> None:
    """In single precision, where both deal the same views to the same ranks: to the bit."""
    expected, _ = run_ranks(trained, 2, capture, tmp_path / "runs", "batch", "always")
    for outcome in run_ranks(trained, 2, capture, tmp_path / "runs", "blocks", "always"):
        assert all(torch.equal(outcome[name], value) for name, value in expected.items())
