"""Fused steps train pose corrections, gains and bilateral grids as ordinary steps do."""

from pathlib import Path
from typing import Any

import pytest

from ns_multigpu.core.dist.world import World
from tests.lib.ranks import run_ranks
from tests.lib.tile_training_run import MODEL, Outcome, furthest, train_model
from tests.lib.training_run import write_capture
from tests.plugin.blocks.test_fused_mcmc import STILL
from tests.plugin.blocks.test_fused_photographs import OPTIONS
from tests.plugin.blocks.tried_steps import start_with_small_capacity, take_from_graphs

STEPS, VIEWS = 10, 4
KINDS: dict[str, dict[str, Any]] = {
    "SO3xR3": {
        **OPTIONS, MODEL + "exposure": "gain", "optimizers.exposures.optimizer.eps": 1e-4,
        "optimizers.exposures.optimizer.lr": 1e-2,
    },
    "SE3": {
        **STILL, MODEL + "use_bilateral_grid": True, MODEL + "grid_shape": (4, 3, 2),
        "optimizers.bilateral_grid.scheduler": None, "optimizers.bilateral_grid.optimizer.eps": 1e-4,
        "optimizers.bilateral_grid.optimizer.lr": 1e-2,
    },
}  # fmt: skip


def train(world: World, folder: Path, mode: str, tile: bool, fused: str) -> Outcome:
    """Return a run's outcome. Fused steps are recorded, and the first exceed their capacities."""
    options = {
        **KINDS[mode], "fused_steps": fused, MODEL + "camera_optimizer.mode": mode,
        "optimizers.camera_opt.scheduler": None, "optimizers.camera_opt.optimizer.lr": 2e-3,
        "optimizers.camera_opt.optimizer.eps": 1e-4, MODEL + "camera_optimizer.rot_l2_penalty": 0.1,
    }  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        take_from_graphs(patch)
        start_with_small_capacity(patch)
        runs = folder / f"{mode}-{fused}-{tile}-{world.size}"
        views = VIEWS if tile else VIEWS // world.size
        return train_model(world, tile, folder / "capture", runs, options, STEPS, views, double=False)


@pytest.mark.parametrize(("mode", "tile"), [("SO3xR3", False), ("SE3", True)])
def test_fused_steps_learn_what_others_do(mode: str, tile: bool, tmp_path: Path) -> None:
    """Three views, so each batch has one twice; of different sizes, with alpha and masks."""
    write_capture(tmp_path / "capture", alpha=True, masks=True, train=3)
    expected = train(World.single(), tmp_path, mode, False, "never")
    poses = expected["parameters"]["camera_optimizer.pose_adjustment"]
    assert float(poses.abs().amax(1).min()) > 1e-3, "all poses have moved"
    if mode == "SE3":
        assert float(expected["parameters"]["bil_grids.grids"][:, 3].abs().max()) > 1e-2, "maps have changed"
    alone = train(World.single(), tmp_path, mode, tile, "always")
    for found in (alone, *run_ranks(train, 2, tmp_path, mode, tile, "always")):
        away = furthest(found, expected)
        assert max(away.values()) < 5e-3, away
        assert found["metrics"] == pytest.approx(expected["metrics"], rel=1e-3, nan_ok=True)
