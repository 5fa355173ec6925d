"""Runs of `nerfacto-xl` save, end and go on as those of splats do: it is one run shell."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from ns_multigpu.core.dist.world import World
from ns_multigpu.plugin.checkpoint.training_state import put_generators
from ns_multigpu.plugin.faults.errors import InputError, SaveFailed
from ns_multigpu.plugin.run.config import read_config
from ns_multigpu.plugin.run.trainer import DistributedTrainer
from tests.lib.saving import disk, steps_in
from tests.plugin.checkpoint.test_last_save import full
from tests.plugin.radiance.run.test_radiance_run import RAYS, configured, trained

RUN = Path("run", "nerfacto-xl", "now")


def test_a_run_is_as_long_as_its_images_have_pixels(capture: Path, tmp_path: Path, capsys: Any) -> None:
    config = configured(capture, tmp_path, steps=100)
    config.max_num_images = 1
    trainer = trained(World.single(), config)
    steps = math.ceil(28 * 24 / RAYS)
    assert trainer.step + 1 == steps and steps_in(trainer.checkpoint_dir) == [steps - 1]
    said = capsys.readouterr().out
    assert "dB (SSIM" in said and f"--max-num-images {math.ceil(2 * steps * RAYS / (28 * 24))}" in said
    assert "ns-viewer --load-config" in said


def test_unsaved_steps_are_reported(capture: Path, tmp_path: Path) -> None:
    config = configured(capture, tmp_path)
    config.save_retry_seconds = 0.0
    with disk(full(tmp_path)), pytest.raises(SaveFailed, match=r"Lost: the field after 3 steps \(3 cells, \d+ MB\)"):
        trained(World.single(), config)


def test_losses_are_not_scaled(capture: Path, tmp_path: Path) -> None:
    config = configured(capture, tmp_path)
    config.use_grad_scaler = True
    with pytest.raises(InputError, match="--use-grad-scaler True: networks run in bfloat16"):
        trained(World.single(), config)


def test_a_config_of_an_older_run_is_read(capture: Path, tmp_path: Path) -> None:
    """It names a trainer of its own, and options of splats as they were hidden then."""
    text = yaml.dump(configured(capture, tmp_path))
    now = f"!!python/name:{DistributedTrainer.__module__}.DistributedTrainer"
    assert now in text
    text = text.replace(now, "!!python/name:ns_multigpu.plugin.radiance.trainer.RadianceTrainer")
    text += "batch_scaling: auto\nrates_at_end: 1.0\nrecipe: splatfacto\n"
    (tmp_path / "config.yml").write_text(text)
    config = read_config(tmp_path / "config.yml")
    assert config._target is DistributedTrainer and type(config) is type(configured(capture, tmp_path))


def test_checkpoints_without_generators_keep_the_present_ones() -> None:
    before = torch.get_rng_state()
    put_generators(["model/cells.0.x"], lambda names: pytest.fail(f"reads {names}"), World.single())
    assert torch.equal(torch.get_rng_state(), before)
