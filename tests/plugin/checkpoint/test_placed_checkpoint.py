"""A model whose owners do not hold ranges, saved as it lies, and read by place."""

from pathlib import Path
from typing import Any

import pytest
import torch

from ns_multigpu.core.assign.shard_index import ShardIndex
from ns_multigpu.core.dist.world import World
from ns_multigpu.plugin.checkpoint import rows as checkpoint_rows
from ns_multigpu.plugin.checkpoint.saved_tensors import SavedTensors
from ns_multigpu.plugin.checkpoint.sharded_state import PLACES, split_state
from tests.lib.placements import HalfSpaces
from tests.lib.ranks import run_ranks
from tests.lib.saving import ALONE, files_of
from tests.lib.sharding import assert_rows, load_placed, rows_of, save_sharded, whole_model, whole_state


def _slabs(world: World) -> torch.Tensor:
    return torch.where(HalfSpaces().owners(whole_model()["means"], world.size) == world.rank)[0]


def _save(world: World, models: Path) -> None:
    checkpoint_rows.BLOCK = 5
    assert save_sharded(world, models, 1, _slabs(world), whole_model(), whole_state(), HalfSpaces()) == ""


def _load(world: World, models: Path) -> list[int]:
    """Compare what is read with the whole model's rows at these places, and return them."""
    checkpoint_rows.BLOCK = 5
    own, model, state = load_placed(world, models, 1, HalfSpaces())
    assert own.places is not None
    assert_rows(own.places, model, state)
    return own.places.tolist()


def _save_ranges(world: World, models: Path) -> None:
    rows = rows_of(world, [20, 0, 17])
    assert save_sharded(world, models, 1, rows, whole_model(), whole_state()) == ""


def test_resume_from_ranges(tmp_path: Path) -> None:
    """Although there are as many ranks as wrote them. test_locality_run resumes from places."""
    models = tmp_path / "nerfstudio_models"
    run_ranks(_save_ranges, 3, models)
    assert PLACES not in SavedTensors(files_of(models, 1)[1].parent).names
    slabs = [_slabs(World(rank, 3, rank, 3, ALONE.device)).tolist() for rank in range(3)]
    assert run_ranks(_load, 3, models) == slabs


def test_places_of_other_points_are_not_saved() -> None:
    shard_index = ShardIndex(HalfSpaces(), torch.arange(3))
    with pytest.raises(RuntimeError, match="rank 0 has 37 points, and the places of 3"):
        split_state({}, whole_model(), ALONE, shard_index)


def test_rows_here_and_there(tmp_path: Path) -> None:
    run_ranks(_save, 3, tmp_path / "nerfstudio_models")
    tensors = SavedTensors(files_of(tmp_path / "nerfstudio_models", 1)[1].parent)
    at: Any = tensors.read([PLACES])[PLACES]
    some = torch.tensor([30, 2, 2, 36, 0])
    assert torch.equal(tensors.rows_of("model/means", some), whole_model()["means"][at[some]])
    double = tensors.rows_of("model/means", some, dtype=torch.float64)
    assert double.dtype == torch.float64 and torch.equal(double.float(), whole_model()["means"][at[some]])
    assert tensors.rows_of("model/means", some[:0]).shape == (0, 3)
