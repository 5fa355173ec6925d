"""Fused steps learn what ordinary steps learn: with options of models, of photographs and of parameters of views."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ns_multigpu.core.dist.world import World
from ns_multigpu.core.step.patch_losses import loss_weights
from ns_multigpu.plugin.blocks.graphs import StepGraphs
from ns_multigpu.plugin.blocks.step_inputs import StepInputsMaker
from ns_multigpu.plugin.model.splat_model import SplatModel
from ns_multigpu.primitives.gaussians.schema import ORDER
from tests.lib.ranks import run_ranks
from tests.lib.reconstruction import add_model
from tests.lib.tile_training_run import MODEL, Outcome, furthest, train_model
from tests.lib.training_run import add_maps, facing_normals, sky_mask, write_capture
from tests.plugin.blocks.test_fused_mcmc import STILL
from tests.plugin.blocks.tried_steps import start_with_small_capacity, take_from_graphs
from tests.plugin.splats.test_options import COMMON

# Half the resolution up to image 20, and refinements. Adam's eps keeps gradients of rounding errors small.
OPTIONS: dict[str, Any] = {
    **COMMON, MODEL + "num_downscales": 1, MODEL + "resolution_schedule": 20,
    **{f"optimizers.{name}.optimizer.eps": 1e-5 for name in ORDER},
}  # fmt: skip
STEPS, VIEWS = 16, 4


def train(
    world: World, folder: Path, tile: bool, fused: str, kept: bool = True, more: dict[str, Any] | None = None
) -> Outcome:
    """Return a run's outcome, with the number of its replayed steps. Images are `kept` on the device if they fit.
    `more` options come after OPTIONS."""
    replayed, replay = [0], StepGraphs._replay

    def counted(self: StepGraphs, *args: Any) -> Any:
        replayed[0] += 1
        return replay(self, *args)

    runs = folder / f"{fused}-{tile}-{kept}"
    with pytest.MonkeyPatch.context() as patch:
        take_from_graphs(patch, kept)
        patch.setattr(StepGraphs, "_replay", counted)
        options = {**OPTIONS, **(more or {}), "fused_steps": fused}
        found = train_model(world, tile, folder / "capture", runs, options, STEPS, VIEWS, double=False)
    return {**found, "replayed": replayed[0]}


VARIANTS: dict[str, dict[str, Any]] = {
    "plain colours, and an option of MCMC, without effect": {
        MODEL + "sh_degree": 0,
        MODEL + "mcmc_whole_step_scale": 0.5,
    },
    "views smaller than SSIM's window": {MODEL + "ssim_lambda": 0.0, MODEL + "num_downscales": 2},
    "no needles": {MODEL + "use_scale_regularization": True, MODEL + "max_gauss_ratio": 1.05},
    "a loss of depth from image 24 on": {MODEL + "depth_loss": 0.3, MODEL + "depth_loss_start": 24},
    "normal maps": {MODEL + "normal_map_loss": 0.1},
    "a sky": {MODEL + "sky_loss": 0.3, MODEL + "num_downscales": 1},
}
NAN_IMAGES = (45, 61)
"""Images after the last refinement: skipped steps count for densification if they are not fused."""


@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS)
def test_fused_steps_learn_what_others_do(options: dict[str, Any], tmp_path: Path) -> None:
    write_capture(tmp_path / "capture", wide=False)
    add_model(tmp_path / "capture")
    add_maps(tmp_path / "capture", "normal_file_path", facing_normals)
    add_maps(tmp_path / "capture", "sky_mask_path", sky_mask)
    expected = train(World.single(), tmp_path, False, "never", more=options)
    assert len({count for _, count in expected["points"]}) == 2, "the model grew twice"
    alone = train(World.single(), tmp_path, False, "always", more=options)
    assert alone["replayed"] > 0
    for found in [alone, *run_ranks(train, 2, tmp_path, True, "always", False, options)]:
        check_outcome(found, expected)


def check_outcome(found: Outcome, expected: Outcome) -> None:
    assert found["points"] == expected["points"]
    # Ordinary steps make no moments of a parameter without numbers, such as the harmonics of plain colours.
    empty = [name for name, value in found["parameters"].items() if value.numel() == 0]
    for name in [n for n in found["moments"] if f"gauss_params.{n.split('.')[0]}" in empty]:
        del found["moments"][name]
    away = furthest(found, expected)
    assert max(away.values()) < 5e-3, away
    assert found["metrics"] == pytest.approx(expected["metrics"], rel=1e-3, nan_ok=True)


@pytest.mark.parametrize("layers", [{}, {"alpha": True, "masks": True}], ids=str)
def test_photographs(layers: dict[str, bool], tmp_path: Path) -> None:
    write_capture(tmp_path / "capture", **layers)
    expected = train(World.single(), tmp_path, False, "never")
    assert len({count for _, count in expected["points"]}) == 2, "the model grew twice"
    runs = [train(World.single(), tmp_path, False, "always"), *run_ranks(train, 2, tmp_path, True, "always", False)]
    for found in runs:
        check_outcome(found, expected)


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


def train_of_views(world: World, folder: Path, mode: str, tile: bool, fused: str) -> Outcome:
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
        return train_model(world, tile, folder / "capture", runs, options, 10, views, double=False)


@pytest.mark.parametrize(("mode", "tile"), [("SO3xR3", False), ("SE3", True)])
def test_parameters_of_views(mode: str, tile: bool, tmp_path: Path) -> None:
    """Three views, so each batch has one twice; of different sizes, with alpha and masks."""
    write_capture(tmp_path / "capture", alpha=True, masks=True, train=3)
    expected = train_of_views(World.single(), tmp_path, mode, False, "never")
    poses = expected["parameters"]["camera_optimizer.pose_adjustment"]
    assert float(poses.abs().amax(1).min()) > 1e-3, "all poses have moved"
    if mode == "SE3":
        assert float(expected["parameters"]["bil_grids.grids"][:, 3].abs().max()) > 1e-2, "maps have changed"
    alone = train_of_views(World.single(), tmp_path, mode, tile, "always")
    for found in (alone, *run_ranks(train_of_views, 2, tmp_path, mode, tile, "always")):
        check_outcome(found, {**expected, "points": found["points"]})  # replicas count theirs together


def test_views_without_a_window_have_no_weight_of_it() -> None:
    by_l1, by_ssim = loss_weights(10, 20, 2, 0.0, torch.device("cpu"))
    assert float(by_l1) == pytest.approx(1 / 1200) and float(by_ssim) == 0


def train_over_nan(world: World, folder: Path, tile: bool, fused: str) -> Outcome:
    """Return the outcome of a run in which the backgrounds of two images, one of the last step, are NaN."""
    drawn, drawn_on_host = SplatModel._training_background, StepInputsMaker._background

    def background(self: SplatModel, position: int) -> Tensor:
        return drawn(self, position) * (math.nan if self.step + position in NAN_IMAGES else 1)

    def background_on_host(self: StepInputsMaker, image: int) -> Any:
        return drawn_on_host(self, image) * (math.nan if image in NAN_IMAGES else 1)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SplatModel, "_training_background", background)
        patch.setattr(StepInputsMaker, "_background", background_on_host)
        return train(world, folder, tile, fused, more={"on_nonfinite": "skip", "steps_per_numeric_check": 8})


def test_fused_steps_skip_what_others_skip(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_capture(tmp_path / "capture")
    expected = train_over_nan(World.single(), tmp_path, False, "never")
    assert float(expected["moments"]["means.step"]) == STEPS - len(NAN_IMAGES)
    assert "2 step(s) left out" in capsys.readouterr().out
    alone = train_over_nan(World.single(), tmp_path, False, "always")
    assert "2 step(s) left out" in capsys.readouterr().out
    for found in [alone, *run_ranks(train_over_nan, 2, tmp_path, True, "always")]:
        check_outcome(found, expected)
