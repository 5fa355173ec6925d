"""The guards on the real trainer: a view whose loss is not finite, and memory that runs out, on one and two ranks."""

from pathlib import Path
from typing import Any

import pytest
import torch

import ns_multigpu.plugin.model.splat_model as splat_model
from ns_multigpu.core.dist.world import World
from ns_multigpu.plugin.faults.signals import NonFiniteError, RanOutOfMemory
from tests.lib.ranks import run_ranks
from tests.lib.training_run import follow

BAD = 5


def _train(world: World, capture: Path, runs: Path, options: dict[str, Any], what: str) -> tuple[str, bool, list[int]]:
    """Train over all 8 views, and return the error, whether parameters are finite, and the steps Adam has counted."""
    usual = splat_model.photometric_loss

    def loss(rgb: torch.Tensor, target: torch.Tensor, patch: Any, view: Any, weight: float) -> torch.Tensor:
        value = usual(rgb, target, patch, view, weight)
        if view.index != BAD:
            return value
        if what == "memory":
            raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 9.00 GiB.")
        return value * float("nan")

    splat_model.photometric_loss = loss
    said = ""
    trainer = None
    try:
        options = {"pipeline.model.num_downscales": 0, **options}
        trainer = follow(world, capture, runs, options, 8 // world.size, 1)
    except (NonFiniteError, RanOutOfMemory) as error:
        said = str(error)
    finally:
        splat_model.photometric_loss = usual
    if trainer is None:
        return said, False, []
    finite = all(bool(p.isfinite().all()) for p in trainer.pipeline.model.gauss_params.values())
    counts = [int(s["step"]) for o in trainer.optimizers.optimizers.values() for s in o.state.values() if "step" in s]
    return said, finite, counts


@pytest.mark.parametrize("size", [1, 2])
def test_a_bad_view_is_named(capture: Path, tmp_path: Path, size: int) -> None:
    results = run_ranks(_train, size, capture, tmp_path, {"steps_per_numeric_check": 4}, "nan")
    said = results[0][0]
    assert all(result[0] == said for result in results)
    assert f"loss of view {BAD} ({BAD}.png); gradient of" in said and "gauss_params.means" in said
    assert "parameter gauss_params.means" in said, "without skipping it went into the model"


@pytest.mark.parametrize("size", [1, 2])
def test_a_bad_view_is_skipped(capture: Path, tmp_path: Path, size: int) -> None:
    options = {"steps_per_numeric_check": 8 // size, "on_nonfinite": "skip"}
    for said, finite, counts in run_ranks(_train, size, capture, tmp_path, options, "nan"):
        assert said == "" and finite
        assert set(counts) == {8 // size - 1}, "one step was left out, on every rank"


def test_lack_of_memory_names_its_circumstances(capture: Path, tmp_path: Path) -> None:
    ((said, _, _),) = run_ranks(_train, 1, capture, tmp_path, {}, "memory")
    assert "Rank 0 ran out of memory" in said and "60 Gaussians" in said and "images of up to 28x24" in said
