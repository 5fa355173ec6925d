"""The assignment has the demand of all fused steps at the end of a block."""

from pathlib import Path

from ns_multigpu.core.dist.world import World
from tests.lib.ranks import run_ranks
from tests.lib.training_run import TRAIN, follow


def known(world: World, capture: Path, runs: Path) -> dict[int, list[int]]:
    options = {
        "fused_steps": "always", "steps_per_checksum": 0, "pipeline.views_per_step": 1,
        "pipeline.model.num_downscales": 0,
    }  # fmt: skip
    trainer = follow(world, capture, runs, options, TRAIN, 1, method="splatfacto-tile", double=False)
    rows = trainer.pipeline.strategy.assignment.state()
    return {row[0]: row[1:] for row in rows if row[0] >= 0}


def test_counts_of_each_view_are_known(tmp_path: Path, capture: Path) -> None:
    """Each is seen once. What is known goes into checkpoints: it must not depend on what was on its way."""
    one, other = run_ranks(known, 2, capture, tmp_path / "runs")
    assert one == other and one.keys() == set(range(TRAIN))
    assert all(len(counts) == 2 and sum(counts) > 0 for counts in one.values()), "24 pixels are two rows of tiles"
