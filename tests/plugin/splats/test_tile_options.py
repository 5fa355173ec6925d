"""Splatfacto's options with sharded points: rows of test_options' table, and options of our own.

Each row is trained with `tile` on two ranks and must follow one rank with `batch`, points in their order. What cannot
work is refused before the first step. docs/use/options.md lists the rows.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ns_multigpu.core.dist.world import World
from ns_multigpu.plugin.faults.errors import InputError
from tests.lib.ranks import run_ranks
from tests.lib.tile_training_run import Outcome, furthest, train_model
from tests.lib.training_run import POINTS, follow, write_capture
from tests.plugin.splats.test_options import BATCH, CAPTURES, COMMON, MODEL, OPTIONS, STEPS

RANKS = 2
TABLE = {
    name: OPTIONS[name]
    for name in (
        "defaults (absgrad, random background, mixed sizes)",
        "densifier mcmc",
        "split-screen-size, cull-screen-size, stop-screen-size-at",
        "camera-optimizer SO3xR3",
        "use-bilateral-grid",
        "exposure gain",
        "masks",
        "RGBA images with masks, resolution schedule",
        "rasterize-mode antialiased",
        "use-scale-regularization, max-gauss-ratio",
        "random-init, num-random, random-scale",
        "output-depth-during-training, color-corrected-metrics, cache-images-type float32",
        "optimizers' max-norm (gradient clipping)",
    )
}
OWN: dict[str, dict[str, Any]] = {
    "max-gaussians": {MODEL + "max_gaussians": 150},
    "rebalance-above": {MODEL + "rebalance_above": 1.0},
}
ROWS = {**TABLE, **OWN}

FUSED = {"fused_steps": "always"}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "peer memory on CPUs": (
        {**FUSED, "capture": "one size", "pipeline.transport": "peer"},
        "^--pipeline.transport peer: .*computes on cpu; peer memory takes GPUs",
    ),
    "peer memory in ordinary steps": (
        {"pipeline.transport": "peer"}, "^--pipeline.transport peer: that is for the fused steps .* are not fused",
    ),
    "merge-path sort in ordinary steps": (
        {"pipeline.tile_lists": "sort"}, "^--pipeline.tile-lists sort: that is for the fused steps .* are not fused",
    ),
    "a compact state in ordinary steps": (
        {"capture": "one size", MODEL + "optimizer_state": "compact"},
        "^--pipeline.model.optimizer-state compact: .* are not fused: on a CPU they are only with --fused-steps always",
    ),
    "fused steps with clipped gradients": (
        {**FUSED, **OPTIONS["optimizers' max-norm (gradient clipping)"]},
        "^--fused-steps always: steps cannot be fused, for gradients are clipped",
    ),
    "mcmc above its cap": (
        {**OPTIONS["densifier mcmc"], MODEL + "max_gaussians": POINTS - 1},
        f"{POINTS} Gaussians, more than --pipeline.model.max-gaussians {POINTS - 1}",
    ),
    "no views": ({"pipeline.views_per_step": 0}, "^--pipeline.views-per-step 0: at least one view a step"),
}  # fmt: skip


def train(world: World, folder: Path, name: str, *, tile: bool) -> Outcome:
    options = {**COMMON, **ROWS[name]}
    capture = folder / options.pop("capture", "plain").replace(" ", "-")
    runs = folder / f"{'tile' if tile else 'batch'}-{list(ROWS).index(name)}"
    return train_model(world, tile, capture, runs, options, STEPS, BATCH)


def refusal(world: World, folder: Path, name: str) -> str:
    options = {**COMMON, "pipeline.views_per_step": BATCH, **REFUSED[name][0]}
    capture = folder / options.pop("capture", "plain").replace(" ", "-")
    runs = folder / f"refused-{list(REFUSED).index(name)}"
    try:
        trainer = follow(world, capture, runs, options, 1, 1, method="splatfacto-tile", double=False)
    except InputError as error:
        return str(error)
    return f"took {trainer.steps_taken} step(s)"


def train_all(world: World, folder: Path) -> tuple[dict[str, Outcome], dict[str, str]]:
    """Return all runs, or the error messages, by row: starting workers costs more than training."""
    outcomes = {name: train(world, folder, name, tile=True) for name in ROWS}
    return outcomes, {name: refusal(world, folder, name) for name in REFUSED}


Runs = tuple[dict[str, Outcome], list[tuple[dict[str, Outcome], dict[str, str]]]]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    """Yield `batch`'s outcomes by row, and of each rank with `tile` its outcomes and what it refused."""
    folder = tmp_path_factory.mktemp("tile-options")
    for name, kind in CAPTURES.items():
        write_capture(folder / name.replace(" ", "-"), **kind)
    batch = {name: train(World.single(), folder, name, tile=False) for name in ROWS}
    yield batch, run_ranks(train_all, RANKS, folder)


@pytest.mark.slow
@pytest.mark.parametrize("name", ROWS)
def test_two_ranks_follow_one_with_batch(runs: Runs, name: str) -> None:
    batch, ranks = runs
    expected = batch[name]
    assert expected["points"] and expected["points"][-1][1] != POINTS, "the number of points must have changed"
    for outcomes, _ in ranks:
        found = outcomes[name]
        assert found["points"] == expected["points"]
        away = furthest(found, expected)
        assert max(away.values()) < 1e-8, away
        assert found["without gradient"] == expected["without gradient"] == []
        assert found["metrics"] == pytest.approx(expected["metrics"], rel=1e-4, nan_ok=True)
        assert min(found["shards"]) > 0


@pytest.mark.slow
def test_options_of_our_own_were_at_work(runs: Runs) -> None:
    (outcomes, _), (usual, *_) = runs[1][0], TABLE
    assert outcomes[usual]["points"][-1][1] > 150 >= outcomes["max-gaussians"]["points"][-1][1]
    left, cut = outcomes[usual], outcomes["rebalance-above"]
    assert cut["points"] == left["points"]
    assert sum(cut["rebalanced"]) > sum(left["rebalanced"]), "ranges were to be cut again"


@pytest.mark.slow
@pytest.mark.parametrize("name", REFUSED)
def test_invalid_options_are_refused_on_every_rank(runs: Runs, name: str) -> None:
    for _, said in runs[1]:
        assert re.search(REFUSED[name][1], said[name]), said[name]


def test_documented() -> None:
    """docs/use/options.md lists the rows above, in the same order."""
    text = (Path(__file__).parents[3] / "docs" / "use" / "options.md").read_text(encoding="utf8")
    section = text.split("## Tested with `splatfacto-tile`")[1].split("\n## ")[0]
    assert [line[2:] for line in section.splitlines() if line.startswith("- ")] == list(ROWS)
