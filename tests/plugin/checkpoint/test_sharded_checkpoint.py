"""A model whose points are spread over ranks, saved as it lies and read back by any number of ranks."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ns_multigpu.core.assign.placement import Sharded
from ns_multigpu.core.dist.world import World
from ns_multigpu.plugin.checkpoint import rows as checkpoint_rows
from ns_multigpu.plugin.checkpoint.atomic_save import open_checkpoint
from ns_multigpu.plugin.checkpoint.own_rows import SavedRows, own_rows
from ns_multigpu.plugin.checkpoint.saved_tensors import SavedTensors
from ns_multigpu.plugin.checkpoint.sharded_state import split_state
from ns_multigpu.plugin.checkpoint.verify import states_folder
from tests.lib.ranks import run_ranks
from tests.lib.saving import ALONE, files_of
from tests.lib.sharding import (
    CPU,
    assert_rows,
    carried,
    load,
    of_points,
    rows_of,
    save_sharded,
    whole_model,
    whole_state,
)

# ---- any number of ranks ----


def test_carried_over_any_numbers_of_ranks(tmp_path: Path) -> None:
    models = tmp_path / "nerfstudio_models"
    assert run_ranks(carried, 4, models, [20, 0, 16, 1], 1) == [[0, 20], [20, 20], [20, 36], [36, 37]]
    assert run_ranks(carried, 1, models, None, 2) == [[0, 37]]
    assert run_ranks(carried, 3, models, None, 3) == [[0, 12], [12, 24], [24, 37]]
    assert run_ranks(carried, 4, models, None, 4) == [[0, 9], [9, 18], [18, 27], [27, 37]]
    rows, model, state = load(ALONE, models, 4)
    assert_rows(rows, model, state)


def test_as_many_ranks_take_what_they_had(tmp_path: Path) -> None:
    """Only so do they go on exactly as they would have."""
    models = tmp_path / "nerfstudio_models"
    for step, (counts, ranges, sizes) in enumerate(
        [
            ([20, 0, 17], [range(20), range(20, 20), range(20, 37)], [20, 0, 17]),
            ([10, 0, 2, 25], [range(12), range(12, 24), range(24, 37)], [12, 12, 13]),
        ]
    ):
        run_ranks(carried, len(counts), models, counts, step)
        pipeline = open_checkpoint(models / f"step-{step:09d}.ckpt", ALONE).content["pipeline"]
        for rank, rows in enumerate(ranges):
            world = World(rank, 3, rank, 3, CPU)
            assert own_rows(pipeline, models, Sharded(), world) == SavedRows(37, rows, sizes)


# ---- nothing is gathered ----


def _big_save(world: World, models: Path, count: int) -> tuple[int, int, int]:
    """Bytes that this rank sent, that it wrote, and that its rows have."""
    sent = 0

    def counted(original: Callable[..., Any], place: int) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal sent
            value = args[place] if len(args) > place else kwargs["tensor"]
            for tensor in value if isinstance(value, list) else [value]:
                sent += tensor.nbytes if isinstance(tensor, Tensor) else 0
            return original(*args, **kwargs)

        return call

    # Everything that torch.distributed.checkpoint and we send goes through these.
    places = {"all_gather": 1, "broadcast": 0, "gather": 0, "scatter": 0, "all_reduce": 0, "send": 0}
    modules = [dist, dist.distributed_c10d]
    for name, place in places.items():
        replacement = counted(getattr(dist, name), place)
        for module in modules:
            setattr(module, name, replacement)
    for name in ("all_to_all_single", "all_gather_into_tensor", "reduce_scatter_tensor"):
        for module in modules:
            setattr(module, name, None)
    checkpoint_rows.BLOCK = 5000
    rows = rows_of(world, [count - 7000, 7000])
    model, state = whole_model(count), whole_state(count)
    state.pop("optimizers/camera_opt/0/exp_avg")
    assert save_sharded(world, models, 1, rows, model, state) == ""
    mine = [value[rows.start : rows.stop] for value in model.values()]
    mine += [value[rows.start : rows.stop] for name, value in state.items() if of_points(name)]
    (folder,) = states_folder(models).iterdir()
    return sent, (folder / f"__{world.rank}_0.distcp").stat().st_size, sum(value.nbytes for value in mine)


def test_each_rank_writes_its_own_rows_and_sends_none(tmp_path: Path) -> None:
    results = run_ranks(_big_save, 2, tmp_path / "nerfstudio_models", 20_000)
    assert results[0][2] > 1.8 * results[1][2] > 10**6
    for sent, written, own in results:
        assert 0 < sent < 0.1 * own, "plans and names only"
        assert own <= written < 1.15 * own, "its rows, no other's, and what torch adds to a block"


def test_only_the_files_of_own_rows_are_read(tmp_path: Path) -> None:
    models = tmp_path / "nerfstudio_models"
    run_ranks(carried, 3, models, [12, 12, 13], 1)
    _, *files = files_of(models, 1)
    folder = files[0].parent
    saved = SavedTensors(folder)
    for other in (0, 2):
        (folder / f"__{other}_0.distcp").unlink()
    into = torch.empty(10, 3)
    saved.read_rows({"model/means": into}, 13)
    assert torch.equal(into, whole_model()["means"][13:23])
    with pytest.raises(FileNotFoundError, match="__2_0"):
        saved.read_rows({"model/means": into}, 15)
    with pytest.raises(ValueError, match=r"rows 30 to 40 .* are not in it"):
        saved.read_rows({"model/means": into}, 30)


def test_rows_are_read_in_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At most one block of a file is in host memory at a time, although one rank wrote all rows."""
    models = tmp_path / "nerfstudio_models"
    monkeypatch.setattr(checkpoint_rows, "BLOCK", 5)
    carried(ALONE, models, [37], 1)
    sizes: list[int] = []
    original = torch.load

    def load_part(*args: Any, **kwargs: Any) -> Any:
        value = original(*args, **kwargs)
        sizes.append(value.untyped_storage().nbytes())
        return value

    monkeypatch.setattr(torch, "load", load_part)
    into = torch.empty(12, 3)
    SavedTensors(files_of(models, 1)[1].parent).read_rows({"model/means": into}, 13)
    assert torch.equal(into, whole_model()["means"][13:25])
    assert sizes == [5 * 3 * 4] * 3


def test_moments_without_rows_are_no_shard() -> None:
    with pytest.raises(ValueError, match=r"optimizers/means/0/factors has 3 rows for 37 points"):
        split_state({"optimizers/means/0/factors": torch.ones(3)}, whole_model(), ALONE)
