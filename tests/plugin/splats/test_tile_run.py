"""A training run with `tile` on three ranks equals one rank's with `batch` and points in Morton order.

Ordinary steps are compared in double precision, to rounding. Fused ones have records in single precision, so they are
compared with a larger tolerance. A view is two rows of tiles high: with one view a step, one of three ranks has no
pixels.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from ns_multigpu.core.dist.world import World
from ns_multigpu.primitives.gaussians.schema import ORDER
from tests.lib.ranks import run_ranks
from tests.lib.tile_training_run import MODEL, Outcome, furthest, train_model
from tests.lib.training_run import write_capture

pytestmark = pytest.mark.slow

RANKS, IMAGES = 3, 50

# Refinements at images 16, 24 and 48, an opacity reset at 32, another resolution from 20, harmonics every 12.
COMMON = {
    MODEL + "warmup_length": 4, MODEL + "refine_every": 8, MODEL + "reset_alpha_every": 4,
    MODEL + "sh_degree_interval": 12, MODEL + "densify_grad_thresh": 0.001, MODEL + "cull_alpha_thresh": 0.06,
    MODEL + "stop_screen_size_at": 0, MODEL + "num_downscales": 1, MODEL + "resolution_schedule": 20,
}  # fmt: skip
# In single precision Adam's eps has to be further from the rounding of gradients.
FUSED = {"fused_steps": "always", **{f"optimizers.{name}.optimizer.eps": 1e-4 for name in ORDER}}
MCMC = {
    MODEL + "densifier": "mcmc", MODEL + "max_gaussians": 80, MODEL + "mcmc_min_opacity": 0.095,
    MODEL + "noise_lr": 5e3,
}  # fmt: skip
TWO_POINTS = {MODEL + "random_init": True, MODEL + "num_random": 2, MODEL + "random_scale": 0.5}


@dataclass(frozen=True)
class Case:
    """Views of a step, options beyond the common ones, and how near the models have to be."""

    views: int
    options: dict[str, Any] = field(default_factory=dict[str, Any])
    away: float = 1e-8

    @property
    def fused(self) -> bool:
        return "fused_steps" in self.options


GATHERED, SORTED = "fused, two views", "fused, two views, sorted lists"
CASES = {
    "one view": Case(1),
    "two views": Case(2),
    "mcmc": Case(1, MCMC),
    "a rank without points": Case(2, TWO_POINTS),
    "fused, one view": Case(1, FUSED, 3e-4),
    GATHERED: Case(2, FUSED, 3e-4),
    SORTED: Case(2, {**FUSED, "pipeline.tile_lists": "sort"}, 3e-4),
    "fused, a rank without points": Case(1, {**FUSED, **TWO_POINTS}, 3e-4),
}


def train(world: World, folder: Path, name: str, *, tile: bool) -> Outcome:
    case = CASES[name]
    options = {**COMMON, **case.options}
    if not tile:
        options["fused_steps"] = "never"
    runs = folder / f"{'tile' if tile else 'batch'}-{world.size}" / name.replace(" ", "-")
    capture = folder / ("one-size" if case.fused else "mixed")
    return train_model(world, tile, capture, runs, options, IMAGES // case.views, case.views, double=not case.fused)


def train_all(world: World, folder: Path) -> dict[str, Outcome]:
    """Every case with `tile`, one after the other: starting workers costs more than training."""
    return {name: train(world, folder, name, tile=True) for name in CASES}


Runs = tuple[dict[str, Outcome], list[dict[str, Outcome]]]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    """By case, what `batch` had in the end, and what each rank had with `tile`."""
    folder = tmp_path_factory.mktemp("tile")
    write_capture(folder / "mixed")
    write_capture(folder / "one-size", wide=False)
    batch = {name: train(World.single(), folder, name, tile=False) for name in CASES if name != SORTED}
    batch[SORTED] = batch[GATHERED]
    yield batch, run_ranks(train_all, RANKS, folder)


@pytest.mark.parametrize("name", CASES)
def test_run_equals_single(runs: Runs, name: str) -> None:
    case, expected = CASES[name], runs[0][name]
    counts = [count for _, count in expected["points"]]
    assert len(set(counts)) >= 3, "the number of points must have changed, and again"
    for found in (outcomes[name] for outcomes in runs[1]):
        assert found["points"] == expected["points"]
        away = furthest(found, expected)
        assert max(away.values()) < case.away, away
        assert found["metrics"] == pytest.approx(expected["metrics"], rel=1e-4, abs=1e-5)
        assert len(found["shards"]) == RANKS and sum(found["shards"]) == counts[-1]


def test_shards_are_of_nearly_equal_work(runs: Runs) -> None:
    shards = runs[1][0]["one view"]["shards"]
    assert max(shards) < 1.5 * sum(shards) / RANKS, shards


def test_lists_of_tiles_change_nothing(runs: Runs) -> None:
    outcomes = runs[1][0]
    assert max(furthest(outcomes[SORTED], outcomes[GATHERED]).values()) == 0
