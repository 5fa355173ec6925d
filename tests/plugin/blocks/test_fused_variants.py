"""Fused steps with options of model and capture learn what ordinary steps learn."""

from pathlib import Path
from typing import Any

import pytest

from ns_multigpu.core.dist.world import World
from tests.lib.ranks import run_ranks
from tests.lib.tile_training_run import MODEL, furthest
from tests.lib.training_run import write_capture
from tests.plugin.blocks.test_fused_photographs import train

VARIANTS: dict[str, dict[str, Any]] = {
    "plain colours": {MODEL + "sh_degree": 0},
}


@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS)
def test_fused_steps_learn_what_others_do(options: dict[str, Any], tmp_path: Path) -> None:
    write_capture(tmp_path / "capture")
    expected = train(World.single(), tmp_path, False, "never", more=options)
    assert len({count for _, count in expected["points"]}) == 2, "the model grew twice"
    alone = train(World.single(), tmp_path, False, "always", more=options)
    assert alone["replayed"] > 0
    for found in [alone, *run_ranks(train, 2, tmp_path, True, "always", False, options)]:
        assert found["points"] == expected["points"]
        # Ordinary steps make no moments of a parameter without numbers, such as the harmonics of plain colours.
        empty = [name for name, value in found["parameters"].items() if value.numel() == 0]
        for name in [n for n in found["moments"] if f"gauss_params.{n.split('.')[0]}" in empty]:
            del found["moments"][name]
        away = furthest(found, expected)
        assert max(away.values()) < 5e-3, away
        assert found["metrics"] == pytest.approx(expected["metrics"], rel=1e-3, nan_ok=True)
