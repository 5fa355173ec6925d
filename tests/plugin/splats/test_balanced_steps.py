"""Runs whose steps have several views: these see about as many seed points, the same on any number of ranks."""

from pathlib import Path
from typing import Any

import pytest
import torch

from ns_multigpu.core.assign.balanced_views import alike, works
from ns_multigpu.core.assign.view_sequence import ViewSequence
from ns_multigpu.core.dist.world import World
from ns_multigpu.plugin.splats import pipeline as pipelines
from tests.lib.ranks import run_ranks
from tests.lib.resuming import start

BATCH = 2


def views_of(trainer: Any, steps: int) -> list[list[int]]:
    """Return the views of each step, of all ranks."""
    data = trainer.pipeline.datamanager
    return [data.train_batch(step, trainer.pipeline.batch_size) for step in range(steps)]


def flat(steps: list[list[int]]) -> list[int]:
    return [view for step in steps for view in step]


def work_of(trainer: Any) -> list[float]:
    return works(trainer.pipeline.model.seed_points[0], trainer.pipeline._training_views())


def drawn(trainer: Any) -> tuple[list[int], int]:
    """Views of the first epoch in splatfacto's order, and how many there are."""
    data = trainer.pipeline.datamanager
    count, seed = len(data.train_dataset), data.config.train_cameras_sampling_seed
    return [ViewSequence(count, seed).at(place) for place in range(count)], count


def test_a_step_has_views_that_see_about_as_many_points(tmp_path: Path, capture: Path) -> None:
    trainer = start(World.single(), capture, tmp_path / "run", 8, BATCH)
    order, count = drawn(trainer)
    work = work_of(trainer)
    assert len(set(work)) > 1, "or there is nothing to choose"
    found = views_of(trainer, count // BATCH)
    assert flat(found) == alike(order, work, BATCH)
    assert flat(found) != order


def test_the_order_may_be_splatfactos(tmp_path: Path, capture: Path) -> None:
    for name, views, options in (("asked", BATCH, {"level_steps": False}), ("one", 1, {})):
        trainer = start(World.single(), capture, tmp_path / name, 8, views, **options)
        order, count = drawn(trainer)
        assert flat(views_of(trainer, count // views)) == order


@pytest.mark.parametrize("points", [None, 0])
def test_balanced_views_need_seed_points(tmp_path: Path, capture: Path, points: int | None) -> None:
    pipeline: Any = start(World.single(), capture, tmp_path / "run", 8, BATCH).pipeline
    assert pipeline._arranged() is not None
    pipeline.model.seed_points = None if points is None else (torch.empty(0, 3), torch.empty(0, 3))
    assert pipeline._arranged() is None


def train_all(world: World, capture: Path, out: Path) -> dict[str, Any]:
    """Return the views of each step on each rank, where only the first rank knows what views see."""
    if not world.is_main:
        pipelines.works = lambda *_: 1 / 0  # type: ignore[assignment]
    found = {}
    for method, options in (("splatfacto-batch", {}), ("splatfacto-tile", {"views_per_step": BATCH})):
        trainer = start(world, capture, out / method, 8, 1, method=method, **options)
        found[method] = views_of(trainer, 12)
    return found


def test_ranks_and_strategies_agree(tmp_path: Path, capture: Path) -> None:
    alone = start(World.single(), capture, tmp_path / "alone", 8, BATCH)
    steps = views_of(alone, 12)
    for found in run_ranks(train_all, BATCH, capture, tmp_path):
        assert found == {"splatfacto-batch": steps, "splatfacto-tile": steps}
