"""Runs of `splatfacto-pixel`: the model of one rank with the same cells, on with as many ranks bit for bit, and with
others."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ns_multigpu.cells.options import PixelOptions
from ns_multigpu.core.dist.collectives import all_gather_objects
from ns_multigpu.core.dist.world import World
from ns_multigpu.plugin.blocks.host_cameras import HostCameras
from ns_multigpu.plugin.checkpoint import rows as checkpoint_rows
from tests.lib.ranks import run_ranks
from tests.lib.resuming import DENSIFIERS, Model, differing, everything, in_double, part_of, whole, without_rates
from tests.lib.training_run import follow
from tests.plugin.splats.test_locality_run import FUSED, MODEL, rows_of

pytestmark = pytest.mark.slow

STEPS, SAVED, VIEWS, CELLS = 24, 12, 2, 3
OTHERS = {"two ranks": (2, "pixel"), "one rank": (1, "pixel"), "ranges": (2, "tile")}


def train_all(world: World, capture: Path, out: Path, densifier: str, boundary_mode: Any) -> dict[str, Any]:
    """Return differences between runs, on rank 0. `points` are the final numbers of each rank."""
    checkpoint_rows.BLOCK = 7
    report: dict[str, Any] = {}
    models: dict[str, Model] = {}
    own: dict[str, Model] = {}

    def run(name: str, size: int, strategy: str, **more: Any) -> None:
        part = part_of(world, size)
        if part is not None:
            options = {"views_per_step": VIEWS, "morton_order": True, "fused_steps": "never", "keep_checkpoints": 0}
            options |= {**DENSIFIERS[densifier], **more}
            if strategy == "pixel":
                options["pixel"] = PixelOptions(cells=CELLS, imbalance=1.05, hide=True, crossing=boundary_mode)
            trainer = in_double(part, capture, out / name, STEPS, method=f"splatfacto-{strategy}", **options)
            models[name], own[name] = whole(trainer, part), everything(trainer)
            report[f"points {name}"] = all_gather_objects(trainer.pipeline.model.num_points, part)
            report[f"placings {name}"] = trainer.pipeline.strategy.placement.placings
        dist.barrier(group=world.control)

    run("three", 3, "pixel", steps_per_save=SAVED)
    run("alone", 1, "pixel")
    saved = out / "three/run/splatfacto-pixel/now/nerfstudio_models"
    load: dict[str, Any] = {"load_dir": saved, "load_step": SAVED}
    run("three again", 3, "pixel", **load)
    report["three again"] = differing(own["three again"], own["three"])
    for name, (size, strategy) in OTHERS.items():
        run(name, size, strategy, **load)
    if world.is_main:
        for name, like in (("alone", "three"), ("one rank", "two ranks")):
            report[name] = differing(without_rates(models[name]), without_rates(models[like]), 1e-7)
    return report


@pytest.mark.parametrize(("densifier", "boundary_mode"), [("splits", "none"), ("mcmc", "ghosts")])
def test_any_number_of_ranks_trains_the_model_of_one(
    tmp_path: Path, capture: Path, densifier: str, boundary_mode: str
) -> None:
    reports = run_ranks(train_all, 3, capture, tmp_path, densifier, boundary_mode)
    assert [report["three again"] for report in reports] == [[]] * 3, "as many ranks go on bit for bit"
    for name in ("alone", "one rank"):
        assert reports[0][name] == [], name
    points = {name: reports[0][f"points {name}"] for name in ("three", "alone", *OTHERS)}
    assert sum(points["three"]) == sum(points["alone"]) and sum(points["three"]) != 60
    assert min(points["three"]) > 0, "every cell has points"
    placings = {reports[0][f"placings {name}"] for name in ("three", "alone")}
    assert len(placings) == 1 and placings.pop() > 1, "cells were cut again, after the same refinements"


def fused(world: World, capture: Path, out: Path) -> dict[str, Any]:
    """Fused steps on these ranks, and what is logged of them."""
    options = FUSED | {"pipeline.pixel.cells": CELLS}
    trainer = follow(world, capture, out, options, 2 * STEPS, VIEWS, method="splatfacto-pixel", double=False)
    return {"rows": rows_of(trainer), "points": trainer.pipeline.model.total_points}


def test_fused_steps(tmp_path: Path, capture: Path) -> None:
    alone, several = (run_ranks(fused, n, capture, tmp_path / str(n))[0] for n in (1, 2))
    assert len(alone["rows"]) == len(several["rows"]) > 4
    for one, other in zip(several["rows"], alone["rows"], strict=True):
        assert one["main_loss"] == pytest.approx(other["main_loss"], rel=0.02), one["step"]
    for row in several["rows"]:
        assert 0.5 < row["gpus_at_work"] <= 1 and 0.5 < row["drawing_level"] <= 1 and 0 < row["pixels_in_sight"] <= 1
        assert row["pixels_in_sight"] == pytest.approx(alone["rows"][several["rows"].index(row)]["pixels_in_sight"])
    assert several["points"] == pytest.approx(alone["points"], rel=0.05)


POSES: dict[str, Any] = {
    MODEL + "camera_optimizer.mode": "SO3xR3", MODEL + "warmup_length": 1000, MODEL + "num_downscales": 0,
    "optimizers.camera_opt.scheduler": None, "optimizers.camera_opt.optimizer.lr": 2e-3,
    "optimizers.camera_opt.optimizer.eps": 1e-4, "pipeline.pixel.cells": CELLS,
}  # fmt: skip


def train_poses(world: World, capture: Path, out: Path, fused_steps: str) -> dict[str, Any]:
    """Return the trained corrections, and what plans of fused steps were made from."""
    followed: list[bool] = []
    correct = HostCameras.correct

    def corrected(self: HostCameras, corrections: Tensor, mode: Any) -> None:
        correct(self, corrections, mode)
        followed.append(bool((self(0, 1)[0].viewmat.ravel() - torch.from_numpy(self(0, 1)[1][:16])).abs().max() > 1e-4))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HostCameras, "correct", corrected)
        options = FUSED | POSES | {"fused_steps": fused_steps}
        trainer = follow(
            world, capture, out / fused_steps, options, STEPS, VIEWS, method="splatfacto-pixel", double=False
        )
    return {"corrections": trainer.pipeline.model.camera_optimizer.pose_adjustment.detach(), "followed": followed}


def test_fused_steps_train_poses(tmp_path: Path, capture: Path) -> None:
    """Plans follow the corrections from block to block; ordinary steps read them before each step."""
    expected = run_ranks(train_poses, 2, capture, tmp_path, "never")[0]["corrections"]
    assert float(expected.abs().max()) > 0.01
    for found in run_ranks(train_poses, 2, capture, tmp_path, "always"):
        torch.testing.assert_close(found["corrections"], expected, rtol=0.02, atol=2e-4)
        assert not found["followed"][0] and found["followed"][-1]
