"""MCMC in fused steps: noise and regularisation of ordinary ones, once a step, on any number of ranks."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from ns_multigpu.core.dist.world import World
from ns_multigpu.plugin.blocks import point_storage
from ns_multigpu.plugin.blocks.initial_capacity import InitialCapacity
from ns_multigpu.plugin.blocks.step_capacities import StepCapacities
from ns_multigpu.plugin.blocks.training import Training
from ns_multigpu.primitives.densify.mcmc import McmcDensifier
from ns_multigpu.primitives.gaussians.schema import ORDER
from tests.lib.ranks import run_ranks
from tests.lib.tile_training_run import MODEL, Outcome, furthest, train_model
from tests.lib.training_run import POINTS, follow, write_capture

pytestmark = pytest.mark.slow

IMAGES, VIEWS, AWAY = 48, 2, 2e-3
# Picks are made by sums of opacities in units of 2^-24, so rounding changes the draws: at first no point is picked.
STILL = {
    MODEL + "densifier": "mcmc", MODEL + "max_gaussians": POINTS, MODEL + "mcmc_min_opacity": 1e-5,
    MODEL + "noise_lr": 1e5, MODEL + "warmup_length": 4, MODEL + "refine_every": 8, MODEL + "sh_degree_interval": 12,
    MODEL + "num_downscales": 1, MODEL + "resolution_schedule": 20, MODEL + "mcmc_opacity_reg": 0.05,
    MODEL + "mcmc_scale_reg": 0.05, MODEL + "mcmc_whole_step_scale": 0.3,
    **{f"optimizers.{name}.optimizer.eps": 1e-4 for name in ORDER},
}  # fmt: skip
GROWING = {MODEL + "max_gaussians": 70, MODEL + "mcmc_min_opacity": 0.095}


def train(world: World, folder: Path, name: str, *, tile: bool = False, fused: str = "always", **more: Any) -> Outcome:
    options = {**STILL, "fused_steps": fused, **{MODEL + k: v for k, v in more.items()}}
    views = VIEWS if tile else VIEWS // world.size
    return train_model(world, tile, folder / "capture", folder / name, options, IMAGES // VIEWS, views, double=False)


def train_both(world: World, folder: Path) -> dict[bool, Outcome]:
    """Shards, and replicas where their number divides the batch."""
    found = {True: train(world, folder, f"tile-{world.size}", tile=True)}
    if VIEWS % world.size == 0:
        found[False] = train(world, folder, f"batch-{world.size}")
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mcmc")
    write_capture(folder / "capture", wide=False)
    return folder


@pytest.fixture(scope="module")
def ordinary(folder: Path) -> Outcome:
    return train(World.single(), folder, "ordinary", fused="never")


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_fused_run_equals_autograd_steps(ranks: int, folder: Path, ordinary: Outcome) -> None:
    for outcomes in run_ranks(train_both, ranks, folder):
        assert outcomes.keys() == ({True, False} if VIEWS % ranks == 0 else {True})
        for tile, found in outcomes.items():
            assert [count for _, count in found["points"]] == [POINTS * (1 if tile else ranks)] * 5
            away = furthest(found, ordinary)
            assert max(away.values()) < AWAY, away


def test_fused_run_without_noise_equals_autograd_steps(folder: Path) -> None:
    expected = train(World.single(), folder, "quiet-never", fused="never", noise_lr=0.0)
    away = furthest(train(World.single(), folder, "quiet-always", noise_lr=0.0), expected)
    assert max(away.values()) < AWAY, away


@pytest.mark.parametrize("option", ["noise_lr", "mcmc_opacity_reg", "mcmc_scale_reg", "mcmc_whole_step_scale"])
def test_each_part_matters(option: str, folder: Path, ordinary: Outcome) -> None:
    """A test that the comparison above would see it left out."""
    without = train(World.single(), folder, f"without-{option}", fused="never", **{option: 0.0})
    assert max(furthest(without, ordinary).values()) > 10 * AWAY


@pytest.mark.parametrize("tile", [False, True])
def test_noise_is_added_once_if_a_step_is_retried(
    tile: bool, folder: Path, ordinary: Outcome, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(InitialCapacity, "_guess", lambda self, pixels: (16, 16, 64))
    again: list[bool] = []
    learn = Training._learn

    def recorded(self: Any, status: Any, *feeds: Any) -> None:
        again.append(status.full)
        learn(self, status, *feeds)

    monkeypatch.setattr(Training, "_learn", recorded)
    found = train(World.single(), folder, f"small-{tile}", tile=tile)
    assert any(again), "a capacity must have been exceeded"
    away = furthest(found, ordinary)
    assert max(away.values()) < AWAY, away


@pytest.mark.parametrize("tile", [False, True])
def test_retried_block_relocates_once(tile: bool, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Relocations start before their block is known to be valid. Results equal those of large capacities bitwise."""
    options: dict[str, Any] = {"mcmc_min_opacity": GROWING[MODEL + "mcmc_min_opacity"], "mcmc_picks": "both"}
    enough = train(World.single(), folder, f"enough-{tile}", tile=tile, **options)
    learn, again = StepCapacities.learn, list[bool]()

    def forgets(self: StepCapacities, needed: Any, full: bool, images: int) -> None:
        """Start each block with small capacities."""
        learn(self, needed, full, images)
        again.append(full)
        if not full:
            self._now = (16, tuple(tuple(16 for _ in row) for row in self._now[1]), 64)  # type: ignore[index]

    monkeypatch.setattr(StepCapacities, "learn", forgets)
    monkeypatch.setattr(StepCapacities, "spare", lambda *_, **__: None)
    found = train(World.single(), folder, f"again-{tile}", tile=tile, **options)
    still = train(World.single(), folder, f"still-{tile}", tile=tile)
    assert sum(again) > len(again) // 3 and max(furthest(found, enough).values()) == 0.0
    assert found["points"] == enough["points"] and max(furthest(still, enough).values()) > 10 * AWAY, "some were moved"


