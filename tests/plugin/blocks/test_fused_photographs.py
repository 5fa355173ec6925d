"""Fused steps of photographs that differ in size, have alpha channels and masks learn what ordinary steps learn."""

from pathlib import Path
from typing import Any

import pytest

from ns_multigpu.core.dist.world import World
from ns_multigpu.plugin.blocks.graphs import StepGraphs
from ns_multigpu.primitives.gaussians.schema import ORDER
from tests.lib.ranks import run_ranks
from tests.lib.tile_training_run import MODEL, Outcome, furthest, train_model
from tests.lib.training_run import write_capture
from tests.plugin.blocks.tried_steps import take_from_graphs
from tests.plugin.train.test_options import COMMON

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


@pytest.mark.parametrize("layers", [{}, {"alpha": True, "masks": True}], ids=str)
def test_fused_steps_learn_what_others_do(layers: dict[str, bool], tmp_path: Path) -> None:
    write_capture(tmp_path / "capture", **layers)
    expected = train(World.single(), tmp_path, False, "never")
    assert len({count for _, count in expected["points"]}) == 2, "the model grew twice"
    runs = [train(World.single(), tmp_path, False, "always"), *run_ranks(train, 2, tmp_path, True, "always", False)]
    for found in runs:
        assert found["points"] == expected["points"]
        away = furthest(found, expected)
        assert max(away.values()) < 5e-3, away
        assert found["metrics"] == pytest.approx(expected["metrics"], rel=1e-3, nan_ok=True)
