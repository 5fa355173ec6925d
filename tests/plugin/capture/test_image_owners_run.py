"""Owners of images do not change a training run, bit for bit; nor does memory, also with masks and alpha."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ns_multigpu.core.dist.world import World
from ns_multigpu.plugin.splats.pipeline import DistributedPipeline
from tests.lib.ranks import run_ranks
from tests.lib.training_run import follow, write_capture

pytestmark = pytest.mark.slow

MODEL = "pipeline.model."
COMMON = {
    MODEL + "warmup_length": 4, MODEL + "refine_every": 8, MODEL + "densify_grad_thresh": 0.001,
    MODEL + "num_downscales": 1, MODEL + "resolution_schedule": 8,
}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "masks and alpha": {},
    "floats, on demand": {
        "pipeline.datamanager.cache_images_type": "float32", "pipeline.datamanager.image_memory_gb": 85_000 / 1e9,
    },
    "fused": {"fused_steps": "always"},
}  # fmt: skip
OWNERS = {"dealt": None, "given": [1, 1, 0, 2, 0, 0, 2, 1]}
RANKS = 3


def _train(world: World, folder: Path, case: str, owners: list[int] | None, runs: str) -> dict[str, Tensor]:
    """Return the model in the end: 12 steps of two views, whose resolution doubles after 4."""
    prepare = DistributedPipeline.prepare_training

    def held(self: DistributedPipeline) -> None:
        if owners is not None:
            self.datamanager.hold_by(owners)
        prepare(self)

    DistributedPipeline.prepare_training = held  # type: ignore[method-assign]
    try:
        capture = folder / ("plain" if case == "fused" else "both")
        options = {**COMMON, **CASES[case], "pipeline.views_per_step": 2}
        trainer = follow(world, capture, folder / runs, options, 12, 1, method="splatfacto-tile", double=False)
    finally:
        DistributedPipeline.prepare_training = prepare
    share = trainer.pipeline.datamanager.train_share
    assert owners is None or share.owners == owners
    return {name: value.detach().clone() for name, value in trainer.pipeline.model.named_parameters()}


def _all(world: World, folder: Path) -> dict[str, dict[str, dict[str, Tensor]]]:
    return {
        case: {name: _train(world, folder, case, owners, f"{case}-{name}") for name, owners in OWNERS.items()}
        for case in CASES
    }


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, dict[str, dict[str, Tensor]]]]:
    """By rank, what it had in the end, by case and owners: starting workers costs more than training."""
    folder = tmp_path_factory.mktemp("homes")
    write_capture(folder / "both", alpha=True, masks=True)
    write_capture(folder / "plain", wide=False)
    return run_ranks(_all, RANKS, folder)


@pytest.mark.parametrize("case", CASES)
def test_the_same_wherever_images_are_held(trained: list[dict[str, dict[str, dict[str, Tensor]]]], case: str) -> None:
    for rank in trained:
        expected = rank[case]["dealt"]
        for found in (rank[case][name] for name in OWNERS):
            assert found.keys() == expected.keys()
            assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_memory_and_floats_change_nothing(trained: list[dict[str, dict[str, dict[str, Tensor]]]]) -> None:
    for rank in trained:
        kept, late = (rank[case]["given"] for case in ("masks and alpha", "floats, on demand"))
        assert all(torch.equal(late[name], value) for name, value in kept.items())
