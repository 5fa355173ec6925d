"""Metrics of fused steps equal those of autograd steps, also of batches and on several ranks."""

import json
from pathlib import Path

import pytest

from ns_multigpu.core.dist.world import World
from tests.lib.ranks import run_ranks
from tests.lib.training_run import follow


def logged(world: World, capture: Path, runs: Path, method: str, fused: str) -> dict[str, float]:
    """Return the first row of the log, of a batch of two views."""
    options = {
        "fused_steps": fused, "logging.steps_per_log": 1, "pipeline.views_per_step": 2,
        "pipeline.model.num_downscales": 0, "pipeline.model.background_color": "black",
    }  # fmt: skip
    trainer = follow(world, capture, runs / f"{method}-{fused}", options, 2, 1, method=method, double=False)
    if not world.is_main:
        return {}
    return json.loads((trainer.base_dir / "metrics.jsonl").read_text().splitlines()[0])


@pytest.mark.parametrize("method", ["splatfacto-batch", "splatfacto-tile"])
def test_the_psnr_of_a_batch(method: str, tmp_path: Path, capture: Path) -> None:
    rows = [
        run_ranks(logged, ranks, capture, tmp_path / f"runs-{ranks}", method, fused)[0]
        for ranks, fused in ((1, "never"), (1, "always"), (2, "always"))
    ]
    for row in rows[1:]:
        assert row["psnr"] == pytest.approx(rows[0]["psnr"], abs=1e-3)
        assert row["main_loss"] == pytest.approx(rows[0]["main_loss"], rel=1e-4)
