"""Sharded checkpoints that are damaged, incomplete or could not be written."""

import shutil
from pathlib import Path

import pytest
import torch

from ns_multigpu.core.dist.world import World
from ns_multigpu.plugin.checkpoint.atomic_save import open_checkpoint
from ns_multigpu.plugin.checkpoint.sharded_state import (
    SavedPoints,
    counts_in,
    shapes_in,
)
from ns_multigpu.plugin.checkpoint.verify import SHARDS, latest_checkpoint, read_checkpoint_file, step_of
from ns_multigpu.plugin.faults.errors import InputError
from tests.lib.ranks import run_ranks
from tests.lib.saving import ALONE, copied, files_of, write
from tests.lib.sharding import carried, whole_model


def _twice(world: World, models: Path) -> None:
    for step in (1, 2):
        carried(world, models, [30, 7], step)


@pytest.fixture(scope="module")
def saved_twice(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sharded") / "run" / "nerfstudio_models"
    run_ranks(_twice, 2, folder)
    return folder


@pytest.fixture
def models(saved_twice: Path, tmp_path: Path) -> Path:
    """Return the folder of a run with sharded checkpoints of steps 1 and 2, by two ranks."""
    return copied(saved_twice, tmp_path / "run")


def test_damaged_shards_are_refused_and_named(models: Path) -> None:
    path = models / "step-000000002.ckpt"
    shard = next(file for file in files_of(models, 2) if file.name == "__1_0.distcp")
    data = shard.read_bytes()
    shard.write_bytes(data[:-1])
    pipeline = read_checkpoint_file(path)["pipeline"]
    with pytest.raises(InputError, match=r"__1_0[.]distcp has been truncated"):
        SavedPoints.of(pipeline, models)
    with pytest.raises(InputError, match=r"__1_0[.]distcp has been truncated.* --load-step 1"):
        open_checkpoint(path, ALONE)
    messages: list[str] = []
    newest = latest_checkpoint(models, messages.append)
    assert newest is not None and step_of(newest) == 1 and "__1_0.distcp" in messages[0]
    shard.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(InputError, match=r"__1_0[.]distcp has been altered"):
        open_checkpoint(path, ALONE)
    shard.unlink()
    with pytest.raises(InputError, match=r"__1_0[.]distcp is missing"):
        SavedPoints.of(pipeline, models)


def test_shards_that_are_not_there(models: Path, tmp_path: Path) -> None:
    pipeline = read_checkpoint_file(models / "step-000000001.ckpt")["pipeline"]
    with pytest.raises(InputError, match="nothing says where it was read from"):
        SavedPoints.of(pipeline, None)
    alone = tmp_path / "copied" / "nerfstudio_models"
    shutil.copytree(models, alone)
    with pytest.raises(InputError, match=r"Gaussians .* are missing.*nerfstudio_models_state.*whole folder"):
        SavedPoints.of(pipeline, alone)
    moved = tmp_path / "moved"
    shutil.move(models.parent, moved)
    points = SavedPoints.of(pipeline, moved / models.name)
    assert torch.equal(points.read(["means"], range(37))["means"], whole_model()["means"])
    other = pipeline | {SHARDS: pipeline[SHARDS] | {"shapes": {"means": [38, 3]}}}
    with pytest.raises(InputError, match="other Gaussians than its checkpoint says"):
        SavedPoints.of(other, moved / models.name)


def test_sharded_with_ordinary_checkpoints(models: Path) -> None:
    assert write(models, 3) == ""
    assert counts_in(read_checkpoint_file(models / "step-000000003.ckpt")["pipeline"]) == [20]
    assert latest_checkpoint(models) == models / "step-000000003.ckpt"


def test_contents_of_the_ckpt_file(models: Path) -> None:
    pipeline = read_checkpoint_file(models / "step-000000001.ckpt")["pipeline"]
    assert set(pipeline) == {"_model.pose", SHARDS}
    assert pipeline[SHARDS]["counts"] == [30, 7]
    assert pipeline[SHARDS]["state"] == files_of(models, 1)[1].parent.name
    assert shapes_in(pipeline)["_model.gauss_params.features_rest"] == (37, 0, 3)