@pytest.mark.parametrize("tile", [False, True])
def test_relocation_and_growth(tile: bool, folder: Path) -> None:
    """Rounding changes which points are picked, but not their number or their statistics."""
    go = partial(train, World.single(), folder, **{name[len(MODEL) :]: value for name, value in GROWING.items()})
    expected, found = go(f"never-{tile}", fused="never"), go(f"always-{tile}", tile=tile)
    counts = [count for _, count in expected["points"]]
    assert counts[0] > POINTS and counts[-1] == 70
    assert [count for _, count in found["points"]] == counts
    assert found["metrics"]["psnr"] == pytest.approx(expected["metrics"]["psnr"], abs=1.0)


def sums_of(fused: str, world: World, folder: Path, tile: bool) -> dict[str, Any]:
    """Return the statistics of this rank's Gaussians at the end of a run without refinements."""
    options = {
        **STILL, MODEL + "morton_order": True, MODEL + "mcmc_picks": "gradient", MODEL + "refine_every": 1000,
        "fused_steps": fused,
    }  # fmt: skip
    if tile:
        options["pipeline.views_per_step"] = VIEWS
    method = "splatfacto-tile" if tile else "splatfacto-batch"
    runs = folder / f"sums-{fused}-{world.size}-{tile}"
    views = VIEWS if tile else VIEWS // world.size
    trainer = follow(world, folder / "capture", runs, options, 6, views, method=method, double=False)
    return {name: value.clone() for name, value in trainer.pipeline.model.densifier_state.items()}


@pytest.mark.parametrize("tile", [False, True])
def test_picking_gradients_equal_those_of_autograd_steps(tile: bool, folder: Path) -> None:
    """On one rank, and as the sum over two, or side by side where each has a part."""
    expected = sums_of("never", World.single(), folder, tile)
    assert set(expected) == {"grad2d", "count"} and float(expected["grad2d"].sum()) > 0
    one = sums_of("always", World.single(), folder, tile)
    two = run_ranks(partial(sums_of, "always"), 2, folder, tile)
    for name, value in expected.items():
        both = torch.cat([part[name] for part in two]) if tile else two[0][name] + two[1][name]
        for found in (one[name], both):
            torch.testing.assert_close(found, value, rtol=1e-3, atol=1e-3 * float(value.max()))


@pytest.mark.parametrize("tile", [False, True])
@pytest.mark.parametrize("spared", [0, point_storage.MOST_SPARED])
def test_a_refinement_that_adds_none_leaves_the_step(
    tile: bool, spared: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model has no spare storage, except at image 40, where points are sorted again."""
    monkeypatch.setattr(point_storage, "MOST_SPARED", spared)
    made, usual = list[int](), Training._made

    def counted(self: Training, *given: Any) -> Any:
        made.append(1)
        return usual(self, *given)

    monkeypatch.setattr(Training, "_made", counted)
    monkeypatch.setattr(McmcDensifier, "_orders", lambda self, image: self.morton and image == 40)
    train(World.single(), folder, f"never-{tile}-{spared}", tile=tile, refine_every=1000)
    without = len(made)
    made.clear()
    train(World.single(), folder, f"often-{tile}-{spared}", tile=tile, mcmc_min_opacity=0.095)
    assert len(made) == without + (0 if spared else 1)
