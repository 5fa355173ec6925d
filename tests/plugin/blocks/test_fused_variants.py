"""Fused steps with options of model and capture learn what ordinary steps learn."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ns_multigpu.core.dist.world import World
from ns_multigpu.core.step.patch_losses import loss_weights
from ns_multigpu.plugin.blocks.step_inputs import StepInputsMaker
from ns_multigpu.plugin.model.splat_model import SplatModel
from tests.lib.ranks import run_ranks
from tests.lib.reconstruction import add_model
from tests.lib.tile_training_run import MODEL, Outcome, furthest
from tests.lib.training_run import write_capture
from tests.plugin.blocks.test_fused_photographs import STEPS, train

VARIANTS: dict[str, dict[str, Any]] = {
    "plain colours": {MODEL + "sh_degree": 0},
    "views smaller than SSIM's window": {MODEL + "ssim_lambda": 0.0, MODEL + "num_downscales": 2},
    "no needles": {MODEL + "use_scale_regularization": True, MODEL + "max_gauss_ratio": 1.05},
    "a loss of depth from image 24 on": {MODEL + "depth_loss": 0.3, MODEL + "depth_loss_start": 24},
}
NAN_IMAGES = (45, 61)
"""Images after the last refinement: skipped steps count for densification if they are not fused."""


@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS)
def test_fused_steps_learn_what_others_do(options: dict[str, Any], tmp_path: Path) -> None:
    write_capture(tmp_path / "capture", wide=False)
    add_model(tmp_path / "capture")
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
