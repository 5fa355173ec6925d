"""A small model whose points are spread over ranks: saved from where they lie, and loaded, as the trainer does both."""

from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from ns_multigpu.core.assign.placement import Placement, Sharded
from ns_multigpu.core.assign.shard_index import ShardIndex
from ns_multigpu.core.dist.world import World
from ns_multigpu.plugin.checkpoint import rows as checkpoint_rows
from ns_multigpu.plugin.checkpoint.atomic_save import open_checkpoint, save
from ns_multigpu.plugin.checkpoint.own_rows import SavedRows, own_rows
from ns_multigpu.plugin.checkpoint.sharded_state import (
    OwnMoments,
    load_points,
    put_statistics,
    split_state,
    without_points,
)
from ns_multigpu.plugin.checkpoint.training_state import put_densifier
from ns_multigpu.plugin.checkpoint.verify import SHARDS

POINTS = 37
CPU = torch.device("cpu")


def whole_model(count: int = POINTS) -> dict[str, Tensor]:
    """Parameters of some model; those of higher harmonics are empty, as with degree 0."""
    g = torch.Generator().manual_seed(4)
    shapes = {"means": (3,), "quats": (4,), "opacities": (1,), "features_dc": (3,), "features_rest": (0, 3)}
    return {name: torch.randn(count, *shape, generator=g) for name, shape in shapes.items()}


def whole_state(count: int = POINTS) -> dict[str, Tensor]:
    """Moments and statistics that belong to it."""
    g = torch.Generator().manual_seed(5)
    state: dict[str, Tensor] = {"optimizers/camera_opt/0/exp_avg": torch.randn(count, 6, generator=g)}
    for name, value in whole_model(count).items():
        for moment in ("exp_avg", "exp_avg_sq"):
            state[f"optimizers/{name}/0/{moment}"] = torch.randn(value.shape, generator=g)
        state[f"optimizers/{name}/0/step"] = torch.tensor(7.0)
    seen = torch.randint(0, 9, (count,), generator=g).float()
    return {**state, "densifier/grad2d": torch.randn(count, generator=g), "densifier/count": seen}


def of_points(name: str) -> bool:
    return name.startswith("densifier/") or (not name.endswith("/step") and "camera" not in name)


def save_sharded(
    world: World, models: Path, step: int, rows: range | Tensor, model: dict[str, Tensor], state: dict[str, Tensor],
    placement: Placement | None = None,
) -> str:  # fmt: skip
    """Return a save as the trainer makes it, from a rank that holds `rows` of a model: a range, or places by a
    placement."""
    some = slice(rows.start, rows.stop) if isinstance(rows, range) else rows
    own = {name: value[some] for name, value in model.items()}
    tensors = {name: value[some] if of_points(name) else value for name, value in state.items()}
    tensors = {k.replace("densifier/", f"rank{world.rank}/densifier/"): v for k, v in tensors.items()}
    if not len(rows):  # optimizers do not step empty parameters, and nothing was counted
        tensors = {name: value for name, value in tensors.items() if "camera" in name}
    tensors[f"rank{world.rank}/generators/torch"] = torch.tensor([world.rank])
    shard_index = None if placement is None or isinstance(rows, range) else ShardIndex(placement, rows)
    tensors, marker = split_state(tensors, own, world, shard_index)
    pipeline = {f"_model.gauss_params.{name}": value for name, value in own.items()} | {"_model.pose": torch.ones(6)}
    return save(models, step, lambda: without_points(pipeline, marker), tensors, {"ranks": world.size}, world)


def rows_of(world: World, counts: list[int]) -> range:
    return range(sum(counts[: world.rank]), sum(counts[: world.rank + 1]))


def load(world: World, models: Path, step: int) -> tuple[range, dict[str, Tensor], dict[str, Any]]:
    """As `load_placed`, of a checkpoint whose rows are in order, with ranges of them."""
    own, model, state = load_placed(world, models, step, Sharded())
    assert isinstance(own.rows, range) and own.places is None
    return own.rows, model, state


def load_placed(
    world: World, models: Path, step: int, placement: Placement
) -> tuple[SavedRows, dict[str, Tensor], dict[str, Any]]:
    """This rank's rows, parameters, moments and statistics, as the trainer takes them from a checkpoint."""
    opened = open_checkpoint(models / f"step-{step:09d}.ckpt", world)
    pipeline, saved = opened.content["pipeline"], opened.tensors
    assert saved is not None
    own = own_rows(pipeline, models, placement, world)
    rows, total = own.rows, own.total
    assert total == POINTS and own.counts[world.rank] == len(rows)
    params = torch.nn.ParameterDict({n: torch.nn.Parameter(v[:2].clone()) for n, v in whole_model().items()})

    def put(state: dict[str, Any]) -> None:
        assert SHARDS not in state and torch.equal(state["_model.pose"], torch.ones(6))
        for name in params:
            params[name] = torch.nn.Parameter(state[f"_model.gauss_params.{name}"].clone())

    load_points(put, params, pipeline, models, rows, CPU)
    moments = OwnMoments(saved, {}, list(params), total, rows, CPU)
    state: dict[str, Any] = {name: moments[name] for name in moments}
    statistics: dict[str, Any] = {"grad2d": None}
    left = put_statistics(statistics, saved, total, rows, True, world, CPU)
    put_densifier(statistics, left, saved.read, opened.values["ranks"], world, CPU)
    state.update({f"densifier/{name}": value for name, value in statistics.items()})
    return own, {name: value.detach() for name, value in params.items()}, state


def assert_rows(rows: range | Tensor, model: dict[str, Tensor], state: dict[str, Any]) -> None:
    expected = {**whole_model(), **whole_state()}
    found = {**model, **state}
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        if of_points(name):
            value = value[rows.start : rows.stop] if isinstance(rows, range) else value[rows]
        assert found[name].dtype == value.dtype and torch.equal(found[name], value), name


@mock.patch.object(checkpoint_rows, "BLOCK", 5)
def carried(world: World, models: Path, counts: list[int] | None, step: int) -> list[int]:
    """Save with `counts` points by rank, or loads step - 1 and saves what was loaded; both in small blocks."""
    if counts is not None:
        rows, model, state = rows_of(world, counts), whole_model(), whole_state()
        assert save_sharded(world, models, step, rows, model, state) == ""
        return [rows.start, rows.stop]
    rows, model, state = load(world, models, step - 1)
    assert_rows(rows, model, state)
    # As if the whole were made of what this rank holds, so that only those rows can be written.
    wide = {n: torch.full((POINTS, *v.shape[1:]), torch.nan) for n, v in {**model, **state}.items() if v.dim()}
    for name, value in {**model, **state}.items():
        if value.dim() and of_points(name):
            wide[name][rows.start : rows.stop] = value
        else:
            wide[name] = value
    model = {name: wide[name] for name in model}
    assert save_sharded(world, models, step, rows, model, {name: wide[name] for name in state}) == ""
    return [rows.start, rows.stop]
