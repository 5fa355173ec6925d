"""Runs with `--pipeline.model.depth-loss`: what is logged, and that they go on from a checkpoint bit for bit."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from nerfstudio.cameras.camera_optimizers import CameraOptimizerConfig

from ns_multigpu.core.dist.world import World
from ns_multigpu.core.step.depth_loss import depth_loss
from ns_multigpu.plugin.faults.errors import InputError
from ns_multigpu.plugin.model.options import SplatModelConfig
from ns_multigpu.plugin.model.surfaces import check_primitive
from tests.lib.reconstruction import add_model
from tests.lib.resuming import differing, everything, middle_of, start, went_on
from tests.lib.training_run import write_capture

WEIGHT, START = 0.3, 4


def begin(folder: Path, name: str, steps: int, primitive: str = "2dgs", **options: Any) -> Any:
    still = CameraOptimizerConfig(mode="off")
    options = {"depth_loss": WEIGHT, "depth_loss_start": START, "camera_optimizer": still, **options}
    return start(World.single(), folder / "capture", folder / name, steps, 2, primitive=primitive, **options)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_capture(tmp_path / "capture", wide=False)
    add_model(tmp_path / "capture")
    return tmp_path


@pytest.mark.parametrize("primitive", ["2dgs", "3dgs"])
def test_depth_loss_is_logged_from_its_start(folder: Path, primitive: str) -> None:
    trainer = begin(folder, "run", 1, primitive)
    pipeline = trainer.pipeline
    pipeline.train()
    pipeline.model.step = START - 2
    assert "depth_loss" not in pipeline.get_train_loss_dict(1)[1]
    pipeline.model.step = START
    losses = pipeline.get_train_loss_dict(2)[1]
    views, drawn = pipeline.model.views, pipeline.model.rendering.pixels
    assert len(views) == len(drawn) == 2 and all(len(view.observations.ids) > 20 for view in views)
    expected = WEIGHT * sum(float(depth_loss(p, views[p.patch.view]).detach()) for p in drawn) / 2
    assert expected > 0.01 and float(losses["depth_loss"].detach()) == pytest.approx(expected)
    total = trainer.train_iteration(2)[0]
    assert float(total) == pytest.approx(sum(float(value.detach()) for value in losses.values()))


@pytest.mark.parametrize("fused", ["always", "never"])
def test_run_resumes_bit_for_bit(folder: Path, fused: str) -> None:
    whole, resumed = went_on(partial(begin, folder), fused_steps=fused)
    assert differing(everything(whole), everything(resumed)) == []
    saved = middle_of(whole)
    other = begin(folder, "other", 8, load_checkpoint=saved, fused_steps=fused, depth_loss_start=10**6)
    other.train()
    assert "model/gauss_params.means" in differing(everything(whole), everything(other)), "it matters"


@pytest.mark.parametrize("primitive", ["2dgs", "3dgs", "4dgs", "convex"])
def test_a_weight_that_is_none_is_refused(primitive: Any) -> None:
    for weight in (-0.1, float("nan"), float("inf")):
        with pytest.raises(InputError, match=f"--pipeline.model.depth-loss {weight}: give a weight of 0 or more"):
            check_primitive(SplatModelConfig(primitive=primitive, depth_loss=weight), "tile")
    check_primitive(SplatModelConfig(primitive=primitive, depth_loss=0.01, normal_loss=0.0), "pixel")
