"""A model whose owners do not hold ranges, saved as it lies: any ranks, placements and replicas read it by place."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from ns_multigpu.core.assign.placement import Placement, Sharded
from ns_multigpu.core.assign.shard_index import ShardIndex
from ns_multigpu.core.dist.world import World
from ns_multigpu.plugin.checkpoint import rows as checkpoint_rows
from ns_multigpu.plugin.checkpoint.atomic_save import open_checkpoint
from ns_multigpu.plugin.checkpoint.saved_tensors import SavedTensors
from ns_multigpu.plugin.checkpoint.sharded_state import PLACES, split_state
from tests.lib.placements import HalfSpaces, Scattered
from tests.lib.ranks import run_ranks
from tests.lib.saving import ALONE, files_of
from tests.lib.sharding import (
    POINTS,
    assert_rows,
    load_placed,
    rows_of,
    save_sharded,
    whole_model,
    whole_state,
)

Read = tuple[list[int], list[int] | None]
"""The places that a rank read, and those that it keeps."""


def _slabs(world: World) -> torch.Tensor:
    return torch.where(HalfSpaces().owners(whole_model()["means"], world.size) == world.rank)[0]


def _save(world: World, models: Path) -> list[int]:
    checkpoint_rows.BLOCK = 5
    mine = _slabs(world)
    assert save_sharded(world, models, 1, mine, whole_model(), whole_state(), HalfSpaces()) == ""
    return mine.tolist()


def _load(world: World, models: Path, placement: Placement | None) -> Read:
    """Compare what is read with the whole model's rows at these places."""
    checkpoint_rows.BLOCK = 5
    own, model, state = load_placed(world, models, 1, placement)
    if placement is None:
        places = torch.arange(POINTS)
    elif own.places is not None:
        places = own.places
    else:
        places = torch.arange(sum(own.counts[: world.rank]), sum(own.counts[: world.rank + 1]))
    if placement is None and not world.is_main:  # replicas ask for the sum of statistics
        state |= {name: whole_state()[name] for name in state if name.startswith("densifier/")}
    assert_rows(places, model, state)
    return places.tolist(), None if own.places is None else own.places.tolist()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[int]]]:
    models = tmp_path_factory.mktemp("placed") / "nerfstudio_models"
    return models, run_ranks(_save, 3, models)


def test_as_many_ranks_with_it_take_what_they_had(saved: tuple[Path, list[list[int]]]) -> None:
    models, mine = saved
    assert run_ranks(_load, 3, models, HalfSpaces()) == [(places, places) for places in mine]
    assert all(len(places) > 2 and places[-1] - places[0] >= len(places) for places in mine)
    marker = open_checkpoint(models / "step-000000001.ckpt", ALONE).content["pipeline"]["ns_multigpu.shards"]
    assert marker["placement"] == "HalfSpaces"


@pytest.mark.parametrize("size", [1, 2])
def test_other_world_size_distributes_points_again(saved: tuple[Path, list[list[int]]], size: int) -> None:
    slabs = [_slabs(World(rank, size, rank, size, ALONE.device)).tolist() for rank in range(size)]
    assert run_ranks(_load, size, saved[0], HalfSpaces()) == [(places, places) for places in slabs]


def test_another_placement_distributes_points_again(saved: tuple[Path, list[list[int]]]) -> None:
    bounds = [0, 12, 24, 37]
    ranges = [(list(range(a, b)), None) for a, b in pairwise(bounds)]
    assert run_ranks(_load, 3, saved[0], Sharded()) == ranges
    scattered = run_ranks(_load, 3, saved[0], Scattered())  # which begins with the same half-spaces
    assert [places for places, _ in scattered] == saved[1]


def test_replicas_read_all_in_order(saved: tuple[Path, list[list[int]]]) -> None:
    assert run_ranks(_load, 2, saved[0], None) == [(list(range(POINTS)), None)] * 2


def _save_ranges(world: World, models: Path) -> None:
    rows = rows_of(world, [20, 0, 17])
    assert save_sharded(world, models, 1, rows, whole_model(), whole_state()) == ""


def test_resume_from_ranges(tmp_path: Path) -> None:
    """Although there are as many ranks as wrote them."""
    models = tmp_path / "nerfstudio_models"
    run_ranks(_save_ranges, 3, models)
    assert PLACES not in SavedTensors(files_of(models, 1)[1].parent).names
    slabs = [_slabs(World(rank, 3, rank, 3, ALONE.device)).tolist() for rank in range(3)]
    assert run_ranks(_load, 3, models, HalfSpaces()) == [(places, places) for places in slabs]


def test_places_of_other_points_are_not_saved() -> None:
    shard_index = ShardIndex(HalfSpaces(), torch.arange(3))
    with pytest.raises(RuntimeError, match="rank 0 has 37 points, and the places of 3"):
        split_state({}, whole_model(), ALONE, shard_index)


def test_rows_here_and_there(saved: tuple[Path, list[list[int]]]) -> None:
    tensors = SavedTensors(files_of(saved[0], 1)[1].parent)
    at: Any = tensors.read([PLACES])[PLACES]
    some = torch.tensor([30, 2, 2, 36, 0])
    assert torch.equal(tensors.rows_of("model/means", some), whole_model()["means"][at[some]])
    double = tensors.rows_of("model/means", some, dtype=torch.float64)
    assert double.dtype == torch.float64 and torch.equal(double.float(), whole_model()["means"][at[some]])
    assert tensors.rows_of("model/means", some[:0]).shape == (0, 3)
