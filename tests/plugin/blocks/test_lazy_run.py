"""A run with deferred steps equals the run without, at the eps of training.

With an eps of 1e-15 Adam turns a gradient of pure rounding into a full step. So both runs sum in the same order. They
differ only in when invisible points are updated.
"""

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from ns_multigpu.core.dist.world import World
from ns_multigpu.plugin.blocks import training
from ns_multigpu.primitives.gaussians.schema import ORDER
from tests.lib.tile_training_run import MODEL, furthest, train_model

pytestmark = pytest.mark.slow

STEPS, EPS, AWAY = 24, 1e-15, 5e-5
OPTIONS: dict[str, Any] = {
    "fused_steps": "always", "steps_per_checksum": 0, MODEL + "num_downscales": 0, MODEL + "warmup_length": 4,
    MODEL + "background_color": "black", MODEL + "refine_every": 8, MODEL + "reset_alpha_every": 100,
    **{f"optimizers.{name}.optimizer.eps": EPS for name in ORDER},
    MODEL + "camera_optimizer.mode": "SO3xR3", "optimizers.camera_opt.scheduler": None,
    MODEL + "densifier": "mcmc", MODEL + "noise_lr": 0.0, MODEL + "mcmc_min_opacity": 0.095,
    MODEL + "max_gaussians": 70, MODEL + "mcmc_opacity_reg": 0.05, MODEL + "mcmc_scale_reg": 0.05,
}  # fmt: skip


@pytest.mark.parametrize("tile", [False, True])
def test_deferred_steps_equal_immediate_steps(tile: bool, tmp_path: Path, capture: Path) -> None:
    """Of MCMC without noise: regularised, relocated and grown."""
    behind: list[int] = []
    flush = training.Step.flush

    def watched(step: Any) -> None:
        lazy = step._model.lazy
        behind.append(0 if lazy is None else int((lazy.last < lazy.steps).sum()))
        flush(step)

    def trained(name: str) -> Any:
        return train_model(World.single(), tile, capture, tmp_path / name, OPTIONS, STEPS, 2, double=False)

    with patch.object(training.Step, "flush", watched):
        lazy = trained("lazy")
    with patch.object(training, "lazy_serves", lambda *_: False):
        dense = trained("dense")
    assert max(behind) > 0 and len(behind) < STEPS, "no step was deferred, or blocks had one step each"
    assert lazy["points"][-1][1] == 70
    away = furthest(lazy, dense)
    assert max(away.values()) < AWAY, away
